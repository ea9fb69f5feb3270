"""Experts of a tiny instance: their tensors by our roles, the rows of these, and the choices that names leave open."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import nn

from attn_bridge.models.derived.description import KeySource
from attn_bridge.models.rows.decoder import APART, EXPERTS, OURS, TOGETHER
from attn_bridge.weights.rows import Row

from .model_class import DerivationError, ModelClass
from .sizes import COUNTS, LAYERS

GATES, UPS, DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2", "output_linear")
FUSED = ("gate_up_proj", "input_linear")
"""Names of the layers of an expert, or of what every token goes to, in published models."""

NORMALISE = ("norm_topk_prob", "route_norm")
SCALES = ("routed_scaling_factor", "router_scaling_factor", "moe_routed_scaling_factor", "route_scale")
TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk")
TOLERANCES = ("router_jitter_noise",)
FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")

STEP = "moe_layer_freq"
"""Key of older files: every how many-th block has experts."""

LAST_NORM = "post_norm2.scale"
"""Our name of the norm of what experts and shared layers give together."""

Shape = tuple[int, ...]
Choice = tuple[tuple[Mapping[str, KeySource | None], Mapping[str, bool]], ...]
"""Alternatives, the likeliest first: fields to set (None removes a field), and arguments of `rows`."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """The tensors of a block with experts, by names in the block.

    Attributes:
        child: name of the module that holds the experts.
        named: our name, with ``{j}`` for an expert -> name of theirs, of tensors that are not parts of another.
        gate_up: name of the gates and ups of all experts; "" where each expert has tensors.
        down: likewise, the downs.
        is_turned: whether these have the input's channels in front of the output's.
        shared_gate_up: name of gate and up of the shared layers in one; "" for none.
        number: experts.
        width: channels of an expert.
        shared: channels of what every token goes to; 0 for nothing.
        classes: name of a module -> class.
        files: name of theirs -> name in files, of all tensors of a block that have another name there.
        file_experts: our name -> name in files, of the tensors of one expert.
        are_all: whether all blocks have experts.
        rows_of_one: our names of vectors that are a row of a matrix there.
    """

    child: str
    named: Mapping[str, str]
    gate_up: str
    down: str
    is_turned: bool
    shared_gate_up: str
    number: int
    width: int
    shared: int
    are_all: bool
    rows_of_one: frozenset[str] = frozenset()
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file_experts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> set[str]:
        """Names of theirs in a block with experts; ``{j}`` is a number."""
        return {*self.named.values(), self.gate_up, self.down, self.shared_gate_up} - {""}

    @property
    def has_correction(self) -> bool:
        """Whether a learned bias joins the scores where experts are chosen."""
        return "ff.router.correction_bias" in self.named


def child_of(block: nn.Module) -> str:
    """Return the name of the module with experts in a block; "" for none."""
    for name, module in block.named_children():
        if any(inner == "experts" for inner, _ in module.named_children()):
            return name
    return ""


def read(subject: ModelClass, block: nn.Module, child: str, are_all: bool) -> Experts:
    """Return the experts of a block.

    Raises:
        DerivationError: a tensor has no place in ours.
    """
    keys = subject.keys()
    width = keys["hidden_size"]
    number = next((keys[key] for key in COUNTS if key in keys), 0)
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    saved = block.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name in saved}
    is_inside = re.compile(rf"{re.escape(child)}\.|shared_mlp\.").match
    shapes = {name: shape for name, shape in shapes.items() if is_inside(name)}
    named: dict[str, str] = {}
    fused: dict[str, str] = {}
    for name, shape in shapes.items():
        role = _role(name, shape, number, width)
        if role is None:
            module = name.rpartition(".")[0]
            kind = type(block.get_submodule(module)).__name__
            raise DerivationError(f"{name} ({kind}) {shape} has no place in ours; the nearest is MixtureOfExperts")
        (fused if role in ("gate_up", "down", "shared_gate_up") else named)[role] = re.sub(
            r"\.experts\.\d+\.", ".experts.{j}.", name
        )
    if "ff.router.weight" not in named:
        raise DerivationError(f"{child} ({type(block.get_submodule(child)).__name__}): no router of ours among its "
                              "tensors; the nearest is MixtureOfExperts")  # fmt: skip
    down = shapes[fused["down"]] if "down" in fused else None
    if down is None and "ff.experts.{j}.fc1.weight" not in named:
        raise DerivationError(f"{child}: no experts of ours among its tensors; the nearest is MixtureOfExperts")
    is_turned = down is not None and down[1] != width
    of_expert = (
        shapes[named["ff.experts.{j}.fc1.weight"].replace("{j}", "0")][0]
        if down is None
        else down[1 if is_turned else 2]
    )
    shared = next(
        (shapes[named[role]][0] for role in ("ff.shared.fc1.weight",) if role in named),
        shapes[fused["shared_gate_up"]][0] // 2 if "shared_gate_up" in fused else 0,
    )
    rows_of_one = frozenset(role for role, name in named.items() if shapes.get(name) == (1, number))
    return Experts(
        child, named, fused.get("gate_up", ""), fused.get("down", ""), is_turned, fused.get("shared_gate_up", ""),
        number, of_expert, shared, are_all, rows_of_one,
    )  # fmt: skip


def _role(name: str, shape: Shape, number: int, width: int) -> str | None:
    """Return our name of a tensor, or ``gate_up``, ``down`` and ``shared_gate_up``; None without a place."""
    module, _, leaf = name.rpartition(".")
    last = module.rpartition(".")[2]
    if len(shape) == 3 and shape[0] == number:
        kind = leaf if leaf in (*FUSED, *DOWNS) else last
        return "gate_up" if kind in FUSED else "down" if kind in DOWNS else None
    if shape == (number, width):
        return "ff.router.weight"
    if shape in ((number,), (1, number)):
        return "ff.router.correction_bias" if "correction" in leaf or "expert_bias" in leaf else "ff.router.bias"
    if shape == (width,) and leaf == "weight" and "norm" in last:
        return LAST_NORM
    if shape == (1, width) and "shared" in name:
        return "ff.shared_gate.weight"
    if leaf not in ("weight", "bias"):
        return None
    fc = next((fc for fc, some in (("fc1", GATES), ("fc2", UPS), ("fc3", DOWNS)) if last in some), "")
    if "shared" in name:
        return f"ff.shared.{fc}.{leaf}" if fc else "shared_gate_up" if last in FUSED and leaf == "weight" else None
    return f"ff.experts.{{j}}.{fc}.{leaf}" if fc and re.search(r"\.experts\.\d+\.", name) else None


# ---- names in files


def with_files(experts: Experts, model: nn.Module, path: str) -> Experts:
    """Return the experts with the names that files have, which `transformers` renames when it reads them.

    Args:
        experts: of a block.
        model: an instance with random weights.
        path: name of a block with experts, ending with a dot.

    Raises:
        DerivationError: a tensor outside the blocks has another name in files, or another form.
    """
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    files = {name: tensor.numpy() for name, tensor in in_files(model).items()}
    if files.keys() == state.keys():
        return experts
    renamed: dict[str, str] = {}
    for name in state.keys() - files.keys():
        inner = name.removeprefix(path)
        if not name.startswith(path):
            continue
        same = [other for other in files.keys() - state.keys() if np.array_equal(files[other], state[name])]
        if not same and inner in (experts.gate_up, experts.down):
            continue  # files hold the experts one by one
        if len(same) != 1 or not same[0].startswith(path):
            raise DerivationError(f"{name}: files hold it in another form; the nearest is a renamed tensor")
        renamed[inner] = same[0].removeprefix(path)
    of_files: dict[str, str] = {}
    if experts.gate_up and f"{path}{experts.gate_up}" not in files and experts.gate_up not in renamed:
        for name in files:
            hit = re.fullmatch(rf"{re.escape(path)}(.+\.)0(\.(\w+)\.weight)", name)
            fc = next((fc for fc, some in (("fc1", GATES), ("fc2", UPS), ("fc3", DOWNS)) if hit and hit[3] in some), "")
            if hit and fc:
                of_files[f"ff.experts.{{j}}.{fc}.weight"] = f"{hit[1]}{{j}}{hit[2]}"
        if len(of_files) != 3:
            raise DerivationError(f"{experts.gate_up}: files hold experts in another form; the nearest is one by one")
    outside = [name for name in state.keys() - files.keys() if not re.match(rf"{_of_any(path)}", name)]
    if outside:
        raise DerivationError(f"{sorted(outside)[0]}: files hold it under another name; the nearest is the same name")
    return dataclasses.replace(experts, files=renamed, file_experts=of_files)


def _of_any(path: str) -> str:
    return re.sub(r"\\\.\d+\\\.$", lambda _: r"\.\d+\.", re.escape(path))


def in_files(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of an instance as `transformers` writes them to files."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    written: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return written


# ---- rows


def rows(
    experts: Experts, layer: str, *, gate_first: bool, switched: bool, has_bias: bool, may_lack_shared: bool
) -> Iterator[Row]:
    """Yield the rows of blocks with experts.

    Args:
        experts: their names.
        layer: prefix of their names.
        gate_first: whether gates come first in a projection of gates and ups.
        switched: whether a key of the config switches biases of shared layers.
        has_bias: whether shared layers may have biases.
        may_lack_shared: whether a model may have no shared layers.
    """
    has_two_forms = bool(experts.file_experts or experts.files)
    for ours, name in experts.named.items():
        if ours.startswith("ff.shared.") and ours.endswith(".bias"):
            continue
        if ".experts." in ours:
            yield Row(layer + name, (OURS + ours,), branch=APART)
            continue
        pattern, part = ("e -> part e", "part") if ours in experts.rows_of_one else ("... -> ...", "")
        optional = may_lack_shared and "shared" in ours
        alternative = EXPERTS if has_two_forms or not experts.gate_up else TOGETHER
        yield Row(layer + name, (OURS + ours,), pattern, part=part, branch=alternative, optional=optional)
        if has_bias and ours.startswith("ff.shared.") and ours.endswith(".weight"):
            yield Row(f"{layer}{name.removesuffix('.weight')}.bias", (f"{OURS}{ours.removesuffix('.weight')}.bias",),
                      branch=alternative, optional=optional or switched)  # fmt: skip
    parts = ("fc1", "fc2") if gate_first else ("fc2", "fc1")
    for ours, name in experts.file_experts.items():
        yield Row(layer + name, (OURS + ours,), branch=APART)
    if experts.gate_up:
        expert = f"{OURS}ff.experts.{{j}}."
        gates, downs = ("e i (part o)", "e i o") if experts.is_turned else ("e (part o) i", "e o i")
        yield Row(layer + experts.gate_up, tuple(f"{expert}{fc}.weight" for fc in parts), f"o i -> {gates}",
                  part="part", stack="e", branch=TOGETHER)  # fmt: skip
        yield Row(layer + experts.down, (f"{expert}fc3.weight",), f"o i -> {downs}", stack="e", branch=TOGETHER)
    if experts.shared_gate_up:
        ours_parts = tuple(f"{OURS}ff.shared.{fc}.weight" for fc in parts)
        yield Row(layer + experts.shared_gate_up, ours_parts, "o i -> (part o) i", part="part",
                  branch=EXPERTS if has_two_forms else TOGETHER, optional=may_lack_shared)  # fmt: skip


def both_names(experts: Experts, rows: Iterable[Row], layer: str) -> Iterator[Row]:
    """Yield the rows, those of tensors that files rename twice: as in files, and as in memory.

    A branch per tensor keeps both apart; its alternatives are those of experts, so that one setting chooses all names.
    """
    for row in rows:
        theirs = row.theirs.removeprefix(layer)
        name = experts.files.get(theirs)
        if name is None and theirs.endswith(".bias"):  # which the usual instance may lack
            weight = experts.files.get(f"{theirs.removesuffix('.bias')}.weight", "")
            name = f"{weight.removesuffix('.weight')}.bias" if weight else None
        if name is None:
            yield row
            continue
        choice = row.choice or row.ours[0].removeprefix(OURS)
        yield dataclasses.replace(row, theirs=layer + name, branch=f"{choice}/{APART.partition('/')[2]}")
        yield dataclasses.replace(row, branch=f"{choice}/{TOGETHER.partition('/')[2]}")


# ---- fields


def fields(subject: ModelClass, experts: Experts) -> dict[str, KeySource]:
    """Return the fields that shapes and names decide.

    Raises:
        DerivationError: no key that is known holds a number.
    """
    keys = {**subject.defaults, **subject.keys()}

    def needed(what: str, source: KeySource | None) -> KeySource:
        if source is None:
            raise DerivationError(f"{experts.child}: no key of its {what} is known; the nearest is {COUNTS[0]}")
        return source

    by_value = _keys_of(keys, experts.width)
    sources = {
        "experts.num_experts": needed("number", next((KeySource(key=key) for key in COUNTS if key in keys), None)),
        "experts.top_k": needed("choice", next((KeySource(key=key) for key in TOP_K if key in keys), None)),
        "experts.hidden_dim": needed("width", next((KeySource(key=key) for key in by_value), None)),
    }
    if experts.shared:
        widths = [KeySource(key=key) for key in _keys_of(keys, experts.shared)]
        products = [
            KeySource(key=key, times=times)
            for key, value in keys.items()
            if "shared" in key and type(value) is int
            for times in _keys_of(keys, experts.shared // value if value and experts.shared % value == 0 else -1)
        ]
        sources["experts.shared"] = needed("shared width", next(iter((*widths, *products)), None))
        sources["experts.shared_gate"] = KeySource(value="ff.shared_gate.weight" in experts.named)
    if LAST_NORM in experts.named:
        sources["experts.last_norm"] = KeySource(value=True)
    sources["router.bias"] = KeySource(value="ff.router.bias" in experts.named)
    sources["router.correction"] = KeySource(value=experts.has_correction)
    return {
        field: dataclasses.replace(source, key=subject.canonical(source.key))
        for field, source in (sources | _sparse(subject, experts, keys)).items()
    }


def _keys_of(keys: Mapping[str, object], width: int) -> list[str]:
    """Return the keys of widths with a value."""
    return [key for key, value in keys.items() if value == width and type(value) is int and key.endswith("_size")]


def _sparse(subject: ModelClass, experts: Experts, keys: Mapping[str, object]) -> dict[str, KeySource]:
    """Return the fields of which blocks have experts."""
    sources: dict[str, KeySource] = {}
    first = next((key for key in FIRST if key in keys or key in older_keys(subject)), None)
    if first:
        sources["sparse.first"] = KeySource(key=first)
    if "mlp_layer_types" in keys:
        sources["sparse.types"] = KeySource(key="mlp_layer_types")
        kinds = subject.defaults.get("mlp_layer_types")
        if not first and isinstance(kinds, list) and "sparse" in kinds:
            sources["sparse.first"] = KeySource(value=kinds.index("sparse"))
    for field, key in (
        ("sparse.last", "moe_layer_end_index"),
        ("sparse.step", "moe_layer_interval"),
        ("sparse.step", "decoder_sparse_step"),
        ("sparse.dense", "mlp_only_layers"),
    ):
        if key in keys:
            sources[field] = KeySource(key=key)
    return sources


def older_keys(subject: ModelClass) -> dict[str, int]:
    """Return keys of older files -> their default, which decide where experts are in files without a kind per block."""

    def kinds(**keys: int) -> list[str]:
        try:
            return list(subject.config_class(num_hidden_layers=LAYERS, **keys).mlp_layer_types)
        except Exception:  # a class without such kinds
            return []

    usual = kinds()
    if "sparse" not in usual or usual == kinds(**dict.fromkeys((*FIRST, STEP), 2)):
        return {}
    defaults = {**dict.fromkeys(FIRST, usual.index("sparse")), STEP: 1}
    return {key: one for key, one in defaults.items() if key not in subject.defaults and kinds(**{key: 2}) != usual}


def choices(subject: ModelClass, experts: Experts) -> Iterator[Choice]:
    """Yield the choices of routers that names leave open, the likeliest first."""

    def alternatives(*some: Mapping[str, KeySource | None]) -> Choice:
        return tuple((one, {}) for one in some)

    scores = ({"router.scores": KeySource(value="softmax")}, {"router.scores": KeySource(value="sigmoid")})
    yield alternatives(*(reversed(scores) if experts.has_correction else scores))
    if experts.has_correction:
        yield alternatives({}, {"router.corrects": KeySource(value="logits")})
    keys = [key for key in NORMALISE if key in subject.read]
    yield alternatives(
        *({"router.normalise": KeySource(key=key)} for key in keys),
        *({"router.normalise": KeySource(value=value)} for value in (True, False)),
    )
    scales = [key for key in SCALES if key in subject.read]
    yield alternatives(*({"router.scale": KeySource(key=key)} for key in scales), {})
    if {"n_group", "topk_group"} <= subject.read:
        names = ("groups.number", "groups.chosen", "groups.score")
        groups = {"groups.number": KeySource(key="n_group"), "groups.chosen": KeySource(key="topk_group")}
        best: list[Mapping[str, KeySource | None]] = [
            {**groups, "groups.score": KeySource(value=score)} for score in ("top2", "max")
        ]
        yield alternatives(*(best if experts.has_correction else reversed(best)), dict.fromkeys(names))
    tolerance = next((key for key in TOLERANCES if key in subject.read), None)
    if tolerance is not None:
        mixer = {"router.scores": KeySource(value="sparse_mixer"), "router.normalise": KeySource(value=False)}
        mixer |= {"router.tolerance": KeySource(key=tolerance), "experts.top_k": KeySource(value=2)}
        yield alternatives({}, mixer)
    if experts.gate_up or experts.shared_gate_up:
        yield (({}, {"gate_first": True}), ({}, {"gate_first": False}))
