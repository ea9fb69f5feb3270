"""Faults of ports of our modern variants: another config than the model's, or weights read in another order.

They need no faulty code: ``Port`` of both ``mutants.py`` runs the right module with the wrong config, or on the rows of
its weights in the order of the faulty code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from attn_bridge.masks import causal, sliding_window
from attn_bridge.specs import Config, GroupedQueryAttentionConfig, Indexer, SparseIndexedAttentionConfig
from attn_bridge.specs.position import Alibi, Pairing, RelativeBias, Rotary
from attn_bridge.weights import Rules

from .block_faults import Fault
from .pairs import Pair, draw_modern
from .port_reads import (
    Reads,
    bias_transposed,
    buckets_off_by_one,
    channels_value_first,
    channels_value_last,
    direction_swapped,
    groups_tiled,
    indexer_inside_out,
    inside_out,
    maps_interleaved,
    rope_first,
    swapped,
    taps_reversed,
)
from .row_faults import (
    frequencies_restarted,
    rows_in_other_order,
    sections_in_channels,
    sections_reversed,
    turns_for_sections,
)

Changes = Callable[[Any], Mapping[str, object]]
"""Config -> the fields that a port has otherwise, nothing where that config has nothing to change."""

Wrong = Changes | Reads
"""The fault of a port: its changes to the config, or its wrong reads."""


def _nothing(config: object) -> Mapping[str, object]:
    del config
    return {}


@dataclasses.dataclass(frozen=True)
class PortFault(Fault):
    """One fault in a port of a modern variant; it can be planted if it changes the config or the reads.

    Attributes:
        variant: name of the class.
        wrong: config -> the fault.
    """

    variant: str = ""
    wrong: Wrong = _nothing

    def pair(self, seed: int) -> Pair | None:
        """Return the pair of a seed; None where the fault can't be planted into it."""
        pair = draw_modern(seed, self.variant)
        if not self.wrong(pair.arguments["config"]):
            return None
        # Weights as a model starts with, biases 0 and norms 1, would hide half of what is read in the wrong place.
        return dataclasses.replace(pair, gain=pair.gain or 1.0, zero_biases=False)

    def is_hidden(self, pair: Pair) -> bool:
        """Whether it changes nothing in a pair: where it does is measured, not declared."""
        del pair
        return False

    def module(self, pair: Pair, *, planted: bool) -> tuple[str, Mapping[str, object]]:
        """Return the arguments of ``build`` of both ``mutants.py`` for a side of a pair, with or without the fault."""
        config: Config = pair.arguments["config"]
        arguments = {"variant": self.variant, "config": config}
        if planted:
            wrong = self.wrong(config)
            arguments |= {"reads": wrong} if isinstance(wrong, tuple) else {"config": config.replace(**wrong)}
        return "Port", arguments

    def rules(self, pair: Pair, shapes: Mapping[str, tuple[int, ...]]) -> Rules:
        """Return the rules of a pair's weights."""
        del shapes
        config: Config = pair.arguments["config"]
        return config.rules().prefixed("port", "port")


def _other_position(changes: Callable[[Rotary], Rotary]) -> Changes:
    def changed(config: Any) -> Mapping[str, object]:
        if not isinstance(config.position, Rotary):
            return {}
        position = changes(config.position)
        return {} if position == config.position else {"position": position}

    return changed


def _other_pairing(config: Any) -> Mapping[str, object]:
    if not isinstance(config.position, Rotary) or _turning(config) == 2:
        return {}
    pairing: Pairing = "half" if config.position.pairing == "interleaved" else "interleaved"
    return {"position": dataclasses.replace(config.position, pairing=pairing)}


def _other_bias(changes: Callable[[RelativeBias], RelativeBias]) -> Changes:
    """Return the change of a config's relative bias; none if it has another position or stays the same."""

    def changed(config: GroupedQueryAttentionConfig) -> Mapping[str, RelativeBias]:
        if not isinstance(config.position, RelativeBias):
            return {}
        position = changes(config.position)
        return {} if position == config.position else {"position": position}

    return changed


def _other_indexer(changes: Callable[[Indexer], Indexer]) -> Changes:
    """Return the change of a config's indexer."""
    return lambda config: {"indexer": changes(config.indexer)}


def _indexer_pairing(config: SparseIndexedAttentionConfig) -> Mapping[str, Indexer]:
    if config.position is None or config.rope_dim == 2:
        return {}
    pairing: Pairing = "half" if config.indexer.pairing == "interleaved" else "interleaved"
    return {"indexer": dataclasses.replace(config.indexer, pairing=pairing)}


def _turning(config: Any) -> int:
    """Return how many channels turn: two are a pair of either kind."""
    width: int = config.rope_dim if hasattr(config, "rope_dim") else config.position.width(config.head_dim)
    return width


_no_scaling = _other_position(lambda rope: dataclasses.replace(rope, scaling=None))
_default_distance = _other_bias(lambda bias: RelativeBias(bias.num_buckets, bidirectional=bias.bidirectional))
_no_ranges = _other_bias(lambda bias: dataclasses.replace(bias, max_distance=bias.num_per_direction))
"""With as many distances as buckets, no two distances share a bucket, up to 11 of them."""
_other_sides = _other_bias(lambda bias: dataclasses.replace(bias, bidirectional=not bias.bidirectional))
_whole_head = _other_position(lambda rope: rope if rope.axes else dataclasses.replace(rope, dim=None))


def _otherwise(field: str, value: Callable[[Any], Any]) -> Changes:
    """Set a field to what `value` makes of the config, where that is something else."""

    def changed(config: object) -> Mapping[str, object]:
        other = value(config)
        return {} if other == getattr(config, field) else {field: other}

    return changed


def _ten_times(field: str) -> Changes:
    return lambda config: {field: 10 * getattr(config, field)}


def _mask(config: Any, kind: str, other: Callable[[int], Any]) -> object:
    """Return another mask of the same size where the config has a mask of this kind."""
    name = type(config.mask).__name__.strip("_")
    return other(config.mask.size) if name == kind else config.mask


def _without_offset(config: Any) -> object:
    norm = config.qk_norm
    return norm if norm is None else dataclasses.replace(norm, unit_offset=not norm.unit_offset)


def _faults_of(variant: str, *rows: tuple[str, str, Wrong]) -> list[PortFault]:
    """Return the faults of a variant from rows of name, the porter's mistake, and its changes."""
    return [PortFault(name, about, variant=variant, wrong=wrong) for name, about, wrong in rows]


PORT_FAULTS: tuple[PortFault, ...] = (
    *_faults_of(
        "GroupedQueryAttention",
        ("grouped-rope-pairing", "halves turned instead of neighbours, or the other way round", _other_pairing),
        ("grouped-rope-scaling-missing", "scaling of the positions left out", _no_scaling),
        ("grouped-rope-whole-head", "all channels of a head turned instead of the first", _whole_head),
        ("grouped-rows-reversed", "pairs per row of positions in reverse order", sections_reversed),
        ("grouped-rows-in-other-order", "rows of positions read as (height, width, time)", rows_in_other_order),
        ("grouped-rows-take-turns", "consecutive pairs per row for rows in turn, or the reverse", turns_for_sections),
        ("grouped-rows-in-channels", "pairs per row counted in channels", sections_in_channels),
        ("grouped-rows-restarted", "frequencies that start over in each row, or that do not", frequencies_restarted),
        (
            "grouped-alibi-missing",
            "ALiBi left out",
            _otherwise("position", lambda c: None if isinstance(c.position, Alibi) else c.position),
        ),
        ("grouped-bias-off-by-one", "relative bias of the next bucket", buckets_off_by_one),
        ("grouped-bias-direction", "relative bias of the distance from key to query", direction_swapped),
        ("grouped-bias-without-ranges", "buckets of one distance each, without logarithmic ranges", _no_ranges),
        ("grouped-bias-default-distance", "max_distance of the relative bias left at 128", _default_distance),
        ("grouped-bias-other-sides", "buckets of a decoder in an encoder, or the reverse", _other_sides),
        ("grouped-bias-transposed", "table of the relative bias read as (head bucket)", bias_transposed),
        (
            "grouped-bias-with-scale",
            "scores scaled although the model has no scale",
            _otherwise("scale", lambda c: c.head_dim**-0.5 if isinstance(c.position, RelativeBias) else c.scale),
        ),
        (
            "grouped-qk-norm-offset",
            "norms of query and key with 1 + weight for weight, or the other way round",
            _otherwise("qk_norm", _without_offset),
        ),
        (
            "grouped-window-one-shorter",
            "window of W - 1",
            _otherwise("mask", lambda c: _mask(c, "SlidingWindow", lambda w: sliding_window(w - 1))),
        ),
        (
            "grouped-chunks-as-window",
            "chunks of N taken for a window of N",
            _otherwise("mask", lambda c: _mask(c, "Chunked", sliding_window)),
        ),
        (
            "grouped-prefix-missing",
            "prefix causal like the rest",
            _otherwise("mask", lambda c: _mask(c, "Prefix", lambda _: causal())),
        ),
        ("grouped-clip-missing", "clipping of the projections left out", _otherwise("clip", lambda _: None)),
        ("grouped-gate-is-query", "gate and query read from each other's rows", swapped(("W_gate", "W_query"))),
        (
            "grouped-gate-inside-out",
            "rows of the gate read as (channel head)",
            inside_out("W_gate", "head_dim", "num_heads"),
        ),
        ("grouped-heads-tiled", "key/value heads tiled instead of repeated", groups_tiled),
    ),
    *_faults_of(
        "MultiHeadLatentAttention",
        ("latent-rope-pairing", "halves turned instead of neighbours, or the other way round", _other_pairing),
        (
            "latent-scale-of-nope",
            "scale from the channels without position alone",
            _otherwise("scale", lambda c: c.nope_dim ** (-0.5)),
        ),
        (
            "latent-yarn-scale-missing",
            "YaRN without its part in the scale",
            _otherwise("scale", lambda c: (c.nope_dim + c.rope_dim) ** (-0.5)),
        ),
        ("latent-rope-first", "rotary channels of the query taken to be the first of a head", rope_first),
        ("latent-norm-eps", "eps of the norms ten times as large", _ten_times("norm_eps")),
        (
            "latent-value-inside-out",
            "rows of the values read as (channel head)",
            inside_out("W_value", "value_dim", "num_heads"),
        ),
    ),
    *_faults_of(
        "SparseIndexedAttention",
        (
            "indexed-one-key-more",
            "one key more chosen for each query",
            _other_indexer(lambda indexer: dataclasses.replace(indexer, top_k=indexer.top_k + 1)),
        ),
        (
            "indexed-all-keys",
            "every visible key attended to",
            _other_indexer(lambda indexer: dataclasses.replace(indexer, top_k=1 << 20)),
        ),
        (
            "indexed-pairing",
            "halves of the indexer's channels turned instead of neighbours, or the other way round",
            _indexer_pairing,
        ),
        ("indexed-heads-inside-out", "rows of the indexer's queries read as (channel head)", indexer_inside_out),
    ),
    *_faults_of(
        "CrossAttention",
        (
            "cross-key-and-value-swapped",
            "keys and values read from each other's weights",
            swapped(("W_key", "W_value")),
        ),
        ("cross-scale-missing", "no scale", _otherwise("scale", lambda _: 1.0)),
        ("cross-heads-tiled", "key/value heads tiled instead of repeated", groups_tiled),
    ),
    *_faults_of(
        "DifferentialAttention",
        (
            "differential-lambda-init",
            "initial lambda 0.05 too large",
            _otherwise("lambda_init", lambda c: c.lambda_init + 0.05),
        ),
        (
            "differential-lambdas-swapped",
            "lambdas of the two maps exchanged",
            swapped(("lambda_q1", "lambda_q2"), ("lambda_k1", "lambda_k2")),
        ),
        ("differential-maps-interleaved", "queries of the two maps read from neighbouring heads", maps_interleaved),
        ("differential-norm-eps", "eps of the norm ten times as large", _ten_times("norm_eps")),
    ),
    *_faults_of(
        "GatedDeltaNet",
        (
            "delta-beta-and-alpha-swapped",
            "beta and decay read from each other's weights",
            swapped(("W_beta", "W_alpha")),
        ),
        ("delta-decay-parameters-swapped", "dt_bias and A_log exchanged", swapped(("dt_bias", "A_log"))),
        ("delta-taps-reversed", "short convolution read backwards in time", taps_reversed),
        (
            "delta-channels-value-first",
            "channels of the convolution taken to lie as value, query, key",
            channels_value_first,
        ),
        (
            "delta-query-and-key-swapped",
            "queries and keys read from each other's weights",
            swapped(("W_query", "W_key")),
        ),
        (
            "delta-gate-inside-out",
            "rows of the gate read as (channel head)",
            inside_out("W_gate", "value_head_dim", "num_value_heads"),
        ),
        ("delta-norm-eps", "eps of the norm ten times as large", _ten_times("eps")),
    ),
    *_faults_of(
        "KimiDeltaAttention",
        (
            "kimi-query-and-key-swapped",
            "queries and keys read from each other's weights",
            swapped(("W_query", "W_key")),
        ),
        (
            "kimi-gates-swapped",
            "first projections of the decay and of the output gate read from each other's weights",
            swapped(("W_decay_down", "W_gate_down")),
        ),
        (
            "kimi-value-inside-out",
            "rows of the values read as (channel head)",
            inside_out("W_value", "value_head_dim", "num_heads"),
        ),
        (
            "kimi-decay-inside-out",
            "rows of the decays read as (channel head)",
            inside_out("W_decay_up", "head_dim", "num_heads"),
        ),
        ("kimi-taps-reversed", "short convolution read backwards in time", taps_reversed),
        (
            "kimi-channels-value-first",
            "channels of the convolution taken to lie as value, query, key",
            channels_value_first,
        ),
        ("kimi-norm-eps", "eps of the norm ten times as large", _ten_times("eps")),
    ),
    *_faults_of(
        "LightningAttention",
        (
            "lightning-query-and-key-swapped",
            "queries and keys read from each other's weights",
            swapped(("W_query", "W_key")),
        ),
        (
            "lightning-gate-and-value-swapped",
            "gate and values read from each other's weights",
            swapped(("W_gate", "W_value")),
        ),
        (
            "lightning-heads-interleaved",
            "rows of the values read as (channel head)",
            inside_out("W_value", "head_dim", "num_heads"),
        ),
        (
            "lightning-rates-of-the-first-layer",
            "decay rates that do not slow down with the layers",
            _otherwise("decay_rates", lambda c: type(c)(c.d_in, c.num_heads, c.head_dim).decay_rates),
        ),
        (
            "lightning-rates-reversed",
            "decay rates of the heads in the opposite order",
            _otherwise("decay_rates", lambda c: c.decay_rates[::-1]),
        ),
        ("lightning-no-decay", "a state that does not fade", _otherwise("decay_rates", lambda c: (0.0,) * c.num_heads)),
        ("lightning-norm-eps", "eps of the norm ten times as large", _ten_times("eps")),
    ),
    *_faults_of(
        "LinearAttention",
        (
            "linear-query-and-key-swapped",
            "queries and keys read from each other's weights",
            swapped(("W_query", "W_key")),
        ),
        (
            "linear-value-inside-out",
            "rows of the values read as (channel head)",
            inside_out("W_value", "value_head_dim", "num_heads"),
        ),
    ),
    *_faults_of(
        "GatedConvolution",
        (
            "convolution-query-and-value-swapped",
            "the gate behind the convolution and the values read from each other's weights",
            swapped(("W_query", "W_value")),
        ),
        ("convolution-taps-reversed", "short convolution read backwards in time", taps_reversed),
    ),
    *_faults_of(
        "Mamba",
        ("mamba1-query-and-key-swapped", "C and B read from each other's weights", swapped(("W_query", "W_key"))),
        (
            "mamba1-gate-and-value-swapped",
            "gate and values read from each other's weights",
            swapped(("W_gate", "W_value")),
        ),
        ("mamba1-bias-and-residual-swapped", "dt_bias and D exchanged", swapped(("dt_bias", "D"))),
        ("mamba1-taps-reversed", "short convolution read backwards in time", taps_reversed),
        (
            "mamba1-latents-not-normalised",
            "norms of step, B and C left out",
            _otherwise("latent_norms", lambda c: "none" if c.latent_norms == "plain" else c.latent_norms),
        ),
        (
            "mamba1-norm-eps",
            "eps of these norms ten times as large",
            _otherwise("eps", lambda c: c.eps if c.latent_norms == "none" else 10 * c.eps),
        ),
    ),
    *_faults_of(
        "Mamba2",
        ("mamba-query-and-key-swapped", "C and B read from each other's weights", swapped(("W_query", "W_key"))),
        (
            "mamba-gate-and-value-swapped",
            "gate and values read from each other's weights",
            swapped(("W_gate", "W_value")),
        ),
        ("mamba-decay-parameters-swapped", "dt_bias and A_log exchanged", swapped(("dt_bias", "A_log"))),
        ("mamba-residual-and-decay-swapped", "D and A_log exchanged", swapped(("D", "A_log"))),
        ("mamba-taps-reversed", "short convolution read backwards in time", taps_reversed),
        (
            "mamba-channels-value-last",
            "channels of the convolution taken to lie as key, query, value",
            channels_value_last,
        ),
        (
            "mamba-value-inside-out",
            "rows of the values read as (channel head)",
            inside_out("W_value", "head_dim", "num_heads"),
        ),
        ("mamba-norm-of-all-groups", "norm over all channels at once", _otherwise("norm_groups", lambda c: 1)),
        ("mamba-norm-eps", "eps of the norm ten times as large", _ten_times("eps")),
        ("mamba-steps-not-limited", "limit of the steps left out", _otherwise("max_step", lambda c: None)),
    ),
)
"""All of them, by variant."""
