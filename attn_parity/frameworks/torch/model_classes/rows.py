"""The rows of a class's tensors in terms of ours, from its structure."""

from __future__ import annotations

from collections.abc import Iterator

from attn_bridge.models.derived.description import KeySource
from attn_bridge.models.rows.decoder import OURS
from attn_bridge.specs.blocks.feed_forward import XIELU
from attn_bridge.weights.rows import Row

from . import experts as mixtures
from . import latent, outside
from .sizes import HEADS, LAYERS
from .structure import DENSE, SLOTS, TURNED, Structure, join

CROSS = "attention to an encoder, which a decoder alone does not run"
"""Why tensors of cross attention are left out."""


def rows(structure: Structure, *, fused: str = "stacked", gate_first: bool = True) -> tuple[Row, ...]:
    """Return the rows of all tensors but, of models named as Llama is, embeddings and head.

    Args:
        structure: the names.
        fused: how queries, keys and values are in one projection: ``stacked`` or ``by-head``.
        gate_first: whether the gate comes first in a projection of gate and values.
    """
    table = _rows(structure, fused, gate_first)
    if structure.experts is not None:
        table = mixtures.both_names(structure.experts, table, f"{{prefix}}{structure.layers}.{{i}}.")
    return tuple(table)


def _rows(structure: Structure, fused: str, gate_first: bool) -> Iterator[Row]:
    layer = f"{{prefix}}{structure.layers}.{{i}}."
    yield from outside.rows(structure.outside, structure.front, is_usual=structure.is_usual)
    child, names = structure.attention
    if structure.is_latent:
        has_bias = any(".bias" in name for name in structure.tensors if f".{child}." in name)
        yield from latent.rows(f"{layer}{child}.", names, has_direct=structure.may_be_direct, has_bias=has_bias)
    for role, name in names.items() if not structure.is_latent else ():
        theirs = f"{layer}{join(child, name)}"
        if role == "fused":
            yield from _fused(structure, theirs, join(child, name), fused)
        elif role in ("q_norm", "k_norm"):
            is_switched = bool(structure.flags["qk_norm.switch"].key)
            yield Row(f"{theirs}.weight", (f"{OURS}att.{role}.scale",), optional=is_switched)
            if structure.has_shifts(role):
                yield Row(f"{theirs}.bias", (f"{OURS}att.{role}.shift",), optional=is_switched)
        elif role == "context_norm":
            yield Row(f"{theirs}.weight", (f"{OURS}att.{role}.scale",))
        else:
            of_heads = role == "W_gate" and structure.gates == HEADS
            of_ours = f"{OURS}att.{'W_head_gate' if of_heads else role}"
            yield from _linear(structure, theirs, join(child, name), of_ours)
    if any(name.endswith(f"{child}.sinks") for name in structure.tensors):
        yield Row(f"{layer}{child}.sinks", (f"{OURS}att.sinks",))
    if structure.last_bias:
        yield Row(f"{layer}{structure.last_bias}", (f"{OURS}att.out_proj.bias",), last=True)
    for name in structure.cross:
        yield Row(f"{layer}{name}.{{rest}}", reason=CROSS)
    child, names = structure.feed_forward
    gated = "gate" in names or "gate_up" in names
    ours = {"gate": "fc1", "up": "fc2", "down": "fc3"} if gated else {"up": "layers.0", "down": "layers.2"}
    branch = DENSE if structure.experts else ""
    for role, name in names.items():
        theirs = f"{layer}{join(child, name)}"
        if role == "activation":  # which other activations have no numbers of
            yield from (Row(f"{theirs}.{one}", (f"{OURS}ff.layers.1.{one}",), optional=True) for one in XIELU)
        elif role == "hidden_norm":
            yield Row(f"{theirs}.weight", (f"{OURS}ff.{role}.scale",), branch=branch)
        elif role == "gate_up":
            layers = ("fc1", "fc2") if gate_first else ("fc2", "fc1")
            parts = tuple(f"{OURS}ff.{one}.weight" for one in layers)
            yield Row(f"{theirs}.weight", parts, "o i -> (part o) i", part="part", branch=branch)
            yield from (
                Row(f"{theirs}.bias", tuple(f"{OURS}ff.{one}.bias" for one in layers), "o -> (part o)", part="part")
                for _ in _biases(structure, join(child, name))
            )
        else:
            yield from _linear(structure, theirs, join(child, name), f"{OURS}ff.{ours[role]}", branch)
    if structure.experts is not None:
        yield from mixtures.rows(
            structure.experts,
            layer,
            gate_first=gate_first,
            switched=bool(structure.flags.get("experts.shared_bias", KeySource(value=False)).key),
            has_bias=any(".shared" in name and name.endswith(".bias") for name in structure.tensors),
            may_lack_shared=structure.may_lack_shared,
        )
    for slot, name in zip(SLOTS[structure.placements[0]], structure.norms, strict=True):
        yield from _norm(structure, f"{layer}{name}", f"{structure.layers}.0.{name}", f"{OURS}{slot}")
    for slot, name in structure.outside.norms.items():
        bare = name.removeprefix(structure.front)
        front = "{prefix}" if name.startswith(structure.front) and structure.front else ""
        yield from _norm(structure, f"{front}{bare}", bare, slot)


def _biases(structure: Structure, name: str) -> list[bool]:
    """Return whether the bias of a layer in the first block is optional, as a list; an empty list without a bias."""
    fronts = [f"{structure.front}{structure.layers}.{number}." for number in range(LAYERS)]
    if not any(f"{front}{name}.bias" in structure.tensors for front in fronts):
        return []
    child, names = structure.attention
    is_attention = name in {join(child, one) for one in names.values()}
    switched = {field.partition(".")[0] for field, source in structure.flags.items() if source.key and "bias" in field}
    return [("attention" if is_attention else "feed_forward") in switched]


def _linear(structure: Structure, theirs: str, name: str, ours: str, branch: str = "") -> Iterator[Row]:
    pattern = "o i -> i o" if structure.classes.get(name) == TURNED else "... -> ..."
    yield Row(f"{theirs}.weight", (f"{ours}.weight",), pattern, branch=branch)
    yield from (
        Row(f"{theirs}.bias", (f"{ours}.bias",), optional=optional, branch=branch)
        for optional in _biases(structure, name)
    )


def _fused(structure: Structure, theirs: str, name: str, kind: str) -> Iterator[Row]:
    """Yield the rows of queries, keys and values in one projection; `kind` is one of `FUSED`."""
    for leaf, rest in (("weight", " i"), *(("bias", "") for _ in _biases(structure, name))):
        order = FUSED[kind][1]
        parts = tuple(f"{OURS}att.W_{part}.{leaf}" for part in order)
        optional = leaf == "bias" and _biases(structure, name)[0]
        turned = bool(rest) and structure.classes.get(name) == TURNED
        if kind in ("by-head", "by-four"):
            pattern = f"(h c){rest} -> (h part c){rest}"
            yield Row(f"{theirs}.{leaf}", parts, pattern, part="part", sizes={"h": FUSED[kind][0]}, optional=optional)
            continue
        groups, heads = FUSED[kind][0], structure.kv_heads
        # A class with as many key/value heads as query heads has no key for them.
        kv: int | str = 1 if heads == 1 else "num_heads" if heads == 4 else "num_kv_heads"
        shares: tuple[int | str, ...] = tuple("num_heads" if part == "query" else kv for part in order)
        if groups:
            pattern = f"(h x){rest} -> (h x){rest}"
            yield Row(
                f"{theirs}.{leaf}", parts, pattern, along="x", sizes={"h": groups}, shares=shares, optional=optional
            )
        else:
            pattern = "o i -> i o" if turned else f"o{rest} -> o{rest}"
            yield Row(f"{theirs}.{leaf}", parts, pattern, along="o", shares=shares, optional=optional)


FUSED: dict[str, tuple[int | str, tuple[str, ...]]] = {
    "stacked": ("", ("query", "key", "value")),
    "by-head": ("num_heads", ("query", "key", "value")),
    "by-group": ("num_kv_heads", ("query", "key", "value")),
    "by-four": (4, ("query", "value", "key")),
}
"""How queries, keys and values are in one projection -> the groups that each hold some of all, and their order.

CodeGen has four groups, one for each core of a TPU, with values before keys.
"""


def _norm(structure: Structure, theirs: str, name: str, ours: str) -> Iterator[Row]:
    if _has(structure, f"{name}.weight"):
        yield Row(f"{theirs}.weight", (f"{ours}.scale",))
    if _has(structure, f"{name}.bias"):
        optional = bool(structure.flags.get("norm.bias", KeySource(value=False)).key)
        yield Row(f"{theirs}.bias", (f"{ours}.shift",), optional=optional)


def _has(structure: Structure, name: str) -> bool:
    return f"{structure.front}{name}" in structure.tensors or name in structure.tensors
