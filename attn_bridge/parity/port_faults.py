"""Faults of ports of our modern variants: another config than the model's, or weights read in another order.

None needs wrong code of its own: ``Port`` of both ``mutants.py`` runs the right module by the wrong config, or on the
rows of its weights as the wrong code would take them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..masks import causal, sliding_window
from ..specs import Config
from ..specs.position import Alibi, Pairing, Rotary
from ..weights import Rules
from .block_faults import Fault
from .mutants import Pair, draw_modern

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Read:
    """What stands in the place of a tensor, or of the weight and the bias of a layer.

    Attributes:
        target: name of the vector or layer.
        source: name of the one that is read instead, a bias only where it has one.
        order: which index of the source each index is; () as they stand.
        axis: the axis that is put into this order, 0 or -1, counted in the torch layout; a bias only has the first.
    """

    target: str
    source: str
    order: tuple[int, ...] = ()
    axis: int = 0


def read(reads: tuple[Read, ...], held: Mapping[str, Any], *, transposed: bool) -> dict[str, Any]:
    """Return the tensors in whose place others are read.

    Args:
        reads: what is read in the place of what.
        held: all tensors, of either framework, by their names there.
        transposed: whether the axes of everything but vectors stand the other way round, as in Flax.
    """
    found = {}
    for one in reads:
        for name in held:
            layer, _, last = name.rpartition(".")
            if one.target not in (name, layer):
                continue
            source = one.source if name == one.target else f"{one.source}.{last}"
            tensor = held.get(source, held[name])
            if one.order and not (one.axis and tensor.ndim == 1):
                turned = transposed and tensor.ndim > 1
                tensor = tensor.T if turned else tensor
                order = np.array(one.order)
                tensor = tensor[order] if one.axis == 0 else tensor[..., order]
                tensor = tensor.T if turned else tensor
            found[name] = tensor
    return found


def _unchanged(config: Any) -> Mapping[str, Any]:
    del config
    return {}


def _as_held(config: Any) -> tuple[Read, ...]:
    del config
    return ()


@dataclasses.dataclass(frozen=True)
class PortFault(Fault):
    """One fault in a port of a modern variant; it can be planted where it changes the config or what is read.

    Attributes:
        variant: name of the class.
        changes: config -> the fields that the port has otherwise.
        reads: config -> what is read in the place of what.
    """

    variant: str = ""
    changes: Callable[[Any], Mapping[str, Any]] = _unchanged
    reads: Callable[[Any], tuple[Read, ...]] = _as_held

    def pair(self, seed: int) -> Pair | None:
        """Return the pair of a seed; None where the fault can't be planted into it."""
        pair = draw_modern(seed, self.variant)
        config = pair.arguments["config"]
        if not (self.changes(config) or self.reads(config)):
            return None
        # Weights as a model starts with, biases 0 and norms 1, would hide half of what is read in the wrong place.
        return dataclasses.replace(pair, gain=pair.gain or 1.0, zero_biases=False)

    def is_hidden(self, pair: Pair) -> bool:
        """Whether it changes nothing in a pair: where it does is measured, not declared."""
        del pair
        return False

    def module(self, pair: Pair, *, planted: bool) -> tuple[str, Mapping[str, Any]]:
        """Return what ``build`` of both ``mutants.py`` takes for one side of a pair, with the fault or without."""
        config: Config = pair.arguments["config"]
        reads = self.reads(config) if planted else ()
        config = config.replace(**self.changes(config)) if planted else config
        return "Port", {"variant": self.variant, "config": config, "reads": reads}

    def rules(self, pair: Pair, shapes: Mapping[str, tuple[int, ...]]) -> Rules:
        """Return the rules of a pair's weights."""
        del shapes
        config: Config = pair.arguments["config"]
        return config.rules().prefixed("port", "port")


def _order(pattern: str, **sizes: int) -> tuple[int, ...]:
    """Return which held row each row that is needed is read from.

    On the left of the einops pattern stands how the wrong code takes the held rows to lie, on the right how the right
    code does.
    """
    from einops import rearrange

    left, right = pattern.split(" -> ")
    names = left.strip("()").split()
    total = int(np.prod([sizes[name] for name in names]))
    order = rearrange(np.arange(total), f"{left} -> {right}", **sizes)
    return tuple(int(one) for one in order)


def _swapped(one: str, two: str) -> Callable[[Any], tuple[Read, ...]]:
    """Read two vectors or layers in each other's place, where they are of one shape."""

    def reads(config: Any) -> tuple[Read, ...]:
        shapes = {parameter.rule.torch.removesuffix(".weight"): parameter.shape for parameter in config.parameters}
        same = one in shapes and shapes[one] == shapes.get(two)
        return (Read(one, two), Read(two, one)) if same else ()

    return reads


def _rows(target: str, pattern: str, **sizes: str) -> Callable[[Any], tuple[Read, ...]]:
    """Read the rows of a layer in another order; sizes are names of fields of the config."""

    def reads(config: Any) -> tuple[Read, ...]:
        if not any(parameter.rule.torch.startswith(f"{target}.") for parameter in config.parameters):
            return ()
        order = _order(pattern, **{name: getattr(config, field) for name, field in sizes.items()})
        return (Read(target, target, order),) if order != tuple(sorted(order)) else ()

    return reads


def _groups_tiled(config: Any) -> tuple[Read, ...]:
    """Move every head of queries to the key/value head that it would get, with all that belongs to the head."""
    sizes = {"k": config.num_kv_heads, "g": config.num_heads // config.num_kv_heads}
    heads = _order("(g k) -> (k g)", **sizes)
    if heads == tuple(sorted(heads)):
        return ()
    rows = _order("(g k c) -> (k g c)", c=config.head_dim, **sizes)
    norm = getattr(config, "qk_norm", None)
    moved = [Read(name, name, rows) for name in ("W_query", "W_gate")]
    moved += [Read("q_norm", "q_norm", rows)] if norm is not None and norm.scope == "full" else []
    return *moved, Read("sinks", "sinks", heads), Read("out_proj", "out_proj", rows, -1)


def _maps_interleaved(config: Any) -> tuple[Read, ...]:
    order = _order("(h n c) -> (n h c)", h=config.num_heads // 2, n=2, c=config.head_dim)
    return (Read("W_query", "W_query", order),) if order != tuple(sorted(order)) else ()


def _rope_first(config: Any) -> tuple[Read, ...]:
    if config.position is None:
        return ()
    width = config.nope_dim + config.rope_dim
    one = [*range(config.rope_dim, width), *range(config.rope_dim)]
    order = tuple(head * width + channel for head in range(config.num_heads) for channel in one)
    return (Read("W_query", "W_query", order),)


def _taps_reversed(config: Any) -> tuple[Read, ...]:
    order = tuple(reversed(range(config.conv_size)))
    return (Read("conv1d", "conv1d", order, -1),) if len(order) > 1 else ()


def _channels_value_first(config: Any) -> tuple[Read, ...]:
    values, width = config.value_width, config.conv_width
    return (Read("conv1d", "conv1d", (*range(values, width), *range(values))),)


def _other_position(changes: Callable[[Rotary], Rotary]) -> Callable[[Any], Mapping[str, Any]]:
    def changed(config: Any) -> Mapping[str, Any]:
        if not isinstance(config.position, Rotary):
            return {}
        position = changes(config.position)
        return {} if position == config.position else {"position": position}

    return changed


def _other_pairing(config: Any) -> Mapping[str, Any]:
    if not isinstance(config.position, Rotary) or _turning(config) == 2:
        return {}
    pairing: Pairing = "half" if config.position.pairing == "interleaved" else "interleaved"
    return {"position": dataclasses.replace(config.position, pairing=pairing)}


def _turning(config: Any) -> int:
    """Return how many channels turn: two are a pair of either kind."""
    width: int = config.rope_dim if hasattr(config, "rope_dim") else config.position.width(config.head_dim)
    return width


_no_scaling = _other_position(lambda rope: dataclasses.replace(rope, scaling=None))
_whole_head = _other_position(lambda rope: dataclasses.replace(rope, dim=None))


def _otherwise(field: str, value: Callable[[Any], Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Set a field to what `value` makes of the config, where that is something else."""

    def changed(config: Any) -> Mapping[str, Any]:
        other = value(config)
        return {} if other == getattr(config, field) else {field: other}

    return changed


def _mask(config: Any, kind: str, other: Callable[[int], Any]) -> Any:
    """Return another mask of the same size where the config has a mask of this kind."""
    name = type(config.mask).__name__.strip("_")
    return other(config.mask.size) if name == kind else config.mask


def _without_offset(config: Any) -> Any:
    norm = config.qk_norm
    return norm if norm is None else dataclasses.replace(norm, unit_offset=not norm.unit_offset)


_GROUPED, _LATENT, _CROSS = "GroupedQueryAttention", "MultiHeadLatentAttention", "CrossAttention"
_DIFFERENTIAL, _DELTA, _LINEAR = "DifferentialAttention", "GatedDeltaNet", "LinearAttention"


def _fault(
    variant: str,
    name: str,
    about: str,
    changes: Callable[[Any], Mapping[str, Any]] = _unchanged,
    reads: Callable[[Any], tuple[Read, ...]] = _as_held,
) -> PortFault:
    return PortFault(name, about, variant=variant, changes=changes, reads=reads)


PORT_FAULTS: tuple[PortFault, ...] = (
    # GroupedQueryAttention.
    _fault(
        _GROUPED, "grouped-rope-pairing", "halves turned instead of neighbours, or the other way round", _other_pairing
    ),
    _fault(_GROUPED, "grouped-rope-scaling-missing", "scaling of the positions left out", _no_scaling),
    _fault(_GROUPED, "grouped-rope-whole-head", "all channels of a head turned instead of the first", _whole_head),
    _fault(
        _GROUPED,
        "grouped-alibi-missing",
        "ALiBi left out",
        _otherwise("position", lambda c: None if isinstance(c.position, Alibi) else c.position),
    ),
    _fault(
        _GROUPED,
        "grouped-qk-norm-offset",
        "norms of query and key with 1 + weight for weight, or the other way round",
        _otherwise("qk_norm", _without_offset),
    ),
    _fault(
        _GROUPED,
        "grouped-window-one-shorter",
        "window of W - 1",
        _otherwise("mask", lambda c: _mask(c, "SlidingWindow", lambda w: sliding_window(w - 1))),
    ),
    _fault(
        _GROUPED,
        "grouped-chunks-as-window",
        "chunks of N taken for a window of N",
        _otherwise("mask", lambda c: _mask(c, "Chunked", sliding_window)),
    ),
    _fault(
        _GROUPED,
        "grouped-prefix-missing",
        "prefix causal like the rest",
        _otherwise("mask", lambda c: _mask(c, "Prefix", lambda _: causal())),
    ),
    _fault(
        _GROUPED, "grouped-clip-missing", "clipping of the projections left out", _otherwise("clip", lambda _: None)
    ),
    _fault(
        _GROUPED,
        "grouped-gate-is-query",
        "gate and query read from each other's rows",
        reads=_swapped("W_gate", "W_query"),
    ),
    _fault(
        _GROUPED,
        "grouped-gate-inside-out",
        "rows of the gate read as (channel head)",
        reads=_rows("W_gate", "(c h) -> (h c)", c="head_dim", h="num_heads"),
    ),
    _fault(_GROUPED, "grouped-heads-tiled", "key/value heads tiled instead of repeated", reads=_groups_tiled),
    # MultiHeadLatentAttention.
    _fault(
        _LATENT, "latent-rope-pairing", "halves turned instead of neighbours, or the other way round", _other_pairing
    ),
    _fault(
        _LATENT,
        "latent-scale-of-nope",
        "scale from the channels without position alone",
        _otherwise("scale", lambda c: c.nope_dim**-0.5),
    ),
    _fault(
        _LATENT,
        "latent-yarn-scale-missing",
        "YaRN without its part in the scale",
        _otherwise("scale", lambda c: (c.nope_dim + c.rope_dim) ** -0.5),
    ),
    _fault(
        _LATENT, "latent-rope-first", "rotary channels of the query taken to be the first of a head", reads=_rope_first
    ),
    _fault(
        _LATENT,
        "latent-norm-eps",
        "eps of the norms ten times as large",
        _otherwise("norm_eps", lambda c: 10 * c.norm_eps),
    ),
    _fault(
        _LATENT,
        "latent-value-inside-out",
        "rows of the values read as (channel head)",
        reads=_rows("W_value", "(c h) -> (h c)", c="value_dim", h="num_heads"),
    ),
    # CrossAttention.
    _fault(
        _CROSS,
        "cross-key-and-value-swapped",
        "keys and values read from each other's weights",
        reads=_swapped("W_key", "W_value"),
    ),
    _fault(_CROSS, "cross-scale-missing", "no scale", _otherwise("scale", lambda _: 1.0)),
    _fault(_CROSS, "cross-heads-tiled", "key/value heads tiled instead of repeated", reads=_groups_tiled),
    # DifferentialAttention.
    _fault(
        _DIFFERENTIAL,
        "differential-lambda-init",
        "initial lambda 0.05 too large",
        _otherwise("lambda_init", lambda c: c.lambda_init + 0.05),
    ),
    _fault(
        _DIFFERENTIAL,
        "differential-lambdas-swapped",
        "lambdas of the two maps exchanged",
        reads=lambda c: (*_swapped("lambda_q1", "lambda_q2")(c), *_swapped("lambda_k1", "lambda_k2")(c)),
    ),
    _fault(
        _DIFFERENTIAL,
        "differential-maps-interleaved",
        "queries of the two maps read from neighbouring heads",
        reads=_maps_interleaved,
    ),
    _fault(
        _DIFFERENTIAL,
        "differential-norm-eps",
        "eps of the norm ten times as large",
        _otherwise("norm_eps", lambda c: 10 * c.norm_eps),
    ),
    # GatedDeltaNet.
    _fault(
        _DELTA,
        "delta-beta-and-alpha-swapped",
        "beta and decay read from each other's weights",
        reads=_swapped("W_beta", "W_alpha"),
    ),
    _fault(_DELTA, "delta-decay-parameters-swapped", "dt_bias and A_log exchanged", reads=_swapped("dt_bias", "A_log")),
    _fault(_DELTA, "delta-taps-reversed", "short convolution read backwards in time", reads=_taps_reversed),
    _fault(
        _DELTA,
        "delta-channels-value-first",
        "channels of the convolution taken to lie as value, query, key",
        reads=_channels_value_first,
    ),
    _fault(
        _DELTA,
        "delta-query-and-key-swapped",
        "queries and keys read from each other's weights",
        reads=_swapped("W_query", "W_key"),
    ),
    _fault(
        _DELTA,
        "delta-gate-inside-out",
        "rows of the gate read as (channel head)",
        reads=_rows("W_gate", "(c h) -> (h c)", c="value_head_dim", h="num_value_heads"),
    ),
    _fault(_DELTA, "delta-norm-eps", "eps of the norm ten times as large", _otherwise("eps", lambda c: 10 * c.eps)),
    # LinearAttention.
    _fault(
        _LINEAR,
        "linear-query-and-key-swapped",
        "queries and keys read from each other's weights",
        reads=_swapped("W_query", "W_key"),
    ),
    _fault(
        _LINEAR,
        "linear-value-inside-out",
        "rows of the values read as (channel head)",
        reads=_rows("W_value", "(c h) -> (h c)", c="value_head_dim", h="num_heads"),
    ),
)
"""All of them, by variant."""
