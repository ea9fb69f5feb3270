"""Names, shapes and the order of calls of a tiny instance: rows of its tensors, and fields that follow from them."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping

import torch
from torch import nn

from attn_bridge.models.derived.description import KeySource
from attn_bridge.specs.blocks.feed_forward import XIELU

from . import experts as mixtures
from . import latent, outside
from .experts import Experts
from .model_class import DerivationError, ModelClass
from .outside import Outside
from .sizes import LAYERS, LONG

ATTENTION = {
    "W_query": ("q_proj", "query", "wq", "Wq"),
    "W_key": ("k_proj", "key", "wk", "Wk"),
    "W_value": ("v_proj", "value", "wv", "Wv"),
    "out_proj": ("o_proj", "out_proj", "output.dense", "dense", "c_proj", "wo"),
    "fused": ("qkv_proj", "query_key_value", "Wqkv", "c_attn"),
    "q_norm": ("q_norm", "q_layernorm", "query_layernorm"),
    "k_norm": ("k_norm", "k_layernorm", "key_layernorm"),
    "W_gate": ("gate_proj", "g_proj"),
    "context_norm": ("attn_sub_norm",),
}
FEED_FORWARD = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "intermediate.dense", "ffn.0"),
    "down": ("down_proj", "w2", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "output.dense", "ffn.2"),
    "gate_up": ("gate_up_proj",),
    "activation": ("act_fn",),
    "hidden_norm": ("ffn_sub_norm",),
}
"""Our role -> names that modules of published models have for it."""

DENSE = "feed-forward/dense"
"""Branch of the rows of blocks without experts, where other blocks have them."""

PATTERNS = {
    "NANF": ("pre", "parallel_two"),
    "ANFN": ("post", "residual"),
    "NANNFN": ("sandwich",),
    "NAF": ("parallel",),
    "NNAF": ("parallel_two",),
}
"""Norms (N), attention (A) and feed-forward layers (F) in order of calls -> our words, the likeliest first."""

SLOTS = {
    "pre": ("norm1", "norm2"),
    "post": ("post_norm1", "post_norm2"),
    "sandwich": ("norm1", "post_norm1", "norm2", "post_norm2"),
    "parallel": ("norm1",),
    "parallel_two": ("norm1", "norm2"),
    "residual": ("post_norm1", "post_norm2"),
}


@dataclasses.dataclass(frozen=True)
class Structure:
    """The parts of an instance by our roles.

    Attributes:
        front: what names of the base model begin with, such as ``model.``.
        layers: path of the list of blocks below it.
        outside: names of the modules around the blocks.
        attention: name of the attention in a block, and role -> name of its submodule.
        feed_forward: likewise.
        norms: names of the norms of a block, in order of calls; empty where they have no tensors.
        placements: our words for where they are, the likeliest first.
        classes: path in the first block -> class, for messages.
        tensors: names of all tensors, with and without what flags switch.
        shapes: name -> shape in the usual instance.
        flags: field -> key of the flag that switches its tensors, or whether they are there.
        fixed: flags that switch something else -> their usual value.
        experts: those of blocks that have them; None for a model without.
        cross: names in a block of the attention to an encoder and its norm, which a decoder alone does not run.
        may_lack_shared: whether a model may have experts without layers that every token goes to.
        may_be_direct: whether queries may be projected from the input itself where keys and values have a latent.
        last_bias: name in a block of the bias of the output projection that the last block alone has; "" for none.
        block_class: class of the blocks, for messages.
    """

    front: str
    layers: str
    outside: Outside
    attention: tuple[str, Mapping[str, str]]
    feed_forward: tuple[str, Mapping[str, str]]
    norms: tuple[str, ...]
    placements: tuple[str, ...]
    classes: Mapping[str, str]
    tensors: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    flags: Mapping[str, KeySource]
    fixed: Mapping[str, tuple[object, ...]]
    experts: Experts | None = None
    cross: tuple[str, ...] = ()
    may_lack_shared: bool = False
    may_be_direct: bool = False
    last_bias: str = ""
    block_class: str = ""

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are made of a latent."""
        return "latent" in self.attention[1]

    @property
    def head_dim(self) -> int:
        """Width of a head of the usual instance, which has 4."""
        child, names = self.attention
        if "W_query" in names:
            return self.shape(join(child, names["W_query"]))[0] // 4
        return self.shape(join(child, names["out_proj"]))[1] // 4

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a fused projection of the usual instance."""
        child, names = self.attention
        return (self.shape(join(child, names["fused"]))[0] // self.head_dim - 4) // 2

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a matrix of the first block, output channels first."""
        shape = self.shapes[f"{self.front}{self.layers}.0.{name}.weight"]
        return shape[::-1] if self.classes.get(name) == TURNED else shape

    def has_shifts(self, role: str) -> bool:
        """Return whether the norms of query or key (``q_norm``, ``k_norm``) add a shift, as `LayerNorm` does."""
        child, names = self.attention
        return f"{self.front}{self.layers}.0.{join(child, names[role])}.bias" in self.tensors

    @property
    def gates(self) -> int:
        """Gates of the context of a token in the usual instance; 0 without."""
        child, names = self.attention
        return self.shape(join(child, names["W_gate"]))[0] if "W_gate" in names else 0

    @property
    def has_bare_norms(self) -> bool:
        """Whether queries have norms without tensors."""
        child, names = self.attention
        return "q_norm" not in names and any(join(child, name) in self.classes for name in ATTENTION["q_norm"])

    @property
    def is_usual(self) -> bool:
        """Whether embeddings, blocks and head have the names of Llama."""
        return (self.front, self.layers, self.outside.embedding, self.outside.head) == (
            "model.",
            "layers",
            "model.embed_tokens",
            "lm_head",
        )


TURNED = "Conv1D"
"""Class of layers whose matrices have the input's channels first."""


def join(child: str, name: str) -> str:
    """Return the name in a block of a part of a module; the block itself has no name."""
    return f"{child}.{name}" if child else name


def read(subject: ModelClass) -> Structure:
    """Return the structure of a class.

    Raises:
        DerivationError: a module has no role that ours can take; the message names the first, and the nearest role.
    """
    keys = subject.keys()
    model = subject.model_class(subject.config(keys)).eval()
    path, blocks = _blocks(model)
    base = f"{model.base_model_prefix}."
    front, layers = (base, path.removeprefix(base)) if path.startswith(base) else ("", path)
    sparse = [number for number, block in enumerate(blocks) if mixtures.child_of(block)]
    block = blocks[sparse[0]] if sparse else blocks[0]
    order = [name for name in _calls(model, block) if not (sparse and name == "shared_mlp")]
    classes = {name: type(one).__name__ for name, one in block.named_modules() if name}
    cross = _cross(block, order)
    roles = latent.ROLES if latent.is_in(block) else ATTENTION
    attention = _part(block, order, roles, ("W_query", "fused"), "attention")
    experts = None
    feed_forward: tuple[str, Mapping[str, str]]
    if sparse:
        child, is_all = mixtures.child_of(block), len(sparse) == len(blocks)
        mixture = mixtures.read(subject, block, child, is_all)
        experts = mixtures.with_files(mixture, subject.instance(keys), f"{path}.{sparse[0]}.")
        dense = next((one for number, one in enumerate(blocks) if number not in sparse), None)
        feed_forward = (child, {})
        if dense is not None:
            feed_forward = _part(dense, order, FEED_FORWARD, ("up", "gate_up"), "feed-forward")
            classes |= {name: type(one).__name__ for name, one in dense.named_modules() if name}
    else:
        feed_forward = _part(block, order, FEED_FORWARD, ("up", "gate_up"), "feed-forward", (attention[0], *cross))
    quiet = [name for name in order if "dropout" not in classes[name].lower()]
    leaves = quiet if sparse else _leaves(model, block)
    norms, placements = _norms(leaves, attention, (experts.child, {}) if experts else feed_forward, classes)
    around = outside.read(subject, model, path)
    shapes = subject.shapes(keys)
    flags, fixed, tensors = _flags(subject, shapes, f"{path}.", norms, attention, feed_forward, around, experts)
    structure = Structure(
        front, layers, around, attention, feed_forward, norms, placements, classes,
        tensors, shapes, flags, fixed, experts, cross,
        experts is not None and _may_lack_shared(subject, experts, shapes),
        roles is latent.ROLES and latent.may_be_direct(subject, attention[0]),
        _last_bias(attention, shapes, f"{path}."),
        type(block).__name__,
    )  # fmt: skip
    _check_all_known(structure, f"{path}.")
    return structure


def _last_bias(attention: tuple[str, Mapping[str, str]], shapes: Mapping[str, object], path: str) -> str:
    """Return the name in a block of a bias of the output projection that the last block alone has; "" for none."""
    child, names = attention
    name = f"{join(child, names.get('out_proj', ''))}_bias"
    blocks = [number for number in range(LAYERS) if f"{path}{number}.{name}" in shapes]
    return name if blocks == [LAYERS - 1] else ""


def _may_lack_shared(subject: ModelClass, experts: Experts, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a config without layers that every token goes to gives the same tensors but these."""
    source = mixtures.fields(subject, experts).get("experts.shared")
    if source is None:
        return False
    try:
        names = subject.shapes(subject.keys(**{source.key: 0}))
    except Exception:  # a class without shared layers fails in its own way, which is an answer
        return False
    gone = shapes.keys() ^ names.keys()
    return bool(gone) and all("shared" in name for name in gone)


def _blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == LAYERS:
            kinds = {type(block).__name__ for block in module}
            if len(kinds) > 1:
                raise DerivationError(f"{name}: blocks of several classes ({', '.join(sorted(kinds))})")
            return name, module
    raise DerivationError(
        f"{type(model).__name__}: no list of {LAYERS} blocks; the nearest is a list of decoder blocks"
    )


def _calls(model: nn.Module, block: nn.Module) -> list[str]:
    """Return the names of a block's submodules in the order in which a call begins them."""
    return _order(model, dict(block.named_children()))


def _cross(block: nn.Module, order: list[str]) -> tuple[str, ...]:
    """Return the names of a block's submodules that run on the output of an encoder alone."""
    if "encoder_hidden_states" not in inspect.signature(block.forward).parameters:
        return ()
    idle = [name for name, one in block.named_children() if name not in order and any(True for _ in one.parameters())]
    return tuple(idle)


def _order(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    order: list[str] = []
    handles = [
        one.register_forward_pre_hook(lambda *_, name=name: order.append(name), prepend=True)
        for name, one in modules.items()
    ]
    with torch.no_grad():
        model(torch.tensor([[3, 5, 4, 7]]))
    for handle in handles:
        handle.remove()
    return order


def _leaves(model: nn.Module, block: nn.Module) -> list[str]:
    """Return the names of the norms of a block, and of all modules with tensors, in order of calls."""
    modules = {
        name: one
        for name, one in block.named_modules()
        if name and (outside.is_norm(one) or any(True for _ in one.parameters(recurse=False)))
    }
    return _order(model, modules)


def _part(
    block: nn.Module,
    order: list[str],
    roles: Mapping[str, tuple[str, ...]],
    needed: tuple[str, ...],
    what: str,
    excluded: tuple[str, ...] = (),
) -> tuple[str, dict[str, str]]:
    """Return the child of a block with layers of the needed roles, and role -> name in it; "" is the block itself."""
    names = {name: role for role, some in roles.items() for name in some}
    for child in dict.fromkeys([*order, ""]):
        by_role: dict[str, str] = {}
        for name, module in block.get_submodule(child).named_modules():
            ends = [".".join(name.split(".")[-length:]) for length in (2, 1)]
            role = next((names[end] for end in ends if end in names), None)
            is_excluded = not child and name.startswith(tuple(filter(None, excluded)))
            if role is not None and not is_excluded and any(True for _ in module.parameters(recurse=False)):
                by_role.setdefault(role, name)
        if any(role in by_role for role in needed):
            return child, by_role
    children = ", ".join(f"{child} ({type(getattr(block, child)).__name__})" for child in order)
    raise DerivationError(f"no {what} layers of ours among {children}; the nearest have {' or '.join(needed)}")


def _norms(
    order: list[str],
    attention: tuple[str, Mapping[str, str]],
    feed_forward: tuple[str, Mapping[str, str]],
    classes: Mapping[str, str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the norms of a block, and where they may be."""
    units = {"A": attention, "F": feed_forward}
    members = {
        letter: {join(child, name) for name in names.values()} | {child} for letter, (child, names) in units.items()
    }
    places = {letter: [n for n, name in enumerate(order) if name in members[letter]] or [-1] for letter in units}
    word, norms, others = "", [], []
    for number, name in enumerate(order):
        inside = [one for one, (child, _) in units.items() if child and name.startswith(f"{child}.")]
        letter = next((one for one in units if name in members[one]), None)
        if (
            letter is None
            and inside
            and (min(places[inside[0]]) < number < max(places[inside[0]]) or "norm" not in classes[name].lower())
        ):
            letter = inside[0]
        if letter is None and "norm" not in classes[name].lower():
            others.append(name)
            continue
        if letter is None:
            norms.append(name)
            word += "N"
        elif not word.endswith(letter):
            word += letter
    if others:
        names = [*members["A"], *members["F"], *norms]
        near = difflib.get_close_matches(others[0], names, 1, 0.0)[0]
        raise DerivationError(f"{others[0]} ({classes[others[0]]}) has no role in our blocks; the nearest is {near}")
    if word not in PATTERNS:
        listing = ", ".join(f"{name} ({classes[name]})" for name in order)
        raise DerivationError(f"{listing}: norms in an order that our blocks lack; the nearest is 'sandwich'")
    return tuple(norms), PATTERNS[word]


def _flags(
    subject: ModelClass,
    shapes: Mapping[str, object],
    path: str,
    norms: tuple[str, ...],
    attention: tuple[str, Mapping[str, str]],
    feed_forward: tuple[str, Mapping[str, str]],
    around: Outside,
    experts: Experts | None,
) -> tuple[dict[str, KeySource], dict[str, tuple[object, ...]], frozenset[str]]:
    """Return the flags of biases, the head and sinks, flags that switch other tensors, and all names."""
    roles = {f"{join(attention[0], name)}.bias": role for role, name in attention[1].items()}
    fields = {
        name: {"W_key": "attention.key_bias", "out_proj": "attention.out_bias"}.get(role, "attention.qkv_bias")
        for name, role in roles.items()
        if role not in ("q_norm", "k_norm", "context_norm")
    }
    if "latent" in attention[1]:
        fields = {name: "attention.bias" for name, role in roles.items() if role in latent.BIASED}
    else:
        fields |= {join(attention[0], "sinks"): "attention.sinks"}
    norm_names = [name for role, name in attention[1].items() if role in ("q_norm", "k_norm")]
    fields |= {f"{join(attention[0], name)}.weight": "qk_norm.switch" for name in norm_names}
    shifts = [f"{join(attention[0], name)}.bias" for name in norm_names]
    fields |= {name: "qk_norm.switch" for name in shifts if f"{path}0.{name}" in shapes}
    fields |= {
        f"{join(feed_forward[0], name)}.bias": "feed_forward.bias"
        for role, name in feed_forward[1].items()
        if role != "hidden_norm"
    }
    fields |= {f"{name}.bias": "norm.bias" for name in norms}
    if experts is not None:
        shared = [name for ours, name in experts.named.items() if ours.startswith("ff.shared.")]
        fields |= {f"{name.removesuffix('.weight')}.bias": "experts.shared_bias" for name in shared}
    fronts = [f"{path}{number}." for number in range(LAYERS)]

    def present(names: Mapping[str, object]) -> dict[str, bool]:
        presence: dict[str, list[bool]] = collections.defaultdict(list)
        for name, field in fields.items():
            weight = f"{name.rpartition('.')[0]}.weight"
            if name.endswith("sinks") or any(front + weight in shapes for front in fronts):
                presence[field].append(any(front + name in names for front in fronts))
        mixed = [field for field, some in presence.items() if len(set(some)) > 1]
        if mixed:
            fields_listed = ", ".join(name for name, field in fields.items() if field == mixed[0])
            raise DerivationError(f"{mixed[0]}: biases of some of {fields_listed} alone, which ours lack")
        return {field: some[0] for field, some in presence.items()}

    usual = present(shapes)
    sources: dict[str, KeySource] = {}
    fixed: dict[str, tuple[object, ...]] = {}
    every = set(shapes)
    for key in sorted(subject.read):
        value = subject.usual(key)
        if not isinstance(value, bool):
            continue
        try:
            names = subject.shapes(subject.keys(**{key: not value}))
            changed = present(names)
        except Exception:
            fixed[key] = (value,)
            continue
        moved = names.keys() ^ shapes.keys()
        explained = {f"{path}{i}.{name}" for i in range(LAYERS) for name in fields} | {f"{around.head}.weight"}
        final = {name for name in moved if name.endswith(".bias") and not name.startswith(path) and name != around.bias}
        if moved - explained - final:
            fixed[key] = (value,)
            continue
        every |= set(names)
        sources |= {field: KeySource(key=key) for field, there in changed.items() if there != usual.get(field)}
    sources |= {field: KeySource(value=there) for field, there in usual.items() if field not in sources}
    fixed |= {key: (value,) for key, value in LONG.items() if key in subject.read}
    fixed |= {
        key: (subject.usual(key),) for key in sorted(subject.own_keys - subject.read) if _is_refused(subject, key)
    }
    return sources, fixed, frozenset(every)


def _is_refused(subject: ModelClass, key: str) -> bool:
    """Return whether a flag has one value alone in configs of a class, which refuses the other."""
    value = subject.usual(key)
    if not isinstance(value, bool):
        return False
    try:
        subject.config_class(**{key: not value})
    except Exception:  # a class of configs refuses what its models can't compute
        return True
    return False


def _check_all_known(structure: Structure, path: str) -> None:
    """Refuse the first tensor of a block without a role."""
    roles = {
        *(join(structure.attention[0], name) for name in structure.attention[1].values()),
        *(join(structure.feed_forward[0], name) for name in structure.feed_forward[1].values()),
        *structure.norms,
    }
    inner = set() if structure.experts is None else structure.experts.tensors
    for name in sorted(structure.tensors):
        hit = re.fullmatch(rf"{re.escape(path)}\d+\.(.+)", name)
        if hit is None:
            continue
        module, _, leaf = hit[1].rpartition(".")
        if hit[1].startswith(tuple(f"{one}." for one in structure.cross)):
            continue
        if re.sub(r"\.experts\.\d+\.", ".experts.{j}.", hit[1]) in inner or (
            hit[1].endswith(".bias") and (f"{module}.weight" in inner)
        ):
            continue
        activation = structure.feed_forward[1].get("activation", "")
        if activation and module == join(structure.feed_forward[0], activation) and leaf in XIELU:
            continue
        if module in roles and leaf in ("weight", "bias"):
            continue
        if hit[1] in (f"{structure.attention[0]}.sinks", structure.last_bias):
            continue
        kind = structure.classes.get(module, "")
        if not module:
            module, kind = name.removesuffix(f".{hit[1]}"), structure.block_class
        near = difflib.get_close_matches(hit[1], sorted(roles | inner), 1, 0.0)[0]
        raise DerivationError(f"{module} ({kind}): {leaf} has no place in ours; the nearest is {near}")
