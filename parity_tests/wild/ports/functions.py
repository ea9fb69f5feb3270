"""Pure functions over trees of weights, of torch and of JAX: what Equinox, Haiku and Keras users hand in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..gallery import Case, entry, fault, inside
from ..weights import draw, fresh, held, numbers, tokens

WIDTH, HEADS, HIDDEN, T = 8, 2, 12, 6


@dataclasses.dataclass(frozen=True)
class _Function:
    """What ``parity.function`` gives, until it is there."""

    call: Callable[..., Any]
    weights: Any


def function(call: Callable[..., Any], weights: Any) -> Any:
    """Return a side made of a function and its weights."""
    from attn_bridge import parity

    return getattr(parity, "function", _Function)(call, weights)


def tree(arrays: Mapping[str, np.ndarray], framework: str) -> dict[str, Any]:
    """Return nested dicts of arrays by dotted names."""
    if framework == "torch":
        import torch

        make = torch.tensor
    else:
        import jax.numpy as make

        make = make.asarray
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        node = found
        for word in path:
            node = node.setdefault(word, {})
        node[last] = make(array)
    return found


MLP = {
    "fc1.w": (HIDDEN, WIDTH),
    "fc1.b": (HIDDEN,),
    "fc2.w": (WIDTH, HIDDEN),
    "fc2.b": (WIDTH,),
    "norm.scale": (WIDTH,),
}


def torch_mlp(weights: Any, x: Any) -> Any:
    """Normalise, widen, GELU, narrow."""
    import torch
    from torch.nn import functional

    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weights["norm"]["scale"]
    y = functional.gelu(functional.linear(y, weights["fc1"]["w"], weights["fc1"]["b"]))
    return x + functional.linear(y, weights["fc2"]["w"], weights["fc2"]["b"])


@entry(
    "torch function",
    "JAX function",
    faults={
        "gelu-tanh": fault(""),
        "eps-inside-the-mean": fault(""),
        "bias-dropped": fault(""),
        "scale-twice": fault(""),
    },
)
def mlp_functions(wrong: str | None) -> Case:
    """Pair an MLP over dicts, kernels [in, out] on the JAX side."""
    import jax
    import jax.numpy as jnp

    def jax_mlp(weights, x):
        eps = 1e-5 / WIDTH if wrong == "eps-inside-the-mean" else 1e-5
        y = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weights["norm"]["scale"]
        y = y * weights["norm"]["scale"] if wrong == "scale-twice" else y
        y = jax.nn.gelu(y @ weights["fc1"]["w"] + weights["fc1"]["b"], approximate=wrong == "gelu-tanh")
        bias = 0.0 * weights["fc2"]["b"] if wrong == "bias-dropped" else weights["fc2"]["b"]
        return x + y @ weights["fc2"]["w"] + bias

    arrays = draw(MLP)
    turned = {name: array.T if name.endswith(".w") else array for name, array in arrays.items()}
    second = function(jax_mlp, tree(turned, "jax"))
    return Case(function(torch_mlp, tree(arrays, "torch")), second, numbers(2, T, WIDTH))


@entry(
    "torch function",
    "two torch functions",
    faults={"detached": fault("", direction="backward", side="second"), "scale-by-the-width": fault("")},
)
def attention_torch_functions(wrong: str | None) -> Case:
    """Fused attention against a loop over heads."""
    import torch
    from torch.nn import functional

    def fused(weights, x):
        b, t, d = x.shape
        q, k, v = ((x @ weights[name]).view(b, t, HEADS, -1).transpose(1, 2) for name in ("q", "k", "v"))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d) @ weights["out"]

    def looped(weights, x):
        size = WIDTH // HEADS
        heads = []
        for h in range(HEADS):
            part = slice(h * size, (h + 1) * size)
            q, k, v = (x @ weights[name][:, part] for name in ("q", "k", "v"))
            k = k.detach() if wrong == "detached" else k
            scores = q @ k.mT / (WIDTH if wrong == "scale-by-the-width" else size) ** 0.5
            heads.append(scores.softmax(-1) @ v)
        return torch.cat(heads, -1) @ weights["out"]

    arrays = draw(dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH)))
    return Case(function(fused, tree(arrays, "torch")), function(looped, tree(arrays, "torch")), numbers(2, T, WIDTH))


@entry(
    "JAX function",
    "torch module",
    faults={
        "attention-over-the-batch": fault("", *inside("attn", "out_proj"), "attn"),
        "values-without-bias": fault("", *inside("attn", "out_proj"), "attn"),
        "eps": fault("", "norm", ("attn", "norm")),
    },
)
def module_and_function(wrong: str | None) -> Case:
    """``torch.nn.MultiheadAttention`` and a norm against a function over a list and dicts, as Haiku keeps them."""
    import jax
    import jax.numpy as jnp
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.norm(x + self.attn(x, x, x, need_weights=False)[0])

    def port(weights, x):
        b, t, d = x.shape
        y = x @ weights["attn"]["in_proj"]["w"] + weights["attn"]["in_proj"]["b"]
        if wrong == "values-without-bias":
            y = y - jnp.where(jnp.arange(3 * d) < 2 * d, 0.0, weights["attn"]["in_proj"]["b"])
        q, k, v = (one.reshape(b, t, HEADS, -1) for one in jnp.split(y, 3, -1))
        if wrong == "attention-over-the-batch":
            q, k, v = (one.swapaxes(0, 1) for one in (q, k, v))
        scores = jnp.einsum("bthc,bshc->bhts", q, k) / (d // HEADS) ** 0.5
        y = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v)
        y = (y.swapaxes(0, 1) if wrong == "attention-over-the-batch" else y).reshape(b, t, d)
        y = x + y @ weights["attn"]["out"]["w"] + weights["attn"]["out"]["b"]
        y = y - y.mean(-1, keepdims=True)
        y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + (1e-6 if wrong == "eps" else 1e-5))
        return y * weights["norm"]["scale"] + weights["norm"]["offset"]

    first = fresh(Torch())
    arrays = held(first)
    names = {
        "attn.in_proj.w": arrays["attn.in_proj_weight"].T,
        "attn.in_proj.b": arrays["attn.in_proj_bias"],
        "attn.out.w": arrays["attn.out_proj.weight"].T,
        "attn.out.b": arrays["attn.out_proj.bias"],
        "norm.scale": arrays["norm.weight"],
        "norm.offset": arrays["norm.bias"],
    }
    return Case(first, function(port, tree(names, "jax")), numbers(2, T, WIDTH))


@entry(
    "JAX function",
    "NNX module",
    faults={"untied": fault(""), "positions-added-after-the-norm": fault("")},
)
def function_and_nnx(wrong: str | None) -> Case:
    """Pair a JAX function first, an NNX module second: embedding, norm, tied logits."""
    import jax.numpy as jnp
    from flax import nnx

    def tied(weights, ids):
        x = weights["embed"]["table"][ids] + weights["position"]["table"][: ids.shape[1]]
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return (x * weights["norm"]["scale"] + weights["norm"]["bias"]) @ weights["embed"]["table"].T

    rngs = nnx.Rngs(0)

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.embed, self.position = nnx.Embed(12, WIDTH, rngs=rngs), nnx.Embed(T, WIDTH, rngs=rngs)
            self.norm = nnx.LayerNorm(WIDTH, use_fast_variance=False, rngs=rngs)

        def __call__(self, ids):
            x, position = self.embed(ids), self.position(jnp.arange(ids.shape[1]))
            x = self.norm(x) + position if wrong == "positions-added-after-the-norm" else self.norm(x + position)
            return x @ jnp.flip(self.embed.embedding[...], 0).T if wrong == "untied" else self.embed.attend(x)

    second = fresh(Port())
    arrays = held(second)
    names = {
        "embed.table": arrays["embed.embedding"],
        "position.table": arrays["position.embedding"],
        "norm.scale": arrays["norm.scale"],
        "norm.bias": arrays["norm.bias"],
    }
    return Case(function(tied, tree(names, "jax")), second, tokens(2, T, vocabulary=12))


@entry(
    "torch function",
    "JAX function",
    "BatchNorm",
    faults={
        "variance-of-the-population": fault(""),  # torch keeps n/(n-1) of it, Flax the variance itself
        "momentum-the-other-way": fault(""),
        "normalised-by-the-old-statistics": fault(""),
    },
)
def batch_norm_step(wrong: str | None) -> Case:
    """BatchNorm in training with its statistics given and returned: torch's own against one by hand."""
    import jax
    import jax.numpy as jnp
    from torch.nn import functional

    def torch_step(weights, x, mean, variance):
        mean, variance = mean.detach().clone(), variance.detach().clone()
        y = functional.batch_norm(x, mean, variance, weights["weight"], weights["bias"], training=True, momentum=0.1)
        return y, mean, variance

    def jax_step(weights, x, mean, variance):
        now, spread = x.mean((0, 2, 3)), x.var((0, 2, 3))
        at, by = (mean, variance) if wrong == "normalised-by-the-old-statistics" else (now, spread)
        y = (x - at[:, None, None]) / jnp.sqrt(by[:, None, None] + 1e-5)
        n = x.size // x.shape[1]
        unbiased = spread if wrong == "variance-of-the-population" else spread * n / (n - 1)
        keep = 0.1 if wrong == "momentum-the-other-way" else 0.9
        now, unbiased = jax.lax.stop_gradient((now, unbiased))
        mean, variance = (jax.lax.stop_gradient(one) for one in (mean, variance))
        mean, variance = keep * mean + (1 - keep) * now, keep * variance + (1 - keep) * unbiased
        return y * weights["scale"][:, None, None] + weights["bias"][:, None, None], mean, variance

    arrays = draw({"weight": (4,), "bias": (4,)})
    second = {"scale": arrays["weight"], "bias": arrays["bias"]}
    inputs = {
        "x": numbers(3, 4, 2, 2),
        "mean": numbers(4, seed=2),
        "variance": np.random.default_rng(3).uniform(0.5, 2.0, 4).astype(np.float32),
    }
    return Case(function(torch_step, tree(arrays, "torch")), function(jax_step, tree(second, "jax")), inputs)
