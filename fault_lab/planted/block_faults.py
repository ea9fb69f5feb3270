"""Typical faults of ports of a transformer block; both ``mutants.py`` contain the faulty code.

This module has the name of each fault, where it can be planted, and where it changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from attn_bridge.weights import Rules
from attn_parity.results.findings import Verdict

from .mutants import BlockConfig, block_rules, draw_config
from .pairs import Pair, block_pair

Predicate = Callable[[BlockConfig], bool]


def always(config: BlockConfig) -> bool:
    """Return True."""
    del config
    return True


def never(config: BlockConfig) -> bool:
    """Return False."""
    del config
    return False


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: its name, which the block takes.
        about: the porter's mistake.
        applies: whether a configuration runs the faulty code at all.
        hidden: whether it changes neither an output nor a gradient in exact arithmetic.
        verdict: the expected verdict: ``different`` (another meaning), ``precision`` (the meaning is right, and the
            loss exceeds the other side's), ``inconclusive`` (not the same from run to run).
        drops_parameter: whether a parameter is left unused, which is reported even where the numbers hide it.
        held: whether the fault is in the weights: one side holds other weights than the other.
        in_attention: whether the faulty code computes scores and weights, which then runs no drawn kernel.
    """

    name: str
    about: str
    applies: Predicate = always
    hidden: Predicate = never
    verdict: Verdict = "different"
    drops_parameter: bool = False
    held: bool = False
    in_attention: bool = False

    def pair(self, seed: int) -> Pair | None:
        """Return the pair of a seed; None where the fault can't be planted into it."""
        config = draw_config(seed)
        return block_pair(config) if self.applies(config) else None

    def is_hidden(self, pair: Pair) -> bool:
        """Whether it changes nothing in a pair."""
        return self.hidden(pair.arguments["config"])

    def module(self, pair: Pair, *, planted: bool) -> tuple[str, Mapping[str, object]]:
        """Return the arguments of ``build`` of both ``mutants.py`` for a side of a pair, with or without the fault."""
        return "Block", {**pair.arguments, "fault": self.name if planted and not self.held else ""}

    def rules(self, pair: Pair, shapes: Mapping[str, tuple[int, ...]]) -> Rules:
        """Return the rules of a pair's weights, from their torch names and shapes."""
        del pair
        return block_rules(shapes)


def _separate(config: BlockConfig) -> bool:
    return not config.fused


def _has_layer_norm(config: BlockConfig) -> bool:
    return config.norm == "layer"


def _window_shows(config: BlockConfig) -> bool:
    """Whether a longer window shows more."""
    if config.window is None:
        return False
    longer = dataclasses.replace(config, window=config.window + 1)
    return bool((longer.visible() != config.visible()).any())


def _shift_invariant(config: BlockConfig) -> bool:
    """Whether adding one vector to all keys leaves the attention weights as they are."""
    return not (config.rope or config.qk_norm or config.softcap is not None or config.sinks)


BLOCK_FAULTS: tuple[Fault, ...] = (
    # Layouts of weights.
    Fault("query-weight-not-transposed", "query matrix read with its axes the other way round", _separate),
    Fault("out-weight-not-transposed", "output matrix read with its axes the other way round"),
    Fault(
        "query-and-key-swapped",
        "query projection used as key and the other way round",
        lambda c: c.num_heads == c.num_kv_heads,
    ),
    Fault("key-and-value-swapped", "key projection used as value and the other way round"),
    Fault(
        "fused-rows-per-head",
        "rows of the fused matrix read head by head instead of query, key, value",
        lambda c: c.fused and c.num_kv_heads > 1,
    ),
    Fault("heads-split-inside-out", "features split as (channel head)", lambda c: c.num_heads > 1),
    Fault("heads-merged-without-transpose", "heads merged without moving their axis back", lambda c: c.num_heads > 1),
    Fault("kv-heads-tiled", "key/value heads tiled instead of repeated", lambda c: 1 < c.num_kv_heads < c.num_heads),
    # Scores.
    Fault("scale-by-d_model", "scale 1/sqrt(d_model)", lambda c: c.d_model != c.head_dim, in_attention=True),
    Fault("scale-missing", "no scale", in_attention=True),
    Fault("scale-twice", "scale applied to the query and to the scores", in_attention=True),
    Fault("scale-off-by-1e-4", "scale off by one part in ten thousand", in_attention=True),
    Fault("softcap-missing", "soft-cap left out", lambda c: c.softcap is not None, in_attention=True),
    Fault("softcap-before-scale", "soft-cap first, then the scale", lambda c: c.softcap is not None, in_attention=True),
    Fault(
        "softcap-after-mask",
        "soft-cap after the mask, which it lifts",
        lambda c: c.softcap is not None and c.masked,
        in_attention=True,
    ),
    # Masks.
    Fault("mask-ignored", "every mask left out", lambda c: c.masked),
    Fault("mask-inverted", "True read as hidden", lambda c: c.masked),
    Fault("causal-shows-next-token", "causal mask off by one: the next token is visible", lambda c: c.causal),
    Fault("causal-hides-own-token", "causal mask off by one: the token itself is hidden", lambda c: c.causal),
    Fault("window-one-longer", "window of W + 1", _window_shows),
    Fault("padding-ignored", "padding mask left out", lambda c: c.padding != "none"),
    Fault("padding-on-queries", "padding mask applied to queries instead of keys", lambda c: c.padding != "none"),
    Fault("fill-minus-10", "hidden scores set to -10", lambda c: c.masked, in_attention=True),
    Fault(
        "fill-minus-1e4",
        "hidden scores set to -1e4",
        lambda c: c.masked,
        lambda c: c.sinks or not c.empty_rows,
        in_attention=True,
    ),
    Fault("fill-0", "scores multiplied with the mask", lambda c: c.masked, in_attention=True),
    Fault(
        "mask-after-softmax",
        "weights multiplied with the mask and not normalised again",
        lambda c: c.masked,
        in_attention=True,
    ),
    # Softmax.
    Fault("softmax-over-queries", "softmax over the wrong axis", in_attention=True),
    Fault(
        "sinks-missing", "sink left out of the denominator", lambda c: c.sinks, drops_parameter=True, in_attention=True
    ),
    Fault("softmax-in-bfloat16", "attention weights rounded to bfloat16", verdict="precision", in_attention=True),
    Fault("softmax-gradient-without-sum", "custom gradient of softmax that leaves out its sum", in_attention=True),
    # Positions.
    Fault("rope-interleaved", "neighbours rotated instead of halves", lambda c: c.rope and c.head_dim > 2),
    Fault("rope-theta-wrong", "base of the rotation ten times as large", lambda c: c.rope and c.head_dim > 2),
    Fault("rope-backwards", "rotation with the sign of the sine turned round", lambda c: c.rope),
    Fault("rope-positions-shifted", "all positions one too large", lambda c: c.rope, always),
    # Norms.
    Fault("norm-weight-plus-one", "norms multiply with 1 + weight"),
    Fault("norm-eps", "eps 1e-5 for 1e-6, or the other way round"),
    Fault("norm-kind-wrong", "RMSNorm for LayerNorm, or the other way round"),
    Fault("norm-unbiased-variance", "variance divided by n - 1", _has_layer_norm),
    Fault("norm-eps-outside-root", "std + eps"),
    Fault(
        "norm-fast-variance",
        "variance as E[x^2] - E[x]^2, on inputs of mean 100",
        lambda c: _has_layer_norm(c) and c.input_mean > 10,
        verdict="precision",
    ),
    Fault("qk-norm-after-rope", "query and key normalised after the rotation", lambda c: c.qk_norm and c.rope),
    # Without a rotation in between, the two weights are only ever multiplied with each other.
    Fault("qk-norm-weights-swapped", "norms of query and key exchanged", lambda c: c.qk_norm, lambda c: not c.rope),
    # Biases.
    Fault("query-bias-dropped", "query bias left out", lambda c: _separate(c) and c.qkv_bias, drops_parameter=True),
    Fault(
        "key-bias-dropped",
        "key bias left out",
        lambda c: _separate(c) and c.qkv_bias,
        _shift_invariant,
        drops_parameter=True,
    ),
    Fault("value-bias-dropped", "value bias left out", lambda c: _separate(c) and c.qkv_bias, drops_parameter=True),
    Fault("out-bias-dropped", "output bias left out", lambda c: c.out_bias, drops_parameter=True),
    # The block around attention.
    Fault("residual-missing", "residual connection around attention left out"),
    Fault("residual-of-normed", "residual connection taken after the norm"),
    Fault("norm-after-attention", "norm behind the residual connection instead of before attention"),
    Fault("gelu-tanh", "tanh approximation of GELU", lambda c: c.hidden > 0),
    Fault("second-output-is-first", "the first output returned twice", lambda c: c.outputs == 2),
    Fault("dropout-in-eval", "dropout that eval mode does not switch off", verdict="inconclusive", in_attention=True),
    # Gradients only.
    Fault("keys-detached", "keys detached from the gradient"),
    Fault("value-gradient-in-bfloat16", "gradient of the values rounded to bfloat16", verdict="precision"),
    # Precision.
    Fault("scores-in-tf32", "query and key rounded to 10 bits, as TF32 does", verdict="precision", in_attention=True),
    Fault("weights-in-float16", "matrices cast to float16 and back in the call", verdict="precision"),
    Fault("checkpoint-in-float16", "weights that went through a float16 checkpoint", held=True),
)
"""All of them, grouped by what goes wrong."""
