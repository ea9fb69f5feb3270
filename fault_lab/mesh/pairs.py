"""Right pairs on a mesh: our variants and small models, drawn, each shared out against the plain one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from attn_bridge.masks import causal, full, sliding_window
from attn_bridge.specs import VARIANTS, Alibi, Config, GroupedQueryAttentionConfig, Rotary, find_variant
from attn_parity.check.cases import CASES, TwinCase, draw
from attn_parity.check.mesh.cases import MODELS, MeshCase, mesh_cases

DTYPES = ("float32", "float32", "bfloat16")
METHODS = ("all_gather", "ring", "ulysses")


@dataclasses.dataclass(frozen=True)
class RightPair:
    """One module of ours, and how devices share it.

    Attributes:
        case: the module and its input.
        method: how queries meet keys of other devices.
        dtype: precision that is judged.
    """

    case: MeshCase
    method: str
    dtype: str

    def described(self) -> dict[str, object]:
        """Return it as JSON-ready data."""
        shapes = {name: list(one.shape) for name, one in self.case.numbers.inputs.items()}
        fields = {"module": self.case.name, "config": repr(self.case.config), "inputs": shapes}
        return {**fields, "method": self.method, "dtype": self.dtype}


def draw_right(seed: int, sizes: Mapping[str, int]) -> RightPair:
    """Draw a right pair for a mesh of these sizes: three of four with drawn sizes, the others from ``check``."""
    random = np.random.default_rng([seed, 11])
    method = _one_of(random, METHODS) if sizes.get("context", 1) > 1 else "all_gather"
    dtype = _one_of(random, DTYPES)
    if random.random() < 0.75:
        return RightPair(_drawn(random, sizes, method, seed), method, dtype)
    names = [variant.name for variant in VARIANTS if not variant.is_function] + list(MODELS)
    cases = mesh_cases((_one_of(random, names),), seed)
    return RightPair(_one_of(random, cases), method, dtype)


def _drawn(random: np.random.Generator, sizes: Mapping[str, int], method: str, seed: int) -> MeshCase:
    """Return grouped query attention, or the book's, in sizes that the devices can share."""
    tensor, context = sizes.get("tensor", 1), sizes.get("context", 1)
    tokens = context * int(random.integers(2, 7))
    batch = sizes.get("fsdp", 1) * int(random.integers(1, 3))
    heads = tensor * (context if method == "ulysses" else 1) * int(random.integers(1, 4))
    width, bias = int(_one_of(random, (6, 9, 12, 16))), bool(random.random() < 0.5)
    mask = _one_of(random, ("none", "padding", "per-head"))
    config: Config
    if random.random() < 0.2:
        variant = find_variant("MultiHeadAttention")
        arguments = {"d_in": width, "d_out": 4 * heads, "context_length": tokens, "num_heads": heads, "qkv_bias": bias}
        case = TwinCase("drawn", tokens, {**CASES[0].sizes, **arguments, "dropout": 0.0}, batch, mask)
    else:
        variant = find_variant("GroupedQueryAttention")
        config = GroupedQueryAttentionConfig(
            width,
            heads,
            int(_one_of(random, [count for count in range(1, heads + 1) if heads % count == 0])),
            int(_one_of(random, (2, 4, 6))),
            qkv_bias=bias,
            out_bias=bool(random.random() < 0.5),
            position=_one_of(random, (None, Rotary(), Rotary(), Alibi())),
            mask=_one_of(random, (causal(), causal(), full(), sliding_window(int(random.integers(2, tokens + 1))))),
            softcap=_one_of(random, (None, None, 5.0)),
            sinks=bool(random.random() < 0.3),
        )
        case = TwinCase("drawn", tokens, {"d_in": width}, batch, mask, config=config)
    name = f"{variant.name} drawn"
    return MeshCase(name, variant.name, case.arguments(variant), case.config_of(variant), draw(case, variant, seed))


def _one_of(random: np.random.Generator, values: Any) -> Any:
    return values[int(random.integers(len(values)))]
