"""The manifest of a dump: its fields, and how to read it from JSON that may be hostile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from attn_bridge import backends
from attn_bridge.whole_files import JsonObject

from ..pairing import Cut, Match, Pairing, Tensor
from ..samples.sampling import FIRST, Planned
from ..sides.arrays import DTYPES, numpy_dtype
from ..sides.subject import SideWeight, Submodule
from ..sides.tables import Tables

Item = TypeVar("Item")
"""The type that a reader of a field returns."""

SCHEMA = 3
"""Version of the format of manifests; others are refused."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One call of a submodule: which one, its position, and how many arrays went in and came out."""

    path: str
    number: int
    order: int
    inputs: int
    outputs: int


@dataclasses.dataclass
class DumpManifest:
    """The contents of ``dump.json``.

    Attributes:
        framework: ``torch`` or ``flax``.
        kind: module or function, and of which library; see `Subject`.
        name: class of the module.
        dtype: dtype of most of its weights.
        device: where it ran.
        dtypes: precisions that it ran in.
        modes: modes that it ran in.
        seeds: number of draws.
        first_seed: the first seed.
        argument_names: names of the positional arguments of a call.
        positional: how many arrays were given by position.
        keywords: names of the arrays that were given by keyword.
        constants: keyword arguments other than arrays.
        outputs: path in the return value, shape and dtype of every output.
        parameters: the parameters, running statistics and carried state by name.
        state: the state that is not carried by name.
        modules: the submodules, the module itself first.
        settings: path -> the numeric settings of a submodule.
        unreached: branches that were not run.
        lacks: why float64 results are missing, "" if they exist.
        unstable: how the module is not deterministic, "" where it is.
        notes: remarks for the reader.
        noise: precision -> variation -> how far the module is from itself.
        floors: precision -> tensor -> the same in units of the last place.
        perturbed: the same where inputs and weights were moved by one ulp; filled without float64 only.
        probes: precision -> position of a sample -> kind of probe -> tensor -> how far it moved (rms, largest); see
            `probes`.
        tables: precision -> the tables of the module, where recorded.
        reach: parameters whose gradient is zero -> whether they are used, and whether a change changes the output.
        like: digest of the torch dump whose weights were used, "" for the module's own.
        transfer: whether the module's own weights were replaced by those, too.
        pairing: the paired parameters, in a dump made with `like`.
        dropped: side, name and reason of the weights that such a pairing leaves out.
        uses: name of a weight -> position of its first operation that depends on the inputs; empty if unknown.
        calls: position of a sample -> the calls of submodules that were recorded on it, in order.
        environment: versions and precision switches.
        samples: the samples, in order.
        digests: path in the folder -> SHA-256 of the file.
    """

    framework: backends.Framework
    kind: str
    name: str
    dtype: str
    device: str
    dtypes: list[str]
    modes: list[str]
    seeds: int
    first_seed: int
    argument_names: list[str]
    positional: int
    keywords: list[str]
    constants: dict[str, object]
    outputs: list[tuple[str, tuple[int, ...], str]]
    parameters: dict[str, SideWeight]
    state: dict[str, SideWeight]
    modules: list[Submodule]
    settings: dict[str, dict[str, float]]
    unreached: list[str]
    lacks: str = ""
    unstable: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    noise: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    floors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    perturbed: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    probes: dict[str, dict[str, dict[str, dict[str, tuple[float, float]]]]] = dataclasses.field(default_factory=dict)
    tables: dict[str, Tables] = dataclasses.field(default_factory=dict)
    reach: dict[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)
    like: str = ""
    transfer: bool = True
    pairing: list[Match] = dataclasses.field(default_factory=list)
    dropped: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    uses: dict[str, int] = dataclasses.field(default_factory=dict)
    calls: dict[str, list[Recorded]] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    samples: list[Planned] = dataclasses.field(default_factory=list)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)


def parse(data: object) -> DumpManifest:
    """Return the manifest that JSON data holds; raises ValueError, TypeError or KeyError where it holds none."""
    if not isinstance(data, dict):
        raise ValueError("it holds no object")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema ({data.get('schema')}) must be {SCHEMA}")
    fields = dataclasses.fields(DumpManifest)
    missing = [one.name for one in fields if one.name not in data]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    read: dict[str, Callable[[Any], object]] = {
        "framework": _one_of("torch", "flax"),
        "dtype": _dtype,
        "dtypes": _list(_one_of(*DTYPES)),
        "modes": _list(_one_of("eager", "jit")),
        "outputs": _list(lambda field: (_text_of(field[0]), tuple(_list(_whole)(field[1])), _dtype(field[2]))),
        "seeds": _whole,
        "first_seed": _whole,
        "positional": _whole,
        "constants": _dict(_constant),
        "parameters": _dict(_parameter),
        "state": _dict(_parameter),
        "modules": _list(lambda field: Submodule(_text_of(field["path"]), _text_of(field["type"]))),
        "settings": _dict(_dict(_number)),
        **dict.fromkeys(("noise", "floors", "perturbed"), _dict(_dict(_number))),
        "probes": _dict(_dict(_dict(_dict(lambda pair: (_number(pair[0]), _number(pair[1])))))),
        "tables": _dict(lambda field: Tables(_whole(field["count"]), _list(_number)(field["values"]))),
        "reach": _dict(lambda pair: (_flag(pair[0]), _flag(pair[1]))),
        "transfer": _flag,
        "pairing": _list(_match),
        "dropped": _list(lambda field: (_one_of("first", "second")(field[0]), _text_of(field[1]), _text_of(field[2]))),
        "uses": _dict(_whole),
        "calls": _dict(_list(_recorded)),
        "environment": _dict(_text_of),
        "samples": _list(_id),
        "digests": _dict(_text_of),
        **dict.fromkeys(("argument_names", "keywords", "unreached", "notes"), _list(_text_of)),
    }
    values: JsonObject = {}
    for field in fields:
        check: Callable[[Any], object] = read.get(field.name, _text_of)
        try:
            values[field.name] = check(data[field.name])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"{field.name} is not what a dump holds ({error})") from error
    manifest = DumpManifest(**values)
    _check(manifest)
    return manifest


def _check(manifest: DumpManifest) -> None:
    """Raise ValueError for a well-formed manifest whose fields contradict each other."""
    if not manifest.samples or manifest.samples[0] != FIRST:
        raise ValueError(f"samples do not begin with {tuple(FIRST)}")
    if len(set(manifest.samples)) < len(manifest.samples):
        raise ValueError("a sample is there twice")
    places = [place for place, _, _ in manifest.outputs]
    for what, some in (("dtypes", manifest.dtypes), ("modes", manifest.modes), ("outputs", places)):
        if not some or len(set(some)) < len(some):
            raise ValueError(f"{what} must hold at least one name, each once")
    paths = [one.path for one in manifest.modules]
    orphans = {path for i, path in enumerate(paths) if path and path.rpartition(".")[0] not in paths[:i]}
    if not paths or paths[0] or len(set(paths)) < len(paths) or (orphans and manifest.framework == "torch"):
        raise ValueError("modules are not a tree")
    doubles = manifest.parameters.keys() & manifest.state.keys()
    if doubles:
        raise ValueError(f"{min(doubles)} is among the parameters and in the state")
    if bool(manifest.like) != bool(manifest.pairing) and manifest.parameters:
        raise ValueError("like and pairing go together")
    Pairing(tuple(manifest.pairing))


def match_data(match: Match) -> dict[str, object]:
    """Return a pair of parameters as JSON-ready data."""

    def tensor(part: Tensor) -> dict[str, object]:
        cut = None if part.cut is None else [part.cut.offset, part.cut.strides]
        return {"name": part.name, "source": part.source, "shape": part.shape, "cut": cut}

    pattern = {"pattern": match.rule.pattern, "sizes": match.rule.sizes}
    return {"first": tensor(match.first), "second": tensor(match.second), **pattern, "how": match.how}


def _match(data: JsonObject) -> Match:
    from attn_bridge.weights import Rule

    rule = Rule("torch", "flax", _text_of(data["pattern"]), **_dict(_whole)(data["sizes"]))
    sides = [_tensor(data[side]) for side in ("first", "second")]
    if rule.convert_shape(sides[0].shape, "torch") != sides[1].shape:
        raise ValueError(f"{sides[0].name}: the pattern does not give the shape of {sides[1].name}")
    return Match(sides[0], sides[1], rule, _text_of(data["how"]))


def _tensor(data: JsonObject) -> Tensor:
    shape = tuple(_list(_whole)(data["shape"]))
    cut = None
    if data["cut"] is not None:
        offset, strides = data["cut"]
        cut = Cut(_whole(offset), tuple(_list(_step)(strides)))
        if len(cut.strides) != len(shape):
            raise ValueError(f"cut ({cut.strides}) must have a step for each axis of {shape}")
    name, source = _text_of(data["name"]), _text_of(data["source"])
    return Tensor(name, source, shape, SideWeight(shape, "", "", ""), cut)


def _recorded(data: JsonObject) -> Recorded:
    numbers = {name: _whole(data[name]) for name in ("number", "order", "inputs", "outputs")}
    return Recorded(_text_of(data["path"]), **numbers)


def _parameter(data: JsonObject) -> SideWeight:
    shape = tuple(_list(_whole)(data["shape"]))
    role = _one_of("parameter", "statistic", "state")(data["role"])
    framework = _one_of("torch", "flax")(data["framework"])
    owner, path = _text_of(data["owner"]), _text_of(data["path"])
    frozen, persistent = _flag(data["frozen"]), _flag(data["persistent"])
    return SideWeight(shape, _dtype(data["dtype"]), owner, path, role, framework, frozen, persistent)


def _id(data: Any) -> Planned:
    kind, group, copy, seed = data
    kind = _one_of("held", "own", "held stress", "own stress")(kind)
    return Planned(kind, _whole(group), _whole(copy), -1 if seed == -1 else _whole(seed))


def _text_of(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise TypeError("no whole number")
    return value


def _step(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not abs(value) < 1 << 62:
        raise TypeError("no whole number")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise TypeError("no number")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("neither true nor false")
    return value


def _constant(value: object) -> object:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError("a constant is a number, a text, true, false or null")
    return value


def _dtype(value: object) -> str:
    try:
        return numpy_dtype(_text_of(value)).name
    except (TypeError, AttributeError) as error:
        raise ValueError(f"there is no dtype {value}") from error


def _one_of(*choices: str) -> Callable[[Any], Any]:
    def read(value: object) -> str:
        if value not in choices:
            raise ValueError(f"{value} in place of {' or '.join(choices)}")
        return str(value)

    return read


def _list(read: Callable[[Any], Item]) -> Callable[[object], list[Item]]:
    def read_all(value: object) -> list[Item]:
        if not isinstance(value, list):
            raise TypeError("no list")
        return [read(one) for one in value]

    return read_all


def _dict(read: Callable[[Any], Item]) -> Callable[[object], dict[str, Item]]:
    def read_all(value: object) -> dict[str, Item]:
        if not isinstance(value, dict):
            raise TypeError("no object")
        return {_text_of(key): read(one) for key, one in value.items()}

    return read_all
