"""What arguments are refused with: the values that do not fit, each at its place in the message."""

from __future__ import annotations

import ast
import math
import re
import types
from pathlib import Path

import numpy as np
import pytest

from attn_bridge import cache_validation, validation
from attn_bridge.validation import MAX_INDEX
from attn_parity.training import arguments

F32 = "float32"
SCORES = (2, 3, 4, 5)
QUERY, KEY, VALUE = (2, 4, 6, 8), (2, 5, 3, 8), (2, 5, 3, 7)
PLAIN = {"dropout": 0.0, "scale": None, "softcap": None}


class Open:
    """A size that a program leaves open, and what it knows of a comparison: None raises, as `jax.export` does."""

    def __init__(self, answer: bool | None):
        self.answer = answer

    def __le__(self, other: int) -> bool:
        if self.answer is None:
            raise ArithmeticError("inconclusive")
        return self.answer

    def __str__(self) -> str:
        return "t"


def attention(query=QUERY, key=KEY, value=VALUE, dtypes=(F32, F32, F32), **options):
    """Return the arguments of `check_attention`."""
    return query, key, value, dtypes, PLAIN | options


# Check -> calls that it takes: the last sizes that fit, and all kinds.
ROWS = [
    *((shape, "int32", 2, 4, 3) for shape in ((3, 2, 4), (3, 1, 4), (2, 4), (4,))),
    ((3, 2, 4), "int32", 2, 4, 3, {"every_row": True}),
]

TAKEN = {
    "check_tokens": [((3, 4), F32), ((2, 6, 4), "bfloat16", {"d_in": 4, "context_length": 6}), ((1, 1), "float64")],
    "check_context": [((2, 1, 4), F32, (2, 7, 6), {"d_context": 4}), ((5, 4), F32, (7, 6), {"d_context": 4})],
    "check_bounded": [(5, "context_length", 4), (5, "context_length", None), (Open(True), "context_length", 4)],
    "check_dense": [("x", np.zeros(2)), ("x", types.SimpleNamespace(is_nested=False))],
    "check_has_context": [(True,)],
    "check_features": [((4,), F32, 4), ((2, 3, 4), "float16", 4)],
    "check_attention_mask": [
        *((shape, "bool", SCORES) for shape in ((2, 5), (1, 5), (2, 1), SCORES, (1, 1, 4, 5), (2, 1, 1, 5), (5,), ())),
    ],
    "check_zeros_and_ones": [("mask", 0, 1), ("mask", 1, 1), ("mask", 0, 0)],
    "check_mask_rows": [("windows", 1, 3), ("windows", 3, 3)],
    "check_attention": [
        attention(),
        attention(dropout=0.9, scale=-2.0, softcap=0.1),
        attention(key=(2, 1, 6, 8), value=(2, 1, 6, 1)),
    ],
    "check_scores_operand": [("bias", (1, 3, 1, 5), F32, SCORES), ("bias", (), F32, SCORES)],
    "check_sinks": [((3,), F32, 3)],
    "check_number": [("eps", 1), ("eps", 0.5), ("eps", -math.inf)],
    "check_integer": [("length", 3), ("length", -3), ("length", np.int64(3)), ("length", np.array(3, np.uint8))],
    "check_rate": [("dropout", 0.0), ("dropout", 0.999), ("dropout", 0)],
    "check_source": [("rngs", None, (str,), "a key"), ("rngs", "x", (str,), "a key")],
    "check_cache": [(None, "jax_attn"), (types.SimpleNamespace(length=1, capacity=2), "torch_attn")],
    "check_caches": [(None, 2), ([1, 2], 2), (((1, 2), (3, 4)), 2, {"pairs": True})],
    "check_implementation": [(None, ("a", "b")), ("b", ("a", "b"))],
    "check_cache_sizes": [(1, 1), (2, MAX_INDEX, 1)],
    "check_cached": [((2, 9, 3, 8), (2, 4, 3, 8))],
    "check_room": [(3, 4, 7), (0, 7, 7)],
    "check_mask_of_cache": [
        *(((rows, keys), "bool", 2, 5, 9) for rows in (1, 2) for keys in (5, 9)),
        ((2, 3), "bool", 2, None, 9),
    ],
    "check_trim": [(0, 3, 2, True), (3, 3, 2, True), (1, 3, 3, True), (1, 3, 2, False)],
    "check_reorder": [((2,), "int32", 2, (0, 1)), ((2,), "uint8", 2)],
    "check_positions": [((4,), "int32", 2, 4), ((2, 4), "uint8", 2, 4), ((1, 4), "int64", 2, 4), *ROWS],
    "check_32_bits": [(-(1 << 31), (1 << 31) - 1)],
    "check_no_offset": [("Linear", False)],
    "check_rows": [(2, 2)],
    "check_rows_given": [(None,)],
    "check_shared": [(True, True), (False, False)],
    "check_table": [(True, (32, 4), (32, 4)), (False, None, (32, 4)), (False, None, None)],
}

# Check, its arguments, and the message; TypeErrors are about kinds and dtypes.
REFUSED = [
    ("check_tokens", ((3, 4), "int32"), "x must have a floating-point dtype, got int32"),
    ("check_tokens", ((4,), F32), "x must have shape (T, d_in) or (B, T, d_in), got (4,)"),
    ("check_tokens", ((1, 2, 3, 4), F32), "x must have shape (T, d_in) or (B, T, d_in), got (1, 2, 3, 4)"),
    ("check_tokens", ((3, 5), F32, {"d_in": 4}), "last dimension of x (5) must be d_in (4)"),
    ("check_tokens", ((2, 0, 4), F32), "x must hold at least 1 token, got shape (2, 0, 4)"),
    (
        "check_tokens",
        ((2, 7, 4), F32, {"context_length": 6}),
        "number of tokens (7) must be at most context_length (6)",
    ),
    (
        "check_context",
        ((5, 4), "bool", (7, 6), {"d_context": 4}),
        "context must have a floating-point dtype, got bool",
    ),
    (
        "check_context",
        ((5, 4), F32, (2, 7, 6), {"d_context": 4}),
        "context must have shape (S, d_context) beside x (T, d_in), or (B, S, d_context) beside x (B, T, d_in), "
        "got (5, 4) beside (2, 7, 6)",
    ),
    (
        "check_context",
        ((2, 5, 3), F32, (2, 7, 6), {"d_context": 4}),
        "last dimension of context (3) must be d_context (4)",
    ),
    (
        "check_context",
        ((2, 0, 4), F32, (2, 7, 6), {"d_context": 4}),
        "context must hold at least 1 token, got shape (2, 0, 4)",
    ),
    ("check_context", ((3, 5, 4), F32, (2, 7, 6), {"d_context": 4}), "batch of context (3) must be the batch of x (2)"),
    (
        "check_bounded",
        (Open(None), "context_length", 4),
        "number of tokens (t) must be at most context_length (4): give jax.export.symbolic_shape "
        'constraints=["t <= 4"]',
    ),
    (
        "check_dense",
        ("x", types.SimpleNamespace(is_nested=True)),
        "x must be a dense tensor (pad it by torch.nested.to_padded_tensor, and give attention_mask= for the padding), "
        "got a nested one",
    ),
    ("check_has_context", (False,), "context must be given, or a cache that holds one"),
    ("check_features", ((3, 4), "int8", 4), "x must have a floating-point dtype, got int8"),
    ("check_features", ((4, 3), F32, 4), "last dimension of x (3) must be emb_dim (4)"),
    ("check_features", ((), F32, 4), "last dimension of x (none) must be emb_dim (4)"),
    ("check_zeros_and_ones", ("mask", -1, 1), "mask of integers must hold 0 (padding) and 1 (token) alone, got -1"),
    ("check_zeros_and_ones", ("mask", 0, 2), "mask of integers must hold 0 (padding) and 1 (token) alone, got 2"),
    (
        "check_attention_mask",
        ((2, 5), "int32", SCORES),
        "attention mask must have dtype bool (True = may be attended), got int32",
    ),
    (
        "check_attention_mask",
        ((2, 4, 5), "bool", SCORES),
        "attention mask of 3 dimensions (2, 4, 5) is ambiguous: give (B, S) or a shape that broadcasts to "
        "(B, H, T, S) = (2, 3, 4, 5)",
    ),
    (
        "check_attention_mask",
        ((4, 5), "bool", SCORES),
        "2-D attention mask (4, 5) must broadcast to (B, S) = (2, 5); give a (T, S) mask as (1, 1, T, S)",
    ),
    *(
        (
            "check_attention_mask",
            (shape, "bool", SCORES),
            f"attention mask {shape} must broadcast to (B, H, T, S) = {SCORES}",
        )
        for shape in ((2, 2, 4, 5), (3, 3, 4, 5), (1, 1, 1, 2, 5), (4,))
    ),
    ("check_mask_rows", ("windows", 2, 3), "windows (2) must be as many as sequences in the batch (3)"),
    *(
        (
            "check_attention",
            attention(dtypes=tuple("int32" if name == wrong else F32 for name in ("query", "key", "value"))),
            f"{wrong} must have a floating-point dtype, got int32",
        )
        for wrong in ("query", "key", "value")
    ),
    *(
        ("check_attention", attention(**{name: (2, 5, 8)}), f"{name} must have shape (B, T, H, D), got (2, 5, 8)")
        for name in ("query", "key", "value")
    ),
    *(
        (
            "check_attention",
            attention(value=value),
            f"key (2, 5, 3, 8) and value {value} must agree in batch, length and heads",
        )
        for value in ((3, 5, 3, 7), (2, 4, 3, 7), (2, 5, 1, 7))
    ),
    (
        "check_attention",
        attention(key=(2, 0, 3, 8), value=(2, 0, 3, 7)),
        "key must hold at least 1 position, got (2, 0, 3, 8)",
    ),
    ("check_attention", attention(query=(3, 4, 6, 8)), "batch of query (3) must be the batch of key (2)"),
    ("check_attention", attention(query=(2, 4, 6, 7)), "head_dim of query (7) must be the head_dim of key (8)"),
    (
        "check_attention",
        attention(query=(2, 4, 6, 0), key=(2, 5, 3, 0)),
        "head_dim of query (0) must be at least 1",
    ),
    ("check_attention", attention(query=(2, 4, 4, 8)), "heads of query (4) must be a multiple of the heads of key (3)"),
    (
        "check_attention",
        attention(key=(2, 5, 0, 8), value=(2, 5, 0, 7)),
        "heads of query (6) must be a multiple of the heads of key (0)",
    ),
    ("check_attention", attention(dropout=1.0), "dropout (1.0) must be in [0, 1)"),
    *(
        ("check_attention", attention(softcap=softcap), f"softcap ({softcap}) must be positive and finite")
        for softcap in (0.0, -1.0, math.inf, math.nan)
    ),
    *(
        ("check_attention", attention(scale=scale), f"scale ({scale}) must be finite")
        for scale in (math.inf, -math.inf, math.nan)
    ),
    ("check_attention", attention(softcap=True), "softcap must be a number, got bool"),
    ("check_attention", attention(scale="1"), "scale must be a number, got str"),
    ("check_scores_operand", ("bias", (5,), "int32", SCORES), "bias must have a floating-point dtype, got int32"),
    (
        "check_scores_operand",
        ("bias", (2, 5), F32, SCORES),
        "bias (2, 5) must broadcast to (B, H, T, S) = (2, 3, 4, 5)",
    ),
    ("check_sinks", ((3,), "int32", 3), "sinks must have a floating-point dtype, got int32"),
    ("check_sinks", ((2,), F32, 3), "sinks must have shape (3,), one logit per query head, got (2,)"),
    ("check_number", ("eps", True), "eps must be a number, got bool"),
    ("check_number", ("eps", 1j), "eps must be a number, got complex"),
    ("check_integer", ("length", True), "length must be an integer, got bool"),
    ("check_integer", ("length", 1.0), "length must be an integer, got float"),
    ("check_integer", ("length", np.float32(1.0)), "length must be an integer, got float32"),
    ("check_integer", ("length", np.array(True)), "length must be an integer, got bool"),
    *(("check_rate", ("dropout", rate), f"dropout ({rate}) must be in [0, 1)") for rate in (1.0, -0.1, math.nan)),
    ("check_source", ("rngs", 3, (str,), "a key"), "rngs must be a key, got builtins.int"),
    ("check_cache", (3, "torch_attn"), "cache must be what init_cache of the module returns, got int"),
    (
        "check_cache",
        (types.SimpleNamespace(length=1), "jax_attn"),
        "cache must be what init_cache of the module returns, got SimpleNamespace",
    ),
    (
        "check_cache",
        (type("Cache", (), {"length": 1, "capacity": 2, "__module__": "jax_attn.decoding.cache"})(), "torch_attn"),
        "cache must be what init_cache of the module returns, got one of jax_attn.decoding.cache",
    ),
    ("check_caches", ({}, 2), "cache must be what init_cache of the model returns, got dict"),
    ("check_caches", ([1], 2), "cache must hold one cache of each block (2), got 1"),
    (
        "check_caches",
        (((1, 2), (3,)), 2, {"pairs": True}),
        "cache must be what init_cache of the model returns, got one of tuple",
    ),
    (
        "check_caches",
        (((1, 2), [3, 4]), 2, {"pairs": True}),
        "cache must be what init_cache of the model returns, got one of list",
    ),
    ("check_implementation", ("c", ("a", "b")), "implementation ('c') must be one of 'a', 'b' or None"),
    *(
        ("check_cache_sizes", tuple(value if name == wrong else 2 for name in names), message.format(wrong))
        for names in [("batch_size", "capacity", "rolling")]
        for wrong in names
        for value, message in (
            (0, "{} (0) must be at least 1"),
            (1.0, "{} must be an integer, got float"),
            (True, "{} must be an integer, got bool"),
            (MAX_INDEX + 1, f"{{}} ({MAX_INDEX + 1}) must be at most {MAX_INDEX}"),
        )
    ),
    ("check_cached", ((2, 9, 3, 8), (3, 4, 3, 8)), "batch of x (3) must be the batch of the cache (2)"),
    *(
        (
            "check_cached",
            ((2, 9, 3, 8), new),
            f"new keys or values {new} must have the heads and widths of the cache (2, 9, 3, 8)",
        )
        for new in ((2, 4, 1, 8), (2, 4, 3, 7))
    ),
    ("check_room", (3, 5, 7), "tokens in the cache (3) and new ones (5) must be at most capacity (7)"),
    (
        "check_mask_of_cache",
        ((2, 5), "int32", 2, 5, 9),
        "attention mask must have dtype bool (True = may be attended), got int32",
    ),
    *(
        (
            "check_mask_of_cache",
            (shape, "bool", 2, 5, 9),
            f"2-D attention mask {shape} must be (B, S) with B = 2 and S the tokens so far, cached and new (5), or "
            "capacity (9)",
        )
        for shape in ((3, 5), (2, 4), (2, 10))
    ),
    (
        "check_mask_of_cache",
        ((2, 10), "bool", 2, None, 9),
        "2-D attention mask (2, 10) must be (B, S) with B = 2 and S the capacity (9)",
    ),
    ("check_trim", (1.0, 3, 3, False), "length must be an integer, got float"),
    *(
        (
            "check_trim",
            (length, 3, 3, False),
            f"length ({length}) must be at least 0 and at most the tokens in the cache (3)",
        )
        for length in (-1, 4)
    ),
    ("check_trim", (1, 3, 2, True), "length (1) must be 0 or 3: the rolling cache keeps the last 2 tokens only"),
    ("check_reorder", ((2,), F32, 2), "indices must have an integer dtype, got float32"),
    ("check_reorder", ((3,), "int32", 2), "indices must have shape (B,) = (2,), got (3,)"),
    *(
        (
            "check_reorder",
            ((2,), "int32", 2, (0, index)),
            f"index ({index}) must be at least 0 and below the batch of the cache (2)",
        )
        for index in (-1, 2)
    ),
    ("check_positions", ((4,), F32, 2, 4), "positions must have an integer dtype, got float32"),
    *(
        ("check_positions", (shape, "int32", 2, 4), f"positions must have shape (T,) or (B, T) = (2, 4), got {shape}")
        for shape in ((), (3,), (1,), (2, 1), (3, 4), (1, 2, 4))
    ),
    *(
        (
            "check_positions",
            (shape, "int32", 2, 4, 3, {"every_row": every_row}),
            f"positions must have shape (rows, B, T) = (3, 2, 4), got {shape}",
        )
        for shapes, every_row in ((((2, 2, 4), (3, 4, 2), (3, 2, 1), (3, 2, 4, 1)), False), (((4,), (2, 4)), True))
        for shape in shapes
    ),
    ("check_shared", (True, False), "shared must be given to attention that does not project keys"),
    ("check_shared", (False, True), "shared must be None for attention that projects keys"),
    ("check_table", (True, None, (32, 4)), "relative_bias must be given to attention whose position shares it"),
    ("check_table", (False, (32, 4), (32, 4)), "relative_bias must be None: no position shares it"),
    (
        "check_table",
        (True, (4, 32), (32, 4)),
        "relative_bias must have shape (num_buckets, num_heads) = (32, 4), got (4, 32)",
    ),
    *(
        ("check_32_bits", pair, f"an integer ({number}) must fit in 32 bits without jax_enable_x64")
        for pair, number in (((-(1 << 31) - 1, 0), -(1 << 31) - 1), ((0, 1 << 31), 1 << 31))
    ),
    (
        "check_no_offset",
        ("LoraLinear", True),
        "absorbed must be False for a layer (LoraLinear) that adds something to its product",
    ),
    ("check_rows", (1, 2), "batch of x (1) must be the batch of the cache (2)"),
    ("check_rows_given", ((2, 3, 4),), "positions of an image must be given, of shape (rows, B, T) = (2, 3, 4)"),
]


FILES = tuple(Path(module.__file__) for module in (validation, cache_validation))
CHECKS = {
    name: value
    for module in (validation, cache_validation)
    for name, value in vars(module).items()
    if name.startswith("check_")
}


def call(check, values):
    """Call a check with its arguments; those by name come last, as a dictionary."""
    named = values[-1] if len(values) > 1 and isinstance(values[-1], dict) else {}
    return CHECKS[check](*values[: len(values) - bool(named)], **named)


@pytest.mark.parametrize("check", TAKEN)
def test_a_check_takes_what_fits(check):
    for values in TAKEN[check]:
        call(check, values)


def refusal(check, values):
    """Return the error of a call that is refused, and the file and the line that raised it."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call(check, values)
    frames = [entry for entry in caught.traceback if entry.path in FILES]
    return caught.value, (frames[-1].path, frames[-1].lineno + 1)


@pytest.mark.parametrize("check", TAKEN)
def test_a_check_refuses_what_does_not_fit(check):
    for name, values, message in REFUSED:
        if name == check:
            error, _ = refusal(check, values)
            is_type = re.search(r"got [A-Za-z][\w. ]*$", message) is not None
            assert (type(error), str(error)) == (TypeError if is_type else ValueError, message)


def test_every_check_and_every_raise_has_its_row():
    assert CHECKS.keys() == TAKEN.keys()
    reached = {refusal(check, values)[1] for check, values, _ in REFUSED}
    nodes = ((path, node) for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assert reached == {(path, node.lineno) for path, node in nodes if isinstance(node, ast.Raise)}


WHOLE = "must be a whole number of at least"
TRAINING = {"steps": 1, "optimizer": "sgd", "loss": "mse", "lr": 0.1, "seed": 0, "dropout": False, "dtype": None}
REFUSED_IN_TRAINING = [
    *(("steps", steps, f"steps ({steps}) {WHOLE} 1") for steps in (True, False, 0, -1, 1.5, "2", None)),
    *(("seed", seed, f"seed ({seed}) {WHOLE} 0") for seed in (True, -1, 0.5, "2")),
    *(
        ("lr", lr, f"lr ({lr}) must be a positive number")
        for lr in (True, False, 0.0, -1e-3, np.inf, np.nan, "0.1", None)
    ),
    *(
        ("dropout", rate, f"dropout ({rate}) must be True, False or a rate of at least 0 and below 1")
        for rate in (1.0, -0.1, np.nan, "0.5", None)
    ),
    *(("dtype", dtype, f"dtype ({dtype}) must be float64 or None") for dtype in ("bfloat16", "float32")),
    ("optimizer", "lion", "optimizer (lion) must be one of sgd, momentum, adamw, or a pair: torch's, JAX's"),
    ("loss", "mae", "loss (mae) must be one of mse, cross_entropy, or a pair: torch's, JAX's"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED_IN_TRAINING, ids=lambda value: str(value)[:20])
def test_arguments_of_a_training_are_refused_by_name_value_and_rule(name, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        arguments.check(**TRAINING | {name: value})


@pytest.mark.parametrize("what", ["optimizer", "loss"])
@pytest.mark.parametrize("value", [len, (len,), (len, len, len)], ids=["function", "one", "three"])
def test_what_a_training_takes_by_name_or_as_a_pair_is_a_pair(what, value):
    message = f"{what} must be a name or a pair: torch's, JAX's; got {type(value).__name__}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        arguments.check(**TRAINING | {what: value})


@pytest.mark.parametrize(
    "options",
    [
        {"seed": None, "dropout": True, "dtype": "float64", "loss": "cross_entropy", "optimizer": "momentum"},
        {"lr": np.float32(0.05), "dropout": 0, "loss": (len, len), "optimizer": (len, len), "steps": 7},
        {"lr": 1, "dropout": np.float64(0.9), "optimizer": "adamw", "seed": 3},
    ],
    ids=["names", "pairs", "numbers"],
)
def test_a_training_takes_these_arguments(options):
    arguments.check(**TRAINING | options)
