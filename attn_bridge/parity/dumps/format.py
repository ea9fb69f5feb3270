"""A module's weights, inputs and results as a folder of safetensors and JSON, for a comparison without the framework.

A folder holds ``dump.json`` (what was run), ``weights.safetensors`` (the weights that the module holds), one file per
sample in ``samples`` (inputs, and drawn weights in a torch dump) and one per precision and sample, such as
``float32/0000.safetensors`` (cotangents, outputs and all gradients, in that precision and in float64).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import backends, checkpoints
from ..compare.pairing import Cut, Match, Pairing, Tensor
from ..compare.samples.sampling import FIRST, Planned
from ..compare.sides.dtypes import DTYPES, is_float, numpy_dtype
from ..compare.sides.subject import Arguments, Array, Arrays, Call, Parameter, Run, Submodule

SCHEMA = 2
MANIFEST = "dump.json"
WEIGHTS = "weights.safetensors"
ORACLE = "oracle"
"""Where the float64 results of a sample stand, beside the modes."""

MAX_JSON = 1 << 26
"""Most bytes of a manifest."""

MAX_OPEN = 4
"""Most files that are kept in memory."""


class DumpError(ValueError):
    """A folder is no dump, or not a whole one; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One call of a submodule: which one, its position, and how many arrays went in and came out."""

    path: str
    number: int
    order: int
    inputs: int
    outputs: int


@dataclasses.dataclass
class Manifest:
    """What ``dump.json`` says.

    Attributes:
        framework: ``torch`` or ``flax``.
        name: class of the module.
        dtype: dtype of most of its weights.
        device: where it ran.
        dtypes: precisions that it ran in.
        modes: modes that it ran in.
        seeds: how many times numbers were drawn.
        first_seed: the first seed.
        argument_names: names of the positional arguments of a call.
        positional: how many arrays were given by position.
        keywords: names of the arrays that were given by keyword.
        constants: keyword arguments that are no arrays.
        outputs: place in what was returned, shape and dtype of every output.
        parameters: the parameters by name.
        modules: the submodules, the module itself first.
        settings: path -> numbers that the meaning of a submodule depends on.
        unreached: branches that were not run.
        lacks: why there are no float64 results, "" where there are.
        unstable: how the module is not deterministic, "" where it is.
        notes: what a reader has to know.
        noise: precision -> variation -> how far the module is from itself.
        floors: precision -> tensor -> the same in units of the last place.
        perturbed: the same where inputs and weights were moved by one ulp; filled without float64 only.
        probes: precision -> position of a sample -> kind of probe -> tensor -> how far it moved (rms, largest); see
            `probes`.
        reach: parameters whose gradient is zero -> whether they are used, and whether a change changes the output.
        like: digest of the torch dump whose weights were used, "" for the module's own.
        transfer: whether the weights that the module holds were replaced by those, too.
        pairing: which parameter is which, in a dump that is like another.
        calls: position of a sample -> the calls of submodules that were recorded on it, in order.
        environment: versions and precision switches.
        samples: the samples, in order.
        digests: path in the folder -> SHA-256 of the file.
    """

    framework: backends.Framework
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
    constants: dict[str, Any]
    outputs: list[tuple[str, tuple[int, ...], str]]
    parameters: dict[str, Parameter]
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
    reach: dict[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)
    like: str = ""
    transfer: bool = True
    pairing: list[Match] = dataclasses.field(default_factory=list)
    calls: dict[str, list[Recorded]] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    samples: list[Planned] = dataclasses.field(default_factory=list)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)


def stored_as(mode: str, dtype: str, cast: str | None) -> str:
    """Return under which name a run in low precision is stored: in float64 an eager run is the oracle itself."""
    return ORACLE if cast == "float64" and dtype == "float64" and mode == "eager" else mode


def key_of(tensor: Tensor) -> str:
    """Return the key of a parameter, or of a part of one."""
    if tensor.cut is None:
        return tensor.source
    return f"{tensor.source}[{tensor.cut.offset} + {tensor.cut.strides} x {tensor.shape}]"


# ---- writing


class Writer:
    """Writes a dump into an empty folder, file by file.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.digests: dict[str, str] = {}
        self.samples: list[Planned] = []
        self.size = 0

    def write(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write arrays into a file of the folder.

        Raises:
            ValueError: one has a dtype that safetensors lacks.
        """
        import safetensors
        import safetensors.numpy

        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        try:
            data = safetensors.numpy.save({key: np.asarray(array, order="C") for key, array in arrays.items()})
        except safetensors.SafetensorError as error:
            raise ValueError(f"{name} cannot be written as safetensors: {error}") from error
        path.write_bytes(data)
        self.digests[name] = hashlib.sha256(data).hexdigest()
        self.size += len(data)

    def number(self, sample: Planned) -> tuple[int, bool]:
        """Return the number of a sample, and whether it is new."""
        is_new = sample not in self.samples
        if is_new:
            self.samples.append(sample)
        return self.samples.index(sample), is_new

    def write_calls(self, sample: Planned, calls: Sequence[Call]) -> list[Recorded]:
        """Write the calls of submodules on a sample, and return what tells of them."""
        arrays: Arrays = {}
        found = []
        for i, call in enumerate(calls):
            inputs = call.arguments.leaves
            arrays |= {f"{i}/inputs/{j}": array for j, array in enumerate(inputs)}
            arrays |= {f"{i}/outputs/{j}": array for j, array in enumerate(call.outputs)}
            found.append(Recorded(call.path, call.number, call.order, len(inputs), len(call.outputs)))
        self.write(f"calls/{self.number(sample)[0]:04}.safetensors", arrays)
        return found

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest."""
        manifest.samples, manifest.digests = self.samples, self.digests
        data = dataclasses.asdict(dataclasses.replace(manifest, pairing=[]))
        data["pairing"] = [_match_data(match) for match in manifest.pairing]
        text = json.dumps({"schema": SCHEMA, **data}, indent=1, allow_nan=False)
        (self.folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def run_arrays(where: str, run: Run) -> Arrays:
    """Return the arrays of a run by the names that they have in a file."""
    named = {f"{where}/outputs/{i}": array for i, array in enumerate(run.outputs)}
    named |= {f"{where}/inputs/{i}": array for i, array in enumerate(run.input_gradients) if array is not None}
    return named | {f"{where}/weights/{name}": array for name, array in run.parameter_gradients.items()}


# ---- reading


class Dump:
    """A dump read back; it stands where a subject does, and runs nothing.

    Args:
        path: the folder.

    Raises:
        DumpError: it is no dump, or not a whole one.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        text = self._text()
        self.digest = hashlib.sha256(text).hexdigest()
        self.manifest = self._parsed(text)
        self.name, self.device = self.manifest.name, self.manifest.device
        self.framework = self.manifest.framework
        self.argument_names = self.manifest.argument_names
        self._ids = {one: number for number, one in enumerate(self.manifest.samples)}
        self._open: dict[str, Arrays] = {}
        self.held = self._file(WEIGHTS)
        wanted = {name: (one.shape, one.dtype) for name, one in self.manifest.parameters.items()}
        if {name: (one.shape, one.dtype.name) for name, one in self.held.items()} != wanted:
            raise self._error(f"{WEIGHTS} does not hold the parameters of {MANIFEST}")
        self.arguments = self.inputs(FIRST)
        self.kind = f"{self.framework} dump"

    # ---- as a subject

    def parameters(self) -> dict[str, Parameter]:
        """Return the parameters and running statistics by name."""
        return self.manifest.parameters

    def weights(self) -> Arrays:
        """Return the weights that the module held."""
        return dict(self.held)

    def few_threads(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for small work; nothing is run here."""
        return contextlib.nullcontext()

    def modules(self) -> list[Submodule]:
        """Return the submodules, the module itself first."""
        return self.manifest.modules

    def settings(self) -> dict[str, dict[str, float]]:
        """Return path -> the numbers that a submodule's meaning depends on."""
        return self.manifest.settings

    def unreached(self, arguments: Arguments) -> list[str]:
        """Describe the branches that the calls did not reach."""
        del arguments
        return self.manifest.unreached

    # ---- samples

    def __contains__(self, sample: object) -> bool:
        return sample in self._ids

    def inputs(self, sample: Planned) -> Arguments:
        """Return the call of a sample."""
        arrays = self._file(f"samples/{self._number(sample):04}.safetensors")
        first = self.manifest.positional
        count = first + len(self.manifest.keywords)
        found = [self._get(arrays, f"inputs/{i}") for i in range(count)]
        keywords = dict(zip(self.manifest.keywords, found[first:], strict=True))
        return Arguments(tuple(found[:first]), {**keywords, **self.manifest.constants})

    def sample_weights(self, sample: Planned) -> Arrays:
        """Return the weights of a sample of a torch dump."""
        arrays = self._file(f"samples/{self._number(sample):04}.safetensors")
        if sample[0].startswith("held") and not sample[2]:
            return dict(self.held)
        found = {name: self._get(arrays, f"weights/{name}") for name in self.held}
        for name, array in found.items():
            if (array.shape, array.dtype) != (self.held[name].shape, self.held[name].dtype):
                raise self._error(f"the weights of sample {sample} do not fit {name}")
        return found

    def cotangents(self, sample: Planned, dtype: str) -> list[Array]:
        """Return the gradients that were given to the outputs of a sample."""
        arrays = self._file(f"{dtype}/{self._number(sample):04}.safetensors")
        return [self._get(arrays, f"cotangents/{i}") for i in range(len(self.manifest.outputs))]

    def run(self, sample: Planned, dtype: str, which: str) -> Run:
        """Return the results of a sample in one precision, in one mode or the float64 ones."""
        manifest = self.manifest
        name = f"{dtype}/{self._number(sample):04}.safetensors"
        arrays, leaves = self._file(name), self.inputs(sample).leaves
        outputs = [self._get(arrays, f"{which}/outputs/{i}") for i in range(len(manifest.outputs))]
        of_inputs = [
            self._get(arrays, f"{which}/inputs/{i}") if is_float(leaf) else None for i, leaf in enumerate(leaves)
        ]
        of_weights = {
            name: self._get(arrays, f"{which}/weights/{name}")
            for name, one in manifest.parameters.items()
            if one.role == "parameter" and is_float(self.held[name])
        }
        for array, like in [
            *zip(of_inputs, leaves, strict=True),
            *((array, self.held[name]) for name, array in of_weights.items()),
        ]:
            if array is not None and (array.shape != like.shape or not is_float(array)):
                raise self._error(f"{name} holds {array.dtype} of shape {array.shape} for an array of {like.shape}")
        for output, cotangent, (_, shape, kind) in zip(
            outputs, self.cotangents(sample, dtype), manifest.outputs, strict=True
        ):
            if is_float(output) != is_float(np.empty(0, numpy_dtype(kind))) or {output.shape, cotangent.shape} != {
                shape
            }:
                raise self._error(
                    f"{name} holds {output.dtype} of shape {output.shape} for an output of {kind} {shape}"
                )
        return Run(outputs, [place for place, _, _ in manifest.outputs], of_inputs, of_weights)

    def recorded(self) -> list[Planned]:
        """Return the samples on which calls of submodules were recorded."""
        return [one for number, one in enumerate(self.manifest.samples) if str(number) in self.manifest.calls]

    def calls(self, sample: Planned) -> list[Call]:
        """Return the calls of submodules that were recorded on a sample."""
        number = self._number(sample)
        arrays = self._file(f"calls/{number:04}.safetensors")
        found = []
        for i, one in enumerate(self.manifest.calls[str(number)]):
            inputs = tuple(self._get(arrays, f"{i}/inputs/{j}") for j in range(one.inputs))
            outputs = [self._get(arrays, f"{i}/outputs/{j}") for j in range(one.outputs)]
            found.append(Call(one.path, one.number, one.order, Arguments(inputs), outputs, [None] * one.outputs))
        return found

    # ---- files

    def _error(self, reason: str) -> DumpError:
        return DumpError(f"{self.path} is not a whole dump: {reason}")

    def _text(self) -> bytes:
        path = self.path / MANIFEST
        try:
            if not path.is_file():
                what = f"has no {MANIFEST}" if self.path.is_dir() else "is no folder"
                raise DumpError(f"{self.path} is no dump: it {what}")
            if path.stat().st_size > MAX_JSON:
                raise self._error(f"{MANIFEST} has more than {MAX_JSON >> 20} MiB")
            return path.read_bytes()
        except OSError as error:
            raise self._error(str(error)) from error

    def _parsed(self, text: bytes) -> Manifest:
        try:
            return _parse(json.loads(text))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise self._error(f"{MANIFEST}: {error or type(error).__name__}") from error

    def _number(self, sample: Planned) -> int:
        if sample not in self._ids:
            raise self._error(f"there is no sample {sample}")
        return self._ids[sample]

    def _file(self, name: str) -> Arrays:
        if name not in self._open:
            path = self.path / name
            if name not in self.manifest.digests:
                raise self._error(f"{MANIFEST} lists no {name}")
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != self.manifest.digests[name]:
                    raise self._error(f"{name} is not what was written")
                arrays = checkpoints.read(path)
            except DumpError:
                raise
            except (OSError, ValueError, MemoryError) as error:
                raise self._error(str(error)) from error
            self._open = dict([*self._open.items()][-MAX_OPEN + 1 :]) | {name: arrays}
        return self._open[name]

    def _get(self, arrays: Arrays, key: str) -> Array:
        if key not in arrays:
            raise self._error(f"a file of it holds no {key}")
        return arrays[key]


def of_side(path: str | Path, framework: backends.Framework) -> Dump:
    """Return a dump of one framework.

    Raises:
        DumpError: it is no dump, or not a whole one.
        ValueError: it is of the other framework.
    """
    found = Dump(path)
    if found.framework != framework:
        raise ValueError(f"{path} is a {found.framework} dump, not a {framework} one; the torch dump comes first")
    return found


# ---- the manifest, checked


def _parse(data: Any) -> Manifest:
    if not isinstance(data, dict):
        raise ValueError("it holds no object")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema ({data.get('schema')}) must be {SCHEMA}")
    fields = dataclasses.fields(Manifest)
    missing = [one.name for one in fields if one.name not in data]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    read: dict[str, Callable[[Any], Any]] = {
        "framework": _one_of("torch", "flax"),
        "dtype": _dtype,
        "dtypes": _list(_one_of(*DTYPES)),
        "modes": _list(_one_of("eager", "jit")),
        "outputs": _list(lambda one: (_text_of(one[0]), tuple(_list(_whole)(one[1])), _dtype(one[2]))),
        "seeds": _whole,
        "first_seed": _whole,
        "positional": _whole,
        "constants": _dict(_constant),
        "parameters": _dict(_parameter),
        "modules": _list(lambda one: Submodule(_text_of(one["path"]), _text_of(one["type"]))),
        "settings": _dict(_dict(_number)),
        **dict.fromkeys(("noise", "floors", "perturbed"), _dict(_dict(_number))),
        "probes": _dict(_dict(_dict(_dict(lambda pair: (_number(pair[0]), _number(pair[1])))))),
        "reach": _dict(lambda pair: (_flag(pair[0]), _flag(pair[1]))),
        "transfer": _flag,
        "pairing": _list(_match),
        "calls": _dict(_list(_recorded)),
        "environment": _dict(_text_of),
        "samples": _list(_id),
        "digests": _dict(_text_of),
        **dict.fromkeys(("argument_names", "keywords", "unreached", "notes"), _list(_text_of)),
    }
    values = {}
    for one in fields:
        check: Callable[[Any], Any] = read.get(one.name, _text_of)
        try:
            values[one.name] = check(data[one.name])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"{one.name} is not what a dump holds ({error})") from error
    manifest = Manifest(**values)
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Refuse what is well-formed and can't be true."""
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
    if bool(manifest.like) != bool(manifest.pairing) and manifest.parameters:
        raise ValueError("like and pairing go together")
    Pairing(tuple(manifest.pairing))


def _match_data(match: Match) -> dict[str, Any]:
    def tensor(one: Tensor) -> dict[str, Any]:
        cut = None if one.cut is None else [one.cut.offset, one.cut.strides]
        return {"name": one.name, "source": one.source, "shape": one.shape, "cut": cut}

    pattern = {"pattern": match.rule.pattern, "sizes": match.rule.sizes}
    return {"first": tensor(match.first), "second": tensor(match.second), **pattern, "how": match.how}


def _match(data: Any) -> Match:
    from ...weights import Rule

    rule = Rule("torch", "flax", _text_of(data["pattern"]), **_dict(_whole)(data["sizes"]))
    sides = [_tensor(data[side]) for side in ("first", "second")]
    if rule.convert_shape(sides[0].shape, "torch") != sides[1].shape:
        raise ValueError(f"{sides[0].name}: the pattern does not give the shape of {sides[1].name}")
    return Match(sides[0], sides[1], rule, _text_of(data["how"]))


def _tensor(data: Any) -> Tensor:
    shape = tuple(_list(_whole)(data["shape"]))
    cut = None
    if data["cut"] is not None:
        offset, strides = data["cut"]
        cut = Cut(_whole(offset), tuple(_list(_step)(strides)))
        if len(cut.strides) != len(shape):
            raise ValueError(f"cut ({cut.strides}) must have a step for each axis of {shape}")
    name, source = _text_of(data["name"]), _text_of(data["source"])
    return Tensor(name, source, shape, Parameter(shape, "", "", ""), cut)


def _recorded(data: Any) -> Recorded:
    numbers = {name: _whole(data[name]) for name in ("number", "order", "inputs", "outputs")}
    return Recorded(_text_of(data["path"]), **numbers)


def _parameter(data: Any) -> Parameter:
    shape = tuple(_list(_whole)(data["shape"]))
    role = _one_of("parameter", "statistic")(data["role"])
    framework = _one_of("torch", "flax")(data["framework"])
    return Parameter(shape, _dtype(data["dtype"]), _text_of(data["owner"]), _text_of(data["path"]), role, framework)


def _id(data: Any) -> Planned:
    kind, group, copy, seed = data
    kind = _one_of("held", "own", "held stress", "own stress")(kind)
    return Planned(kind, _whole(group), _whole(copy), -1 if seed == -1 else _whole(seed))


def _text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise TypeError("no whole number")
    return value


def _step(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not abs(value) < 1 << 62:
        raise TypeError("no whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise TypeError("no number")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("neither true nor false")
    return value


def _constant(value: Any) -> Any:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError("a constant is a number, a text, true, false or null")
    return value


def _dtype(value: Any) -> str:
    try:
        return numpy_dtype(_text_of(value)).name
    except (TypeError, AttributeError) as error:
        raise ValueError(f"there is no dtype {value}") from error


def _one_of(*known: str) -> Callable[[Any], Any]:
    def read(value: Any) -> str:
        if value not in known:
            raise ValueError(f"{value} in place of {' or '.join(known)}")
        return str(value)

    return read


def _list(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    def read_all(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError("no list")
        return [read(one) for one in value]

    return read_all


def _dict(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def read_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError("no object")
        return {_text_of(key): read(one) for key, one in value.items()}

    return read_all
