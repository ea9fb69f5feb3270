"""Faults to plant in a twin, each the way a porter makes it: as a change to one function or constructor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jax_attn
import torch_attn
from attn_bridge import masks
from attn_bridge.specs import LayerNormConfig

PACKAGES: dict[str, Any] = {"torch": torch_attn, "flax": jax_attn}
Plant = Callable[[pytest.MonkeyPatch, str], None]


def _attention(change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Plant:
    """Change the arguments that every module gives to `functional.dot_product_attention`."""

    def plant(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
        functional = PACKAGES[framework].functional
        right = functional.dot_product_attention

        def wrong(query: Any, key: Any, value: Any, **arguments: Any) -> Any:
            arguments |= {"query": query, "key": key, "value": value}
            return right(**change(framework, arguments))

        monkeypatch.setattr(functional, "dot_product_attention", wrong)

    return plant


def _scale_by_all_heads(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    query = arguments["query"]
    return arguments | {"scale": (query.shape[-1] * query.shape[-2]) ** -0.5}


def _mask_off_by_one(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"mask": arguments["mask"].offset(1)}


def _mask_hides_self(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"mask": arguments["mask"].offset(-1)}


def _mask_ignored(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"mask": None}


def _padding_ignored(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"mask": masks.causal()}


def _query_and_key_swapped(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"query": arguments["key"], "key": arguments["query"]}


def _heads_split_inside_out(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    swapped = {}
    for name in ("query", "key", "value"):
        array = arguments[name]
        b, t, h, c = array.shape
        # The features were read as (c h) where they are (h c).
        swapped[name] = array.reshape(b, t, c, h).swapaxes(2, 3)
    return arguments | swapped


def _dropout_in_eval(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"dropout": 0.1, "rng": None if framework == "torch" else jax.random.key(0)}


def _only_reference(monkeypatch: pytest.MonkeyPatch, framework: str) -> Any:
    """Leave no implementation but the reference, whose pieces can be broken one by one; return it."""
    package = PACKAGES[framework].implementations
    monkeypatch.setattr(package, "IMPLEMENTATIONS", {"reference": package.reference})
    return package.reference


def _softmax_in_bfloat16(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    reference = _only_reference(monkeypatch, framework)
    right = reference.masked_softmax

    def wrong(scores: Any, allowed: Any = None, sinks: Any = None) -> Any:
        weights = right(scores, allowed, sinks)
        if framework == "torch":
            return weights.to(torch.bfloat16).to(weights.dtype) if weights.dtype == torch.float32 else weights
        return weights.astype(jnp.bfloat16).astype(weights.dtype) if weights.dtype == jnp.float32 else weights

    monkeypatch.setattr(reference, "masked_softmax", wrong)


def _fully_masked_row_gives_mean(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    reference = _only_reference(monkeypatch, framework)
    where, softmax = (torch.where, torch.softmax) if framework == "torch" else (jnp.where, jax.nn.softmax)

    def wrong(scores: Any, allowed: Any = None, sinks: Any = None) -> Any:
        return softmax(scores if allowed is None else where(allowed, scores, -1e30), -1)

    monkeypatch.setattr(reference, "masked_softmax", wrong)


def _keys_without_gradient(framework: str, arguments: dict[str, Any]) -> dict[str, Any]:
    key = arguments["key"]
    return arguments | {"key": key.detach() if framework == "torch" else jax.lax.stop_gradient(key)}


def _projection_bias_dropped(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    """Leave every bias out of the sums; the parameters are still there."""
    linear = torch.nn.Linear if framework == "torch" else jax_attn.linear.Linear
    name = "forward" if framework == "torch" else "__call__"
    right = getattr(linear, name)

    def wrong(self: Any, x: Any) -> Any:
        bias = self.bias
        out = right(self, x)
        return out if bias is None else out - (bias if framework == "torch" else bias[...])

    monkeypatch.setattr(linear, name, wrong)


def _key_bias_dropped(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    """Leave one bias out of its sum; softmax does not show it, neither in the output nor in a gradient."""
    module_class = PACKAGES[framework].MultiHeadAttention
    linear = torch.nn.Linear if framework == "torch" else jax_attn.linear.Linear
    name = "forward" if framework == "torch" else "__call__"
    attend, project = getattr(module_class, name), getattr(linear, name)
    key_layers: list[Any] = []

    def wrong_attend(self: Any, x: Any, **arguments: Any) -> Any:
        key_layers.append(self.W_key)
        return attend(self, x, **arguments)

    def wrong_project(self: Any, x: Any) -> Any:
        if self is not key_layers[-1]:
            return project(self, x)
        return x @ self.weight.T if framework == "torch" else x @ self.kernel[...]

    monkeypatch.setattr(module_class, name, wrong_attend)
    monkeypatch.setattr(linear, name, wrong_project)


def _norm(change: Callable[[Any, Any], Any]) -> Plant:
    """Change what LayerNorm computes from its centred input."""

    def plant(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
        module_class = PACKAGES[framework].LayerNorm
        sqrt = torch.sqrt if framework == "torch" else jnp.sqrt

        def wrong(self: Any, x: Any) -> Any:
            axis = {"dim": -1, "keepdim": True} if framework == "torch" else {"axis": -1, "keepdims": True}
            centred = x - x.mean(**axis)
            return self.scale * change(centred, (self.config.eps, axis, sqrt)) + self.shift

        monkeypatch.setattr(module_class, "forward" if framework == "torch" else "__call__", wrong)

    return plant


def _unbiased(centred: Any, parts: Any) -> Any:
    eps, axis, sqrt = parts
    width = centred.shape[-1]
    return centred / sqrt((centred * centred).sum(**axis) / max(width - 1, 1) + eps)


def _eps_outside_the_root(centred: Any, parts: Any) -> Any:
    eps, axis, sqrt = parts
    return centred / (sqrt((centred * centred).mean(**axis)) + eps)


def _default_eps_1e_6(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    module_class = PACKAGES[framework].LayerNorm
    build = module_class.__init__

    def wrong(self: Any, emb_dim: int, eps: float = 1e-6, **keywords: Any) -> None:
        build(self, emb_dim, eps, **keywords)

    monkeypatch.setattr(module_class, "__init__", wrong)


def _eps_1e_6(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    """The constant is wrong where it is used, the config is right."""

    def change(centred: Any, parts: Any) -> Any:
        _, axis, sqrt = parts
        return centred / sqrt((centred * centred).mean(**axis) + 1e-6)

    assert LayerNormConfig(2).eps == 1e-5
    _norm(change)(monkeypatch, framework)


FAULTS: dict[str, tuple[str, str, Plant]] = {
    "scale-sqrt-d_out": ("MultiHeadAttention", "different", _attention(_scale_by_all_heads)),
    "mask-shows-next-token": ("CausalAttention", "different", _attention(_mask_off_by_one)),
    "mask-hides-own-token": ("MultiHeadAttentionWrapper", "different", _attention(_mask_hides_self)),
    "mask-ignored": ("MultiHeadAttention", "different", _attention(_mask_ignored)),
    "padding-ignored": ("MultiHeadAttention", "different", _attention(_padding_ignored)),
    "heads-split-inside-out": ("MultiHeadAttention", "different", _attention(_heads_split_inside_out)),
    "query-and-key-swapped": ("SelfAttention_v1", "different", _attention(_query_and_key_swapped)),
    "bias-dropped": ("SelfAttention_v2", "different", _projection_bias_dropped),
    "key-bias-dropped": ("MultiHeadAttention", "different", _key_bias_dropped),
    "dropout-in-eval": ("CausalAttention", "different", _attention(_dropout_in_eval)),
    "masked-row-gives-mean": ("CausalAttention", "different", _fully_masked_row_gives_mean),
    "keys-without-gradient": ("SelfAttention_v2", "different", _attention(_keys_without_gradient)),
    "norm-default-eps": ("LayerNorm", "different", _default_eps_1e_6),
    "norm-eps": ("LayerNorm", "different", _eps_1e_6),
    "norm-eps-outside-root": ("LayerNorm", "different", _norm(_eps_outside_the_root)),
    "norm-unbiased-variance": ("LayerNorm", "different", _norm(_unbiased)),
    "softmax-in-bfloat16": ("SelfAttention_v2", "precision", _softmax_in_bfloat16),
}
"""Name of a fault -> the variant that shows it, the verdict it must get, and how to plant it."""
