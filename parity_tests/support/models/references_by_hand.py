"""Small calls of the modern variants with their results, worked out by hand from the formulas of the papers.

Most inputs are the identity, two tokens wide: column t of a weight is the vector of token t.
"""

from __future__ import annotations

import dataclasses
import math
from math import exp, sqrt
from typing import Any

import numpy as np

from attn_bridge import specs
from attn_bridge.masks import full, sliding_window

LOG2, LOG3 = math.log(2), math.log(3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a reference and its result; `weights` is None where there are none."""

    name: str
    config: specs.Config
    parameters: dict[str, Any]
    output: Any
    weights: Any
    x: Any = ((1.0, 0.0), (0.0, 1.0))
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)


def columns(*vectors: Any) -> Any:
    """Return the weight that gives each token of an identity its vector."""
    return np.array(vectors, np.float64).T


def shares(*numbers: float) -> list[float]:
    """Return numbers divided by their sum: the softmax of their logarithms."""
    return [number / sum(numbers) for number in numbers]


# ---- grouped-query attention

HEAD = {
    "W_query.weight": columns([LOG2], [0.0]),
    "W_query.bias": np.array([LOG2]),
    "W_key.weight": columns([0.0], [1.0]),
    "W_key.bias": np.array([1.0]),
    "W_value.weight": columns([1.0], [3.0]),
    "W_value.bias": np.array([-1.0]),
    "out_proj.weight": np.array([[3.0], [0.0]]),
}
"""One head: scores [[2, 4], [1, 2]] * log(2), values 0 and 2; the output is three times the context."""

ONE = specs.GroupedQueryAttentionConfig(2, 1, 1, 1, qkv_bias=True)
TWO = specs.GroupedQueryAttentionConfig(2, 2, 1, 1, qkv_bias=True, out_bias=True)

TWO_HEADS = HEAD | {
    "W_query.weight": columns([LOG2, 0.0], [0.0, 0.0]),
    "W_query.bias": np.array([LOG2, 0.0]),
    "out_proj.weight": np.array([[1.0, 2.0], [0.0, 1.0]]),
    "out_proj.bias": np.array([10.0, 20.0]),
}
"""The same head and one that attends to all alike, on one key and value; out = (a + 2 b + 10, b + 20)."""


def piece(name: str, later: list[float], parameters: dict[str, Any] | None = None, **changes: Any) -> Case:
    """Return a case of `ONE` with changes, by the weights of its second token; the first sees itself alone."""
    return Case(name, ONE.replace(**changes), HEAD | (parameters or {}), [[0, 0], [6 * later[1], 0]], [[[1, 0], later]])


def rotary(name: str, channel: int, cosine: float, inputs: dict[str, Any] | None = None, **options: Any) -> Case:
    """Return a case with queries and keys that are 1 in one channel: one position apart, their score is `cosine`."""
    same = columns(*2 * [np.eye(4)[channel]])
    parameters = {
        "W_query.weight": same,
        "W_key.weight": same,
        "W_value.weight": columns([2.0, 0, 0, 0], [6.0, 0, 0, 0]),
        "out_proj.weight": np.eye(2, 4),
    }
    config = specs.GroupedQueryAttentionConfig(2, 1, 1, 4, scale=1.0, position=specs.Rotary(**options))
    later = shares(exp(cosine), exp(1.0))
    output = [[2, 0], [2 * later[0] + 6 * later[1], 0]]
    return Case(name, config, parameters, output, [[[1, 0], later]], inputs=inputs or {})


def relative(name: str, position: specs.RelativeBias, factors: list[float], weights: Any, **changes: Any) -> Case:
    """Return a case whose scores are a relative bias alone; `factors` of the buckets are its exponentials."""
    tokens = len(weights)
    parameters = {
        "W_query.weight": np.zeros((1, tokens)),
        "W_key.weight": np.zeros((1, tokens)),
        "W_value.weight": np.arange(tokens)[None, :],
        "out_proj.weight": np.eye(tokens, 1),
        "relative_bias": np.log(factors)[:, None],
    }
    config = specs.GroupedQueryAttentionConfig(tokens, 1, head_dim=1, position=position, scale=1.0, **changes)
    means = [sum(at * weight for at, weight in enumerate(row)) for row in weights]
    return Case(name, config, parameters, np.outer(means, np.eye(tokens)[0]), [weights], np.eye(tokens))


def normed(query: float, factor: float = 1.0) -> list[float]:
    """Return weights of the second token after norms with an eps of 1: keys 1 and 2, `factor` from the scales."""
    return shares(exp(factor * query / sqrt(2)), exp(factor * query * 2 / sqrt(5)))


ROWS = {"positions": np.array([[[7, 10]], [[2, 7]]])}

GROUPS = {
    "W_query.weight": np.zeros((4, 2)),
    "W_key.weight": columns([3.0, 5.0], [7.0, 9.0]),
    "W_value.weight": columns([1.0, 5.0], [3.0, 9.0]),
    "out_proj.weight": np.eye(4),
}
FULL = normed(LOG2 / sqrt(LOG2**2 / 2 + 1))
ALIBI = [shares(exp(-slope), 1.0) for slope in (2.0**-4, 2.0**-8, 2.0**-2)]
SCALES = {"q_norm.scale": np.array([2.0]), "k_norm.scale": np.array([3.0])}

GROUPED = (
    Case(
        "two heads share a key",
        TWO,
        TWO_HEADS,
        [[10, 20], [10 + 4 / 3 + 2, 21]],
        [[[1, 0], [1 / 3, 2 / 3]], [[1, 0], [1 / 2, 1 / 2]]],
    ),
    Case(
        "neighbouring heads share a key",
        specs.GroupedQueryAttentionConfig(2, 4, 2, 1, 4),
        GROUPS,
        [[1, 1, 5, 5], [2, 2, 7, 7]],
        4 * [[[1, 0], [1 / 2, 1 / 2]]],
    ),
    piece("default scale", [1 / 3, 2 / 3]),
    piece("scale", [1 / 5, 4 / 5], scale=2.0),
    # The hyperbolic tangents of log(3) / 2 and log(3) are 1/2 and 4/5.
    piece("softcap", shares(2 ** (1 / LOG3), 2 ** (8 / (5 * LOG3))), softcap=2 * LOG2 / LOG3),
    piece("sliding window", [0, 1], mask=sliding_window(1)),
    piece("norm of heads", normed(LOG2 / sqrt(LOG2**2 + 1), 6.0), SCALES, qk_norm=specs.QKNorm(eps=1.0)),
    piece(
        "norm of heads that counts from 1",
        normed(LOG2 / sqrt(LOG2**2 + 1), 12.0),
        SCALES,
        qk_norm=specs.QKNorm(eps=1.0, unit_offset=True),
    ),
    # Heads of one channel are 0 without their mean: scores are products of the shifts, the same for all keys.
    piece(
        "layer norm of heads",
        [1 / 2, 1 / 2],
        SCALES | {"q_norm.shift": np.array([2.0]), "k_norm.shift": np.array([3.0])},
        qk_norm=specs.QKNorm(eps=1.0, kind="layer"),
    ),
    Case(
        "norm of all heads",
        TWO.replace(qk_norm=specs.QKNorm("full", eps=1.0)),
        TWO_HEADS | {"q_norm.scale": np.ones(2), "k_norm.scale": np.ones(1)},
        [[10, 20], [10 + 2 * FULL[1] + 2, 21]],
        [[[1, 0], FULL], [[1, 0], [1 / 2, 1 / 2]]],
    ),
    Case("clip", ONE.replace(clip=1.0), HEAD, [[0, 0], [3 / 2, 0]], [[[1, 0], [1 / 2, 1 / 2]]]),
    Case(
        "sinks",
        ONE.replace(sinks=True),
        HEAD | {"sinks": np.array([LOG2])},
        [[0, 0], [3, 0]],
        [[[2 / 3, 0], [1 / 4, 1 / 2]]],
    ),
    Case(
        "gate",
        ONE.replace(gate=True),
        HEAD | {"W_gate.weight": columns([5.0], [LOG3 - 1.0]), "W_gate.bias": np.ones(1)},
        [[0, 0], [3, 0]],
        [[[1, 0], [1 / 3, 2 / 3]]],
    ),
    Case(
        "ALiBi of three heads",
        specs.GroupedQueryAttentionConfig(2, 3, 1, 1, 3, position=specs.Alibi()),
        {
            "W_query.weight": np.zeros((3, 2)),
            "W_key.weight": columns([3.0], [5.0]),
            "W_value.weight": columns([0.0], [2.0]),
            "out_proj.weight": np.eye(3),
        },
        [[0, 0, 0], [2 * later[1] for later in ALIBI]],
        [[[1, 0], later] for later in ALIBI],
    ),
    # Distances 0 to 4 have the buckets 0, 1, 2, 2 and 3: the last range begins at 2 * sqrt(8 / 2) = 4.
    relative(
        "relative bias of a decoder",
        specs.RelativeBias(4, 8),
        [1.0, 2.0, 3.0, 5.0],
        [shares(*row) for row in ([1, 0, 0, 0, 0], [2, 1, 0, 0, 0], [3, 2, 1, 0, 0], [3, 3, 2, 1, 0], [5, 3, 3, 2, 1])],
    ),
    # No distance has the bucket 2: a later key is at least one token away.
    relative(
        "relative bias of an encoder",
        specs.RelativeBias(4, 2, bidirectional=True),
        [1.0, 2.0, 9.0, 3.0],
        [shares(1, 3), shares(2, 1)],
        mask=full(),
    ),
    rotary("rotary halves", 1, math.cos(1 / 2), base=4.0),
    rotary("rotary neighbours", 1, math.cos(1.0), base=4.0, pairing="interleaved"),
    rotary("rotary of two channels", 1, math.cos(1.0), base=4.0, dim=2),
    rotary("beyond the rotary channels", 3, 1.0, base=4.0, dim=2),
    rotary("rotary of halved positions", 0, math.cos(1 / 2), scaling=specs.LinearScaling(2.0)),
    # Two pairs turn by 1 and by 1/2 per position, or both by 1; the rows of positions go up by 3 and by 5.
    rotary("rotary of the first row", 0, math.cos(3.0), ROWS, base=4.0, axes=(1, 1)),
    rotary("rotary of the second row", 1, math.cos(5 / 2), ROWS, base=4.0, axes=(1, 1)),
    rotary("rotary rows in turn", 1, math.cos(5 / 2), ROWS, base=4.0, axes=(1, 1), layout="interleaved"),
    rotary("rotary rows left over", 1, math.cos(3 / 2), ROWS, base=4.0, axes=(2, 0), layout="interleaved"),
    rotary("rotary frequencies per row", 1, math.cos(5.0), ROWS, base=4.0, axes=(1, 1), layout="axial"),
    rotary("rotary frequencies in strides", 1, math.cos(5 / 2), ROWS, base=4.0, axes=(1, 1), layout="strided"),
)

# ---- the others

NORMS = (
    *(
        Case(
            name,
            specs.RMSNormConfig(2, 3.5, unit_offset),
            {"scale": np.array(scale)},
            [[3 / 2, 8], [0, 4]],
            None,
            x=((3.0, 4.0), (0.0, 1.0)),
        )
        for name, unit_offset, scale in (("scale", False, [2.0, 8.0]), ("scale from 1", True, [1.0, 7.0]))
    ),
    Case(
        "mean taken off, scale from 1",
        specs.LayerNormConfig(2, 3.75, unit_offset=True),
        {"scale": np.array([1.0, 7.0]), "shift": np.array([0.0, 10.0])},
        [[-1 / 2, 12], [-1 / 2, 12]],
        None,
        x=((3.0, 4.0), (0.0, 1.0)),
    ),
)

LATENT_SHARES = shares(2 * exp(math.cos(1.0)), exp(1.0) / 2)
LATENT = Case(
    "latents",
    specs.MultiHeadLatentAttentionConfig(2, 1, 1, 1, 2, 1, query_dim=1, scale=1.0, norm_eps=7.0),
    {
        # A latent of 3 is 3/4 after a norm with an eps of 7, and 1 after its scale.
        "W_query_latent.weight": columns([3.0], [3.0]),
        "query_norm.scale": np.array([4 / 3]),
        "W_query.weight": np.array([[LOG2], [1.0], [0.0]]),
        "W_latent.weight": columns([3.0], [-3.0]),
        "latent_norm.scale": np.array([4 / 3]),
        "W_key_rope.weight": columns([1.0, 0.0], [1.0, 0.0]),
        "W_key.weight": np.array([[1.0]]),
        "W_value.weight": np.array([[5.0]]),
        "out_proj.weight": np.array([[1.0], [2.0]]),
    },
    [[5, 10], [5 * (LATENT_SHARES[0] - LATENT_SHARES[1]), 10 * (LATENT_SHARES[0] - LATENT_SHARES[1])]],
    [[[1, 0], LATENT_SHARES]],
)

INDEXER = {
    # Keys are (1, -1) and (-1, 1) after a norm with an eps of 3; the query of the second token is near the first key.
    "indexer.W_index_query.weight": np.array([[1.0], [-1.0]]),
    "indexer.W_index_key.weight": columns([1.0, -1.0], [-1.0, 1.0]),
    "indexer.key_norm.scale": np.array([2.0, 2.0]),
    "indexer.key_norm.shift": np.array([0.0, 0.0]),
}
INDEXED = tuple(
    Case(
        name,
        specs.SparseIndexedAttentionConfig.of(LATENT.config, specs.Indexer(1, 2, top_k=1, norm_eps=3.0)),
        {**LATENT.parameters, **INDEXER, "indexer.W_index_weights.weight": np.full((1, 2), weight)},
        [[5, 10], [sign * 5, sign * 10]],
        [[[1, 0], [float(sign > 0), float(sign < 0)]]],
    )
    for name, weight, sign in (
        ("the key with the highest score", 1.0, 1),
        ("a key with a score of 0 before a negative one", -1.0, -1),
        ("the first of keys with equal scores", 0.0, 1),
    )
)

CROSS = (
    Case(
        "neighbouring heads share a key",
        specs.CrossAttentionConfig(2, 4, 2, 2, 1, 4),
        GROUPS,
        2 * [[2, 2, 7, 7]],
        4 * [2 * [[1 / 2, 1 / 2]]],
        inputs={"context": np.eye(2)},
    ),
    Case(
        "context of three tokens",
        specs.CrossAttentionConfig(1, 2, 1, 1, 1, out_bias=True),
        {
            "W_query.weight": np.array([[LOG2], [0.0]]),
            "W_key.weight": np.array([[1.0]]),
            "W_value.weight": np.array([[7.0]]),
            "out_proj.weight": np.array([[1.0, 2.0]]),
            "out_proj.bias": np.array([5.0]),
        },
        [[10 + 2 * 7 + 5]],
        [[[1 / 7, 2 / 7, 4 / 7]], [[1 / 3, 1 / 3, 1 / 3]]],
        x=((1.0,),),
        inputs={"context": np.array([[0.0], [1.0], [2.0]])},
    ),
)

DIFFERENCE = Case(
    # Contexts of the first head (0, 4) and (4/3, 4/3), of the second (0, 4) and (1, 2); 3/2 of the latter is taken off.
    "difference of two heads",
    specs.DifferentialAttentionConfig(2, 2, 2, 1, qkv_bias=True, lambda_init=0.5, norm_eps=0.25),
    {
        "W_query.weight": columns([LOG2, 0.0], [0.0, 0.0]),
        "W_query.bias": np.array([LOG2, 0.0]),
        "W_key.weight": columns([0.0, 3.0], [1.0, 5.0]),
        "W_key.bias": np.ones(2),
        "W_value.weight": columns([1.0, 4.0], [3.0, 0.0]),
        "W_value.bias": np.array([-1.0, 0.0]),
        "out_proj.weight": np.array([[2.0, 0.0], [0.0, 6.0]]),
        "lambda_q1": np.array([LOG2]),
        "lambda_k1": np.array([1.0]),
        "lambda_q2": np.array([3.0]),
        "lambda_k2": np.array([0.0]),
    },
    [[0, -4], [-1 / 6 / sqrt(119 / 72), -5 / sqrt(119 / 72)]],
    [[[1, 0], [1 / 3, 2 / 3]], [[1, 0], [1 / 2, 1 / 2]]],
)

LINEAR = Case(
    # Features: 1 of every query; 1/2 and 3 of the keys.
    "features of both signs",
    specs.LinearAttentionConfig(2, 1, 1, 1, qkv_bias=True, out_bias=True),
    {
        "W_query.weight": np.zeros((1, 2)),
        "W_query.bias": np.zeros(1),
        "W_key.weight": columns([-1.0 - LOG2], [1.0]),
        "W_key.bias": np.ones(1),
        "W_value.weight": columns([6.0], [13.0]),
        "W_value.bias": np.ones(1),
        "out_proj.weight": np.array([[2.0], [0.0]]),
        "out_proj.bias": np.array([1.0, 3.0]),
    },
    [[15, 3], [27, 3]],
    [[[1, 0], [1 / 7, 6 / 7]]],
)


def silu(number: float) -> float:
    """Return a number times its sigmoid."""
    return number / (1 + exp(-number))


def delta_case() -> Case:
    """Return two tokens through one state, a number: it halves, is corrected by 3/4 of the error, and is read."""
    query, key, value = (
        [silu(own[0] * 2), silu(own[0] * 1 + own[1] * 2)] for own in ((0.5, 1.5), (2.0, -1.0), (3.0, 4.0))
    )
    query, key = ([number / sqrt(number**2 + 1e-6) for number in numbers] for numbers in (query, key))
    state = 0.75 * value[0] * key[0]
    first = state * query[0]
    state = 0.5 * (state - 0.75 * state * key[1] ** 2) + 0.75 * value[1] * key[1]
    second = state * query[1]
    gate = (silu(1.0), silu(-2.0))
    contexts = [
        1.5 * number / sqrt(number**2 + 4.0) * factor for number, factor in zip((first, second), gate, strict=True)
    ]
    parameters = {
        "W_query.weight": columns([0.5], [1.5]),
        "W_key.weight": columns([2.0], [-1.0]),
        "W_value.weight": columns([3.0], [4.0]),
        "W_gate.weight": columns([1.0], [-2.0]),
        "W_beta.weight": columns([LOG3], [LOG3]),
        "W_alpha.weight": columns([LOG2], [LOG2]),
        # The softplus of 0 is log(2), and exp(A_log) is 1: the state halves.
        "dt_bias": np.array([-LOG2]),
        "A_log": np.array([0.0]),
        "conv1d.weight": np.array(3 * [[[1.0, 2.0]]]),
        "norm.scale": np.array([1.5]),
        "out_proj.weight": np.array([[1.0], [-2.0]]),
    }
    config = specs.GatedDeltaNetConfig(2, 1, 1, 1, 1, conv_size=2, eps=4.0)
    return Case("one state", config, parameters, [[number, -2 * number] for number in contexts], None)


def convolution_case() -> Case:
    """Return two tokens through a convolution of two taps over one channel."""
    # Products of key and value are 2 * 3 and -1 * 4; queries 0.5 and 1.5; taps 1 and 2, the last of the token itself.
    mixed = (2 * 6.0 + 0.5, 6.0 - 2 * 4.0 + 0.5)
    parameters = {
        "W_query.weight": columns([0.5], [1.5]),
        "W_query.bias": np.array([0.0]),
        "W_key.weight": columns([1.0], [-2.0]),
        "W_key.bias": np.array([1.0]),
        "W_value.weight": columns([3.0], [4.0]),
        "W_value.bias": np.array([0.0]),
        "conv1d.weight": np.array([[[1.0, 2.0]]]),
        "conv1d.bias": np.array([0.5]),
        "out_proj.weight": np.array([[1.0], [-2.0]]),
        "out_proj.bias": np.array([0.0, 1.0]),
    }
    config = specs.GatedConvolutionConfig(2, 1, conv_size=2, bias=True)
    outputs = [(0.5 * mixed[0], 1 - 0.5 * 2 * mixed[0]), (1.5 * mixed[1], 1 - 1.5 * 2 * mixed[1])]
    return Case("two taps", config, parameters, [list(pair) for pair in outputs], None)


def selective_case() -> Case:
    """Return two tokens through a channel with a state of two numbers, of which the second fades twice as fast."""
    # Inputs are (1, 0) and (0, 1). Keys are (2, -1) times the values, queries (0.5, 1.5) times them.
    values = (silu(2 * 3.0), silu(3.0 + 2 * 4.0))
    state, contexts = [0.0, 0.0], []
    for value, gate in zip(values, (silu(1.0), silu(-2.0)), strict=True):
        step = math.log(1 + exp(0.5 * 0.25 * value - 1.0))
        written = (2 * step * value * value, -step * value * value)
        state = [exp(rate * step) * one + new for rate, one, new in zip((-1, -2), state, written, strict=True)]
        contexts.append((0.5 * value * state[0] + 1.5 * value * state[1] - 2.0 * value) * gate)
    parameters = {
        "W_value.weight": columns([3.0], [4.0]),
        "W_gate.weight": columns([1.0], [-2.0]),
        "conv1d.weight": np.array([[[1.0, 2.0]]]),
        "W_step_down.weight": np.array([[0.25]]),
        "W_key.weight": np.array([[2.0], [-1.0]]),
        "W_query.weight": np.array([[0.5], [1.5]]),
        "W_step_up.weight": np.array([[0.5]]),
        "dt_bias": np.array([-1.0]),
        "A_log": np.array([[0.0, LOG2]]),
        "D": np.array([-2.0]),
        "out_proj.weight": np.array([[1.0], [-2.0]]),
    }
    config = specs.MambaConfig(2, 1, 2, 1, conv_size=2, conv_bias=False)
    return Case("one channel", config, parameters, [[number, -2 * number] for number in contexts], None)


def mamba_case() -> Case:
    """Return two tokens through one state of one number, which halves between them."""
    # Inputs are (1, 0) and (0, 1); each projection's columns are its outputs for them.
    value, key, query = ((silu(2 * at[0]), silu(at[0] + 2 * at[1])) for at in ((3.0, 4.0), (2.0, -1.0), (0.5, 1.5)))
    steps = (LOG2, LOG2)  # the softplus of 0
    state = steps[0] * key[0] * value[0]
    first = state * query[0] - 2.0 * value[0]
    state = state / 2 + steps[1] * key[1] * value[1]  # exp(-exp(0) * log(2)) is 1/2
    second = state * query[1] - 2.0 * value[1]
    gated = (first * silu(1.0), second * silu(-2.0))
    contexts = [1.5 * number / sqrt(number**2 + 4.0) for number in gated]
    parameters = {
        "W_query.weight": columns([0.5], [1.5]),
        "W_key.weight": columns([2.0], [-1.0]),
        "W_value.weight": columns([3.0], [4.0]),
        "W_gate.weight": columns([1.0], [-2.0]),
        "W_step.weight": columns([LOG3], [LOG3]),
        "dt_bias": np.array([-LOG3]),
        "A_log": np.array([0.0]),
        "D": np.array([-2.0]),
        "conv1d.weight": np.array(3 * [[[1.0, 2.0]]]),
        "norm.scale": np.array([1.5]),
        "out_proj.weight": np.array([[1.0], [-2.0]]),
    }
    config = specs.Mamba2Config(2, 1, 1, 1, 1, 2, conv_size=2, conv_bias=False, eps=4.0)
    return Case("one state", config, parameters, [[number, -2 * number] for number in contexts], None)


def kimi_case() -> Case:
    """Return two tokens through a state of two numbers, of which the second halves between them and the first stays."""
    # Inputs are (1, 0) and (0, 1). Keys and queries of a single large channel have length 1 but for 1e-6.
    beta = (0.75, 0.25)

    def unit(first: float, second: float) -> tuple[float, float]:
        first, second = silu(first), silu(second)
        root = sqrt(first**2 + second**2 + 1e-6)
        return first / root, second / root

    query, key = (unit(0.5, 2.0), unit(1.5, -1.0)), (unit(2.0, 1.0), unit(-1.0, 3.0))
    value = (silu(3.0), silu(4.0))
    state = [beta[0] * value[0] * number for number in key[0]]
    first = sum(q * s for q, s in zip(query[0], state, strict=True)) / sqrt(2)
    # The decays of the second token: exp(-exp(0) * log(1 + exp(x))), with x of -40 and 0.
    state = [state[0] / (1 + exp(-40)), state[1] / 2]
    wrong = value[1] - sum(k * s for k, s in zip(key[1], state, strict=True))
    state = [s + beta[1] * wrong * k for k, s in zip(key[1], state, strict=True)]
    second = sum(q * s for q, s in zip(query[1], state, strict=True)) / sqrt(2)
    contexts = [1.5 * number / sqrt(number**2 + 4.0) * share for number, share in ((first, 0.25), (second, 0.75))]
    parameters = {
        "W_query.weight": columns([0.5, 2.0], [1.5, -1.0]),
        "W_key.weight": columns([2.0, 1.0], [-1.0, 3.0]),
        "W_value.weight": columns([3.0], [4.0]),
        "W_beta.weight": columns([LOG3], [-LOG3]),
        "W_decay_down.weight": columns([1.0], [2.0]),
        "W_decay_up.weight": np.array([[-10.0], [5.0]]),
        "W_gate_down.weight": columns([-1.0], [1.0]),
        "W_gate_up.weight": np.array([[LOG3]]),
        "dt_bias": np.array([-20.0, -10.0]),
        "A_log": np.array([0.0]),
        "conv1d.weight": np.array(5 * [[[1.0]]]),
        "norm.scale": np.array([1.5]),
        "out_proj.weight": np.array([[1.0], [-2.0]]),
    }
    config = specs.KimiDeltaAttentionConfig(2, 1, 2, 1, 1, 2, conv_size=1, eps=4.0)
    return Case("one state", config, parameters, [[number, -2 * number] for number in contexts], None)


def lightning_case() -> Case:
    """Return two tokens through two states of one number, of which one halves between them and one stays."""
    heads = []
    for rate, at in ((0.5, ((0.5, 1.5), (2.0, -1.0), (3.0, 4.0))), (1.0, ((-1.0, 2.0), (1.0, 0.5), (-2.0, 1.0)))):
        query, key, value = ((silu(first), silu(second)) for first, second in at)
        state = key[0] * value[0]
        heads.append((state * query[0], (rate * state + key[1] * value[1]) * query[1]))
    contexts = []
    for first, second, gate in ((heads[0][0], heads[1][0], LOG3), (heads[0][1], heads[1][1], -LOG3)):
        root, share = sqrt((first**2 + second**2) / 2 + 4.0), 0.75 if gate > 0 else 0.25  # the sigmoid of the gate
        contexts.append([1.5 * first / root * share - 2 * second / root * share])
    parameters = {
        "W_query.weight": columns([0.5, -1.0], [1.5, 2.0]),
        "W_key.weight": columns([2.0, 1.0], [-1.0, 0.5]),
        "W_value.weight": columns([3.0, -2.0], [4.0, 1.0]),
        "W_gate.weight": columns([LOG3, LOG3], [-LOG3, -LOG3]),
        "norm.scale": np.array([1.5, -1.0]),
        "out_proj.weight": np.array([[1.0, 2.0]]),
    }
    config = specs.LightningAttentionConfig(2, 2, 1, 1, (LOG2, 0.0), eps=4.0)
    return Case("two states", config, parameters, contexts, None)


CASES = (
    *GROUPED,
    *NORMS,
    LATENT,
    *INDEXED,
    *CROSS,
    DIFFERENCE,
    LINEAR,
    lightning_case(),
    kimi_case(),
    selective_case(),
    convolution_case(),
    delta_case(),
    mamba_case(),
)


# ---- whole models: one layer, one token, two channels, so that attention gives the value

EPS = 1e-5


def normed_pair(first: float, second: float, eps: float = EPS) -> tuple[float, float]:
    """Return the layer norm of two channels."""
    half = (first - second) / 2
    return half / sqrt(half**2 + eps), -half / sqrt(half**2 + eps)


def zeros(config: specs.Config) -> dict[str, Any]:
    """Return parameters of 0, and scales of 1."""
    fill = {True: np.ones, False: np.zeros}
    return {row.rule.torch: fill[row.rule.torch.endswith(".scale")](row.shape) for row in config.parameters}


def gpt_case() -> tuple[specs.GPTModelConfig, dict[str, Any], Any]:
    """Return a GPT-2, its parameters, and the logits of token 1."""
    config = specs.GPTModelConfig(2, 1, 2, 1, 1)
    block = {
        "att.W_value.weight": np.array([[1.0, 0.0], [0.0, 3.0]]),
        "att.out_proj.weight": np.array([[1.0, 0.0], [0.0, 2.0]]),
        "att.out_proj.bias": np.array([0.0, 1.0]),
        "ff.layers.0.weight": np.array([[1.0, 0.0], *7 * [[0.0, 0.0]]]),
        "ff.layers.0.bias": np.array([0.25, *7 * [0.0]]),
        "ff.layers.2.weight": np.array([[5.0, *7 * [0.0]], 8 * [0.0]]),
        "ff.layers.2.bias": np.array([0.5, -0.5]),
    }
    parameters = zeros(config) | {
        "tok_emb.weight": np.array([[9.0, 9.0], [3.0, 1.0]]),
        "pos_emb.weight": np.array([[1.0, -1.0]]),
        "out_head.weight": np.array([[1.0, 0.0], [0.0, 3.0]]),
        "final_norm.shift": np.array([0.125, 0.25]),
        **{f"trf_blocks.0.{name}": array for name, array in block.items()},
    }
    first, second = normed_pair(4.0, 0.0)
    x = (4.0 + first, 6 * second + 1)
    hidden = normed_pair(*x)[0] + 0.25
    active = 0.5 * hidden * (1 + math.tanh(sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    first, second = normed_pair(x[0] + 5 * active + 0.5, x[1] - 0.5)
    return config, parameters, [[[first + 0.125, 3 * (second + 0.25)]]]


def bert_case() -> tuple[specs.BertEncoderConfig, dict[str, Any], Any]:
    """Return a BERT encoder, its parameters, and the last hidden state of token 1."""
    config = specs.BertEncoderConfig(2, 2, 1, 1, 1, 1, layer_norm_eps=0.5)
    layer = {
        "att.W_value.weight": np.array([[1.0, 0.0], [0.0, 3.0]]),
        "att.W_value.bias": np.array([0.5, 0.0]),
        "att.out_proj.weight": np.array([[1.0, 0.0], [0.0, 2.0]]),
        "att.out_proj.bias": np.array([0.0, 1.0]),
        "ff.layers.0.weight": np.array([[2.0, 0.0]]),
        "ff.layers.0.bias": np.array([0.25]),
        "ff.layers.2.weight": np.array([[5.0], [0.0]]),
        "ff.layers.2.bias": np.array([0.0, 0.75]),
        "norm2.shift": np.array([0.125, 0.25]),
    }
    parameters = zeros(config) | {
        "tok_emb.weight": np.array([[9.0, 9.0], [3.0, 1.0]]),
        "pos_emb.weight": np.array([[1.0, -1.0]]),
        "type_emb.weight": np.array([[0.5, 0.0], [9.0, 9.0]]),
        **{f"layers.0.{name}": array for name, array in layer.items()},
    }
    first, second = normed_pair(4.5, 0.0, 0.5)
    first, second = normed_pair(first + first + 0.5, second + 6 * second + 1, 0.5)
    hidden = 2 * first + 0.25
    active = hidden * (1 + math.erf(hidden / sqrt(2))) / 2
    first, second = normed_pair(first + 5 * active, second + 0.75, 0.5)
    return config, parameters, [[[first + 0.125, second + 0.25]]]
