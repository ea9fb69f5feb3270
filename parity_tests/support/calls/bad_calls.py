"""Bad constructor arguments and bad calls, with the error that both backends must raise, word for word.

A row says what to build, what to call it with as NumPy arrays, and what happens. `arguments` is None for a function;
`call` is None where the constructor itself refuses. Integer arrays are 32 bits wide, because JAX has no wider ones
unless it is told to, and the message names the dtype.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from attn_bridge import masks

T, D_IN, CONTEXT_LENGTH, BATCH = 5, 4, 6, 2


@dataclasses.dataclass(frozen=True)
class BadCall:
    """One row: ``target(**arguments)(**call)``, or ``target(**call)`` for a function, raises `error` saying `message`.

    `target` is a name in the package, such as ``"MultiHeadAttention"`` or ``"functional.dot_product_attention"``.
    """

    id: str
    target: str
    arguments: dict[str, Any] | None
    call: dict[str, Any] | None
    error: type[Exception]
    message: str


def _tokens(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.asarray(np.random.default_rng(0).normal(size=shape), dtype)


V1 = {"d_in": D_IN, "d_out": 3}
V2 = {"d_in": D_IN, "d_out": 3, "qkv_bias": True}
CAUSAL = {"d_in": D_IN, "d_out": 3, "context_length": CONTEXT_LENGTH, "qkv_bias": True}
HEADS = {"d_in": D_IN, "d_out": 6, "context_length": CONTEXT_LENGTH, "num_heads": 2, "qkv_bias": True}
ATTENTION_MODULES = {
    "SelfAttention_v1": V1,
    "SelfAttention_v2": V2,
    "CausalAttention": CAUSAL,
    "MultiHeadAttentionWrapper": HEADS,
    "MultiHeadAttention": HEADS,
}
"""Class -> arguments that it takes."""

MODULES: dict[str, dict[str, Any]] = {**ATTENTION_MODULES, "LayerNorm": {"emb_dim": D_IN}}

SIZES = {
    "SelfAttention_v1": ("d_in", "d_out"),
    "SelfAttention_v2": ("d_in", "d_out"),
    "CausalAttention": ("d_in", "d_out", "context_length"),
    "MultiHeadAttentionWrapper": ("d_in", "d_out", "context_length", "num_heads"),
    "MultiHeadAttention": ("d_in", "d_out", "context_length", "num_heads"),
    "LayerNorm": ("emb_dim",),
}

BAD_SIZES: tuple[tuple[str, Any, type[Exception], str], ...] = (
    ("zero", 0, ValueError, "{name} (0) must be at least 1"),
    ("negative", -3, ValueError, "{name} (-3) must be at least 1"),
    ("float", 4.0, TypeError, "{name} must be an integer, got float"),
    ("bool", True, TypeError, "{name} must be an integer, got bool"),
    ("string", "4", TypeError, "{name} must be an integer, got str"),
    ("none", None, TypeError, "{name} must be an integer, got NoneType"),
)

BAD_RATES: tuple[tuple[str, Any, type[Exception], str], ...] = (
    ("one", 1.0, ValueError, "dropout (1.0) must be in [0, 1)"),
    ("negative", -0.1, ValueError, "dropout (-0.1) must be in [0, 1)"),
    ("nan", math.nan, ValueError, "dropout (nan) must be in [0, 1)"),
    ("inf", math.inf, ValueError, "dropout (inf) must be in [0, 1)"),
    ("string", "0.1", TypeError, "dropout must be a number, got str"),
    ("bool", True, TypeError, "dropout must be a number, got bool"),
    ("none", None, TypeError, "dropout must be a number, got NoneType"),
)

BAD_BOOLS: tuple[tuple[str, Any, str], ...] = (("int", 1, "int"), ("string", "yes", "str"), ("none", None, "NoneType"))

BAD_EPS: tuple[tuple[str, Any, type[Exception], str], ...] = (
    ("zero", 0, ValueError, "eps (0) must be positive and finite"),
    ("negative", -1e-5, ValueError, "eps (-1e-05) must be positive and finite"),
    ("inf", math.inf, ValueError, "eps (inf) must be positive and finite"),
    ("nan", math.nan, ValueError, "eps (nan) must be positive and finite"),
    ("string", "1e-5", TypeError, "eps must be a number, got str"),
    ("bool", True, TypeError, "eps must be a number, got bool"),
)


def _constructors() -> list[BadCall]:
    rows = [
        BadCall(
            f"{target}-{name}-{label}", target, {**MODULES[target], name: value}, None, error, message.format(name=name)
        )
        for target, names in SIZES.items()
        for name in names
        for label, value, error, message in BAD_SIZES
    ]
    for target in ("CausalAttention", "MultiHeadAttentionWrapper", "MultiHeadAttention"):
        rows += [
            BadCall(f"{target}-dropout-{label}", target, {**MODULES[target], "dropout": value}, None, error, message)
            for label, value, error, message in BAD_RATES
        ]
    for target in ("SelfAttention_v2", "CausalAttention", "MultiHeadAttentionWrapper", "MultiHeadAttention"):
        rows += [
            BadCall(
                f"{target}-qkv_bias-{label}",
                target,
                {**MODULES[target], "qkv_bias": value},
                None,
                TypeError,
                f"qkv_bias must be a bool, got {kind}",
            )
            for label, value, kind in BAD_BOOLS
        ]
    rows += [
        BadCall(f"LayerNorm-eps-{label}", "LayerNorm", {"emb_dim": D_IN, "eps": value}, None, error, message)
        for label, value, error, message in BAD_EPS
    ]
    rows += [
        BadCall(
            f"LayerNorm-{name}-{label}",
            "LayerNorm",
            {"emb_dim": D_IN, name: value},
            None,
            TypeError,
            f"{name} must be a bool, got {kind}",
        )
        for name in ("affine", "bias", "unit_offset")
        for label, value, kind in BAD_BOOLS
    ]
    rows += [
        BadCall(
            f"MultiHeadAttention-d_out-{d_out}-num_heads-{num_heads}",
            "MultiHeadAttention",
            {**HEADS, "d_out": d_out, "num_heads": num_heads},
            None,
            ValueError,
            f"d_out ({d_out}) must be a multiple of num_heads ({num_heads})",
        )
        for d_out, num_heads in ((6, 4), (2, 3))
    ]
    return rows


BAD_TOKENS: tuple[tuple[str, Any, type[Exception], str], ...] = (
    ("int", np.ones((T, D_IN), np.int32), TypeError, "x must have a floating-point dtype, got int32"),
    ("bool", np.ones((T, D_IN), np.bool_), TypeError, "x must have a floating-point dtype, got bool"),
    ("complex", np.ones((T, D_IN), np.complex64), TypeError, "x must have a floating-point dtype, got complex64"),
    ("0-D", _tokens(), ValueError, "x must have shape (T, d_in) or (B, T, d_in), got ()"),
    ("1-D", _tokens(D_IN), ValueError, "x must have shape (T, d_in) or (B, T, d_in), got (4,)"),
    ("4-D", _tokens(1, 2, T, D_IN), ValueError, "x must have shape (T, d_in) or (B, T, d_in), got (1, 2, 5, 4)"),
    ("no token", _tokens(2, 0, D_IN), ValueError, "x must hold at least 1 token, got shape (2, 0, 4)"),
)
"""Inputs that every attention refuses, with or without weights."""


def _masks(num_heads: int) -> tuple[tuple[str, Any, type[Exception], str], ...]:
    """Masks that no attention takes for 2 sequences of 5 tokens: label, array, error, message."""
    scores = f"({BATCH}, {num_heads}, {T}, {T})"
    not_bool = "attention mask must have dtype bool (True = may be attended), got "
    to_padding = "must broadcast to (B, S) = (2, 5); give a (T, S) mask as (1, 1, T, S)"
    ambiguous = "is ambiguous: give (B, S) or a shape that broadcasts to (B, H, T, S) ="
    return (
        ("float", np.ones((BATCH, T), np.float32), TypeError, f"{not_bool}float32"),
        ("4-D int", np.ones((BATCH, 1, T, T), np.int32), TypeError, f"{not_bool}int32"),
        (
            "documents",
            np.array([[1, 1, 2, 2, 3]] * BATCH, np.int32),
            ValueError,
            "attention mask of integers must hold 0 (padding) and 1 (token) alone, got 3",
        ),
        ("T by S", np.ones((T, T), np.bool_), ValueError, f"2-D attention mask (5, 5) {to_padding}"),
        ("too few keys", np.ones((BATCH, 4), np.bool_), ValueError, f"2-D attention mask (2, 4) {to_padding}"),
        (
            "3-D",
            np.ones((BATCH, T, T), np.bool_),
            ValueError,
            f"attention mask of 3 dimensions (2, 5, 5) {ambiguous} {scores}",
        ),
        (
            "3-D of ones",
            np.ones((1, 1, T), np.bool_),
            ValueError,
            f"attention mask of 3 dimensions (1, 1, 5) {ambiguous} {scores}",
        ),
        (
            "too many heads",
            np.ones((BATCH, 3, T, T), np.bool_),
            ValueError,
            f"attention mask (2, 3, 5, 5) must broadcast to (B, H, T, S) = {scores}",
        ),
        (
            "other batch",
            np.ones((3, 1, T, T), np.bool_),
            ValueError,
            f"attention mask (3, 1, 5, 5) must broadcast to (B, H, T, S) = {scores}",
        ),
        (
            "5-D",
            np.ones((1, 1, 1, T, T), np.bool_),
            ValueError,
            f"attention mask (1, 1, 1, 5, 5) must broadcast to (B, H, T, S) = {scores}",
        ),
        (
            "1-D of other length",
            np.ones(3, np.bool_),
            ValueError,
            f"attention mask (3,) must broadcast to (B, H, T, S) = {scores}",
        ),
        (
            "padding of other batch",
            masks.padding([1, 2, 3]),
            ValueError,
            "lengths of masks.padding (3) must be as many as sequences in the batch (2)",
        ),
        (
            "documents of other batch",
            masks.causal() & masks.documents(np.zeros((3, T), np.int32)),
            ValueError,
            "rows of masks.documents (3) must be as many as sequences in the batch (2)",
        ),
    )


def _calls() -> list[BadCall]:
    rows = []
    for target, arguments in {"simple_self_attention": None, **ATTENTION_MODULES}.items():
        num_heads = arguments.get("num_heads", 1) if arguments else 1
        rows += [
            BadCall(f"{target}-x {label}", target, arguments, {"x": x}, error, message)
            for label, x, error, message in BAD_TOKENS
        ]
        rows += [
            BadCall(
                f"{target}-mask {label}",
                target,
                arguments,
                {"x": _tokens(BATCH, T, D_IN), "attention_mask": mask},
                error,
                message,
            )
            for label, mask, error, message in _masks(num_heads)
        ]
        if arguments:
            rows.append(
                BadCall(
                    f"{target}-x too narrow",
                    target,
                    arguments,
                    {"x": _tokens(T, 3)},
                    ValueError,
                    "last dimension of x (3) must be d_in (4)",
                )
            )
        if arguments and "context_length" in arguments:
            rows += [
                BadCall(
                    f"{target}-{label} too long",
                    target,
                    arguments,
                    {"x": _tokens(*shape)},
                    ValueError,
                    "number of tokens (7) must be at most context_length (6)",
                )
                for label, shape in (("2-D", (7, D_IN)), ("3-D", (BATCH, 7, D_IN)))
            ]
    norm = MODULES["LayerNorm"]
    rows += [
        BadCall(f"LayerNorm-x {label}", "LayerNorm", norm, {"x": x}, error, message)
        for label, x, error, message in (
            ("too wide", _tokens(T, 5), ValueError, "last dimension of x (5) must be emb_dim (4)"),
            ("0-D", _tokens(), ValueError, "last dimension of x (none) must be emb_dim (4)"),
            ("int", np.ones((T, D_IN), np.int32), TypeError, "x must have a floating-point dtype, got int32"),
            ("bool", np.ones((T, D_IN), np.bool_), TypeError, "x must have a floating-point dtype, got bool"),
        )
    ]
    return rows


QUERY, KEY, VALUE = _tokens(BATCH, 3, 4, 6), _tokens(BATCH, T, 2, 6), _tokens(BATCH, T, 2, 7)
"""4 query heads that share 2 key/value heads, 3 queries, 5 keys."""

BAD_OPERANDS: tuple[tuple[str, dict[str, Any], type[Exception], str], ...] = (
    ("query 3-D", {"query": QUERY[0]}, ValueError, "query must have shape (B, T, H, D), got (3, 4, 6)"),
    ("key 3-D", {"key": KEY[0]}, ValueError, "key must have shape (B, T, H, D), got (5, 2, 6)"),
    ("value 5-D", {"value": VALUE[None]}, ValueError, "value must have shape (B, T, H, D), got (1, 2, 5, 2, 7)"),
    ("query int", {"query": QUERY.astype(np.int32)}, TypeError, "query must have a floating-point dtype, got int32"),
    ("key bool", {"key": KEY > 0}, TypeError, "key must have a floating-point dtype, got bool"),
    ("value int", {"value": VALUE.astype(np.int32)}, TypeError, "value must have a floating-point dtype, got int32"),
    (
        "value of other length",
        {"value": VALUE[:, :4]},
        ValueError,
        "key (2, 5, 2, 6) and value (2, 4, 2, 7) must agree in batch, length and heads",
    ),
    (
        "value of other heads",
        {"value": VALUE[:, :, :1]},
        ValueError,
        "key (2, 5, 2, 6) and value (2, 5, 1, 7) must agree in batch, length and heads",
    ),
    (
        "value of other batch",
        {"value": VALUE[:1]},
        ValueError,
        "key (2, 5, 2, 6) and value (1, 5, 2, 7) must agree in batch, length and heads",
    ),
    ("query of other batch", {"query": QUERY[:1]}, ValueError, "batch of query (1) must be the batch of key (2)"),
    (
        "query of other head_dim",
        {"query": QUERY[..., :5]},
        ValueError,
        "head_dim of query (5) must be the head_dim of key (6)",
    ),
    (
        "heads that do not group",
        {"query": QUERY[:, :, :3]},
        ValueError,
        "heads of query (3) must be a multiple of the heads of key (2)",
    ),
    (
        "fewer query heads than key heads",
        {"query": QUERY[:, :, :1]},
        ValueError,
        "heads of query (1) must be a multiple of the heads of key (2)",
    ),
    (
        "heads of width 0",
        {"query": QUERY[..., :0], "key": KEY[..., :0]},
        ValueError,
        "head_dim of query (0) must be at least 1",
    ),
    (
        "no key heads",
        {"key": KEY[:, :, :0], "value": VALUE[:, :, :0]},
        ValueError,
        "heads of query (4) must be a multiple of the heads of key (0)",
    ),
    ("softcap zero", {"softcap": 0.0}, ValueError, "softcap (0.0) must be positive and finite"),
    ("softcap negative", {"softcap": -2.0}, ValueError, "softcap (-2.0) must be positive and finite"),
    ("softcap infinite", {"softcap": math.inf}, ValueError, "softcap (inf) must be positive and finite"),
    ("softcap not a number", {"softcap": "2"}, TypeError, "softcap must be a number, got str"),
    ("scale nan", {"scale": math.nan}, ValueError, "scale (nan) must be finite"),
    ("scale not a number", {"scale": "2"}, TypeError, "scale must be a number, got str"),
    (
        "mask by name",
        {"mask": "causal"},
        TypeError,
        "a mask must be an attn_bridge.masks description or a bool array, got str",
    ),
    ("softcap nan", {"softcap": math.nan}, ValueError, "softcap (nan) must be positive and finite"),
    (
        "sinks for key heads",
        {"sinks": _tokens(2)},
        ValueError,
        "sinks must have shape (4,), one logit per query head, got (2,)",
    ),
    (
        "sinks 2-D",
        {"sinks": _tokens(4, 1)},
        ValueError,
        "sinks must have shape (4,), one logit per query head, got (4, 1)",
    ),
    ("sinks int", {"sinks": np.ones(4, np.int32)}, TypeError, "sinks must have a floating-point dtype, got int32"),
    (
        "bias of other queries",
        {"bias": _tokens(5, 5)},
        ValueError,
        "bias (5, 5) must broadcast to (B, H, T, S) = (2, 4, 3, 5)",
    ),
    (
        "bias 5-D",
        {"bias": _tokens(1, 2, 4, 3, 5)},
        ValueError,
        "bias (1, 2, 4, 3, 5) must broadcast to (B, H, T, S) = (2, 4, 3, 5)",
    ),
    ("bias bool", {"bias": np.ones((3, 5), np.bool_)}, TypeError, "bias must have a floating-point dtype, got bool"),
    (
        "mask float",
        {"mask": np.ones((BATCH, T), np.float32)},
        TypeError,
        "attention mask must have dtype bool (True = may be attended), got float32",
    ),
    (
        "mask T by S",
        {"mask": np.ones((3, 5), np.bool_)},
        ValueError,
        "2-D attention mask (3, 5) must broadcast to (B, S) = (2, 5); give a (T, S) mask as (1, 1, T, S)",
    ),
    (
        "mask for key heads",
        {"mask": np.ones((BATCH, 2, 3, T), np.bool_)},
        ValueError,
        "attention mask (2, 2, 3, 5) must broadcast to (B, H, T, S) = (2, 4, 3, 5)",
    ),
    (
        "mask of padding of other batch",
        {"mask": masks.padding([1, 2, 3])},
        ValueError,
        "lengths of masks.padding (3) must be as many as sequences in the batch (2)",
    ),
    (
        "mask of documents of other batch",
        {"mask": masks.documents(np.zeros((3, T), np.int32)).offset(2) | masks.prefix(2)},
        ValueError,
        "rows of masks.documents (3) must be as many as sequences in the batch (2)",
    ),
    (
        "implementation unknown",
        {"implementation": "flesh"},
        ValueError,
        "implementation ('flesh') must be one of {IMPLEMENTATIONS} or None",
    ),
    *((f"dropout {label}", {"dropout": value}, error, message) for label, value, error, message in BAD_RATES),
)

FUNCTION = "functional.dot_product_attention"

BAD_CALLS: tuple[BadCall, ...] = (
    *_constructors(),
    *_calls(),
    *(
        BadCall(
            f"attention-{label}",
            FUNCTION,
            None,
            {"query": QUERY, "key": KEY, "value": VALUE, **changes},
            error,
            message,
        )
        for label, changes, error, message in BAD_OPERANDS
    ),
)
