"""The modules that the tests of this folder call, with drawn weights, and the arrays that they take."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attn_bridge import specs

from ..support.calls.bad_calls import ATTENTION_MODULES, D_IN, MODULES

SIMPLE, WRAPPER, MHA = "simple_self_attention", "MultiHeadAttentionWrapper", "MultiHeadAttention"
NAMES = (SIMPLE, *ATTENTION_MODULES)
CAUSAL = ("CausalAttention", WRAPPER, MHA)
WIDTHS = {SIMPLE: D_IN, "SelfAttention_v1": 3, "SelfAttention_v2": 3, "CausalAttention": 3, WRAPPER: 12, MHA: 6}
"""Width of the context that each gives, with the arguments of `MODULES`."""

HEADS = {WRAPPER: (2,), MHA: (2,)}
"""Axis of heads in the weights of those that have one."""

EYES = np.broadcast_to(np.eye(24, dtype="float32"), (16, 24, 24)).copy()
"""Input of `make_transparent`."""

PADDING = np.array([[True, True, False, True, True], [True, True, True, False, False]])
"""Padding mask of two sequences of five tokens."""

RECURRENT = (
    "LinearAttention",
    "LightningAttention",
    "GatedConvolution",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "Mamba",
    "Mamba2",
)
"""Classes that keep a state instead of keys; they take positions and use none."""

seeded = pytest.mark.parametrize("seed", [0, 1])
every_attention = pytest.mark.parametrize("name", NAMES)
ALIKE = {
    "SelfAttention_v1": "CausalAttention",
    "SelfAttention_v2": "CausalAttention",
    "MultiHeadAttention": "CausalAttention",
    "MultiHeadLatentAttention": "SparseIndexedAttention",
    "LightningAttention": "Mamba2",
    "GatedDeltaNet": "KimiDeltaAttention",
}
"""Class -> a class whose program has the same derivative rules, scans and masks.

Of both, one runs in tests of transformations, which trace and compile all of a program; `make full` runs the other,
and programs of open sizes are exported of both.
"""

every_module = pytest.mark.parametrize("name", MODULES)
every_causal = pytest.mark.parametrize("name", CAUSAL)


def draw(*shape: int, seed: int = 0, dtype: Any = "float32") -> np.ndarray:
    """Return normal numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def draw_weights(config: specs.Config, seed: int, dtype: Any = "float32") -> dict[str, np.ndarray]:
    """Return weights under their torch names, biases too."""
    rng = np.random.default_rng(1000 + seed)
    return {row.rule.torch: rng.uniform(-1.2, 1.2, row.shape).astype(dtype) for row in config.parameters}


def make(backend: ModuleType, name: str, seed: int = 0, dtype: Any = "float32", **changes: Any) -> Any:
    """Return a module in eval mode with drawn weights, or the function of that name."""
    if name == SIMPLE:
        return backend.package.simple_self_attention
    module = backend.build(name, **{**MODULES[name], **changes})
    backend.load(module, draw_weights(module.config, seed, dtype))
    module.eval()
    return module


def make_example(backend: ModuleType, name: str, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Return a modern variant of its first example in eval mode with drawn weights, and an input ``(2, 5, d_in)``.

    A cross attention attends to its input.
    """
    config = specs.find_variant(name).examples[0].config
    if name == "CrossAttention":
        config = config.replace(d_context=config.d_in)
    module = backend.build(name, config=config)
    backend.load(module, draw_weights(config, seed))
    module.eval()
    return module, draw(2, 5, config.d_in, seed=seed)


def make_transparent(backend: ModuleType, name: str, rate: float, seed: int = 0) -> Any:
    """Return a module in training mode that turns `EYES` into the very weights that dropout left, head by head."""
    tokens = EYES.shape[-1]
    (heads,) = HEADS.get(name, (1,))
    d_out = heads * tokens if name == MHA else tokens
    arguments = {"d_in": tokens, "d_out": d_out, "context_length": tokens, "dropout": rate}
    module = backend.build(name, seed, **arguments, **({"num_heads": heads} if name in HEADS else {}))
    weights = draw_weights(module.config, 0)
    for key, array in weights.items():
        if "W_value" in key:
            array[...] = np.tile(np.eye(tokens), (d_out // tokens, 1))
        elif key.startswith("out_proj"):
            array[...] = np.eye(d_out) if array.ndim == 2 else 0.0
    backend.load(module, weights)
    module.train()
    return module


def drop_uniform(backend: ModuleType, rate: float, rng: Any) -> np.ndarray:
    """Return the equal weights of 24 keys as dropout leaves them."""
    query, key = np.zeros((16, 24, 2, 3), "float32"), np.zeros((16, 24, 1, 3), "float32")
    value = np.eye(24, dtype="float32")[None, :, None].repeat(16, 0)
    return backend.attend(query, key, value, dropout=rate, rng=rng)
