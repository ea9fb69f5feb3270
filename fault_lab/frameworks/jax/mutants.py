"""Modules for planting faults, a transformer block and ports of our variants, and modules that are known to be right.

`fault_lab.planted.mutants` has the configurations, `block_faults` and `port_faults` there the faults. Letters: b batch,
t query position, s key position, k key/value head, g query heads per key/value head, h head, c channel of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import einsum, rearrange, repeat
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

import jax_attn
from attn_bridge.specs import Config
from jax_attn import functional

from ...planted.kernels import OWN_FORMULA, Order
from ...planted.mutants import BlockConfig
from ...planted.port_reads import Read, read
from . import kernels


class Norm(nnx.Module):
    """LayerNorm with a bias, or RMSNorm without, over the last axis (arXiv 1607.06450, 1910.07467).

    Args:
        kind: ``layer`` or ``rms``.
        width: width of the features.
        eps: constant added to the variance.
        fault: name of the fault; "" for none.
    """

    def __init__(self, kind: str, width: int, eps: float, fault: str = ""):
        self.kind = kind
        self.eps = eps
        self.fault = fault
        self.weight = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width)) if kind == "layer" else None

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalise the last axis."""
        fault, width = self.fault, x.shape[-1]
        eps = {1e-5: 1e-6, 1e-6: 1e-5}[self.eps] if fault == "norm-eps" else self.eps
        mean = x.mean(-1, keepdims=True)
        centred = x - mean if (self.kind == "layer") != (fault == "norm-kind-wrong") else x
        variance = (centred * centred).mean(-1, keepdims=True)
        if fault == "norm-fast-variance" and self.kind == "layer":
            variance = (x * x).mean(-1, keepdims=True) - mean * mean
        if fault == "norm-unbiased-variance" and self.kind == "layer":
            variance = variance * (width / (width - 1))
        outside = fault == "norm-eps-outside-root"
        weight = self.weight + 1.0 if fault == "norm-weight-plus-one" else self.weight[...]
        normed = centred / (jnp.sqrt(variance) + eps if outside else jnp.sqrt(variance + eps)) * weight
        return normed if self.bias is None else normed + self.bias


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm and with a residual connection.

    Args:
        config: its shape.
        fault: name of the fault; "" for none.
        formula: run attention by the code below; else by the correct code of `functional`.
        rngs: source of the initial weights (stream ``params``) and of dropout (``dropout``).
    """

    def __init__(self, config: BlockConfig, fault: str = "", *, formula: bool = True, rngs: nnx.Rngs):
        width, inner = config.d_model, config.num_heads * config.head_dim
        inner_kv = config.num_kv_heads * config.head_dim
        self.config = config
        self.fault = fault
        self.formula = formula
        self.attention_norm = Norm(config.norm, width, config.eps, fault)
        if config.fused:
            self.qkv_proj = nnx.Linear(width, inner + 2 * inner_kv, use_bias=config.qkv_bias, rngs=rngs)
        else:
            self.q_proj = nnx.Linear(width, inner, use_bias=config.qkv_bias, rngs=rngs)
            self.k_proj = nnx.Linear(width, inner_kv, use_bias=config.qkv_bias, rngs=rngs)
            self.v_proj = nnx.Linear(width, inner_kv, use_bias=config.qkv_bias, rngs=rngs)
        if config.qk_norm:
            self.q_norm = Norm("rms", config.head_dim, config.eps, fault)
            self.k_norm = Norm("rms", config.head_dim, config.eps, fault)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros(config.num_heads))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.out_proj = nnx.Linear(inner, width, use_bias=config.out_bias, rngs=rngs)
        if config.hidden:
            self.mlp_norm = Norm(config.norm, width, config.eps, fault)
            self.fc_in = nnx.Linear(width, config.hidden, rngs=rngs)
            self.fc_out = nnx.Linear(config.hidden, width, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"], attention_mask: Bool[Array, "b s"] | None = None) -> Any:
        """Return the block's output, and with two outputs the contribution of attention to it."""
        normed = x if self.fault == "norm-after-attention" else self.attention_norm(x)
        added = self.attend(normed, attention_mask)
        skipped = normed if self.fault == "residual-of-normed" else x
        out = added if self.fault == "residual-missing" else skipped + added
        if self.fault == "norm-after-attention":
            out = self.attention_norm(out)
        if self.config.hidden:
            approximate = self.fault == "gelu-tanh"
            hidden = jax.nn.gelu(self.multiply(self.mlp_norm(out), "fc_in"), approximate=approximate)
            out = out + self.multiply(hidden, "fc_out")
        if self.config.outputs == 1:
            return out
        return out, out if self.fault == "second-output-is-first" else added

    def multiply(self, x: Float[Array, "... i"], name: str) -> Float[Array, "... o"]:
        """Apply the linear layer of that name."""
        layer = getattr(self, name)
        kernel, bias = layer.kernel[...], layer.bias
        word = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}.get(name, name)
        if self.fault == f"{word}-weight-not-transposed":
            kernel = kernel.T.reshape(kernel.shape)
        if self.fault == "weights-in-float16":
            kernel = _rounded(kernel, jnp.float16)
        product = x @ kernel
        return product if bias is None or self.fault == f"{word}-bias-dropped" else product + bias

    def project(self, x: Float[Array, "b t d"]) -> tuple[Array, Array, Array]:
        """Return query ``(B, T, H, C)``, key and value ``(B, T, K, C)``."""
        c, fault = self.config, self.fault
        if c.fused and fault == "fused-rows-per-head":
            rows = rearrange(self.multiply(x, "qkv_proj"), "b t (k n c) -> b t k n c", k=c.num_kv_heads, c=c.head_dim)
            query = rearrange(rows[..., : c.groups, :], "b t k g c -> b t (k g) c")
            return query, rows[..., c.groups, :], rows[..., c.groups + 1, :]
        if c.fused:
            first, second = c.num_heads * c.head_dim, (c.num_heads + c.num_kv_heads) * c.head_dim
            rows = self.multiply(x, "qkv_proj")
            features = [rows[..., :first], rows[..., first:second], rows[..., second:]]
        else:
            features = [self.multiply(x, name) for name in ("q_proj", "k_proj", "v_proj")]
        pattern = "b t (c h) -> b t h c" if fault == "heads-split-inside-out" else "b t (h c) -> b t h c"
        query, key, value = (rearrange(one, pattern, c=c.head_dim) for one in features)
        if fault == "query-and-key-swapped":
            query, key = key, query
        return (query, value, key) if fault == "key-and-value-swapped" else (query, key, value)

    def place(self, query: Float[Array, "b t h c"], key: Float[Array, "b t k c"]) -> tuple[Array, Array]:
        """Normalise query and key and rotate them by their positions."""
        norms = []
        if self.config.qk_norm:
            norms = [self.q_norm, self.k_norm]
        if self.fault == "qk-norm-weights-swapped":
            norms.reverse()
        if norms and self.fault != "qk-norm-after-rope":
            query, key = norms[0](query), norms[1](key)
        if self.config.rope:
            query, key = self.rotate(query), self.rotate(key)
        if norms and self.fault == "qk-norm-after-rope":
            query, key = norms[0](query), norms[1](key)
        return query, key

    def rotate(self, x: Float[Array, "b t h c"]) -> Float[Array, "b t h c"]:
        """Rotate pairs of channels by an angle that grows with the position (arXiv 2104.09864)."""
        theta = self.config.rope_theta * (10.0 if self.fault == "rope-theta-wrong" else 1.0)
        positions = np.arange(x.shape[1]) + (1 if self.fault == "rope-positions-shifted" else 0)
        angles = positions[:, None, None] * theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
        cos, sin = (jnp.asarray(table, x.dtype) for table in (np.cos(angles), np.sin(angles)))
        sin = -sin if self.fault == "rope-backwards" else sin
        order = "b t h (c two) -> two b t h c" if self.fault == "rope-interleaved" else "b t h (two c) -> two b t h c"
        first, second = rearrange(x, order, two=2)
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin])
        return rearrange(turned, " -> ".join(reversed(order.split(" -> "))))

    def allowed(self, shape: tuple[int, int], attention_mask: Array | None) -> Bool[Array, "b 1 t s"] | None:
        """Return which query may attend to which key; None where nothing is hidden."""
        c, fault = self.config, self.fault
        if fault == "mask-ignored" or not (c.causal or c.window is not None or c.padding != "none"):
            return None
        query, key = np.arange(shape[0])[:, None], np.arange(shape[1])[None, :]
        seen = np.ones(shape, bool)
        if c.causal:
            off = {"causal-shows-next-token": 1, "causal-hides-own-token": -1}.get(fault, 0)
            seen &= key <= query + off
        if c.window is not None:
            seen &= np.abs(query - key) < c.window + (fault == "window-one-longer")
        allowed = jnp.asarray(seen)[None, None]
        if attention_mask is not None and fault != "padding-ignored":
            pattern = "b t -> b 1 t 1" if fault == "padding-on-queries" else "b s -> b 1 1 s"
            allowed = allowed & rearrange(attention_mask, pattern)
        return ~allowed if fault == "mask-inverted" else allowed

    def score(self, query: Float[Array, "b t h c"], key: Float[Array, "b s h c"]) -> Float[Array, "b h t s"]:
        """Return the scaled and soft-capped scores."""
        c, fault = self.config, self.fault
        if fault == "scores-in-tf32":
            query, key = _in_tf32(query), _in_tf32(key)
        scale = {
            "scale-by-d_model": c.d_model**-0.5,
            "scale-missing": 1.0,
            "scale-twice": c.scale * c.scale,
            "scale-off-by-1e-4": c.scale * 1.0001,
        }.get(fault, c.scale)
        scores = einsum(query, key, "b t h c, b s h c -> b h t s")
        if fault == "softcap-before-scale":
            return self.cap(scores) * scale
        return scores * scale if fault in ("softcap-missing", "softcap-after-mask") else self.cap(scores * scale)

    def cap(self, scores: Float[Array, "b h t s"]) -> Float[Array, "b h t s"]:
        """Keep scores within the soft-cap (arXiv 2408.00118)."""
        softcap = self.config.softcap
        return scores if softcap is None else softcap * jnp.tanh(scores / softcap)

    def weigh(self, scores: Float[Array, "b h t s"], allowed: Array | None) -> Float[Array, "b h t s"]:
        """Return the attention weights; a query that sees no key has none."""
        fault, axis = self.fault, -2 if self.fault == "softmax-over-queries" else -1
        after, has_key = None, None
        if allowed is not None and fault == "mask-after-softmax":
            after = allowed
        elif allowed is not None and fault == "fill-0":
            scores = scores * allowed
        elif allowed is not None and fault in ("fill-minus-10", "fill-minus-1e4"):
            scores = jnp.where(allowed, scores, -10.0 if fault == "fill-minus-10" else -1e4)
        elif allowed is not None:
            scores = jnp.where(allowed, scores, -jnp.inf)
            scores = self.cap(scores) if fault == "softcap-after-mask" else scores
            has_key = (scores != -jnp.inf).any(axis, keepdims=True)
            scores = jnp.where(has_key, scores, 0.0)  # a row of minus infinities would be NaN
        if self.config.sinks and fault != "sinks-missing":
            column = jnp.broadcast_to(rearrange(self.sinks[...], "h -> h 1 1"), (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, column], -1)
        weights = _softmax(scores) if fault == "softmax-gradient-without-sum" else jax.nn.softmax(scores, axis)
        if self.config.sinks and fault != "sinks-missing":
            weights = weights[..., :-1]
        weights = _rounded(weights, jnp.bfloat16) if fault == "softmax-in-bfloat16" else weights
        weights = weights if after is None else weights * after
        return weights if has_key is None else jnp.where(has_key, weights, 0.0)

    def mix(self, query: Array, key: Array, value: Array, allowed: Array | None) -> Float[Array, "b t h c"]:
        """Return the values of each head, weighted, by the plain formula."""
        weights = self.weigh(self.score(query, key), allowed)
        weights = (
            self.dropout(weights, deterministic=False) if self.fault == "dropout-in-eval" else self.dropout(weights)
        )
        context: Array = einsum(weights, value, "b h t s, b s h c -> b t h c")
        return context

    def call(self, query: Array, key: Array, value: Array, allowed: Array | None) -> Float[Array, "b t h c"]:
        """Return the same from our own function, which knows many ways to compute it; heads may share keys."""
        c = self.config
        context: Array = functional.dot_product_attention(
            query,
            key,
            value,
            mask=allowed,
            scale=c.scale,
            softcap=c.softcap,
            sinks=self.sinks[...] if c.sinks else None,
            **functional.attention_arguments(self),
        )
        return context

    def attend(self, x: Float[Array, "b t d"], attention_mask: Array | None) -> Float[Array, "b t d"]:
        """Return the contribution of attention to the residual stream, from the normalised input."""
        fault, groups = self.fault, self.config.groups
        query, key, value = self.project(x)
        query, key = self.place(query, key)
        if self.formula or fault == "kv-heads-tiled":
            pattern = "b s k c -> b s (g k) c" if fault == "kv-heads-tiled" else "b s k c -> b s (k g) c"
            key, value = repeat(key, pattern, g=groups), repeat(value, pattern, g=groups)
        key = jax.lax.stop_gradient(key) if fault == "keys-detached" else key
        value = _rounded_gradient(value) if fault == "value-gradient-in-bfloat16" else value
        allowed = self.allowed((query.shape[1], key.shape[1]), attention_mask)
        context = self.mix(query, key, value, allowed) if self.formula else self.call(query, key, value, allowed)
        if fault == "heads-merged-without-transpose":
            context = rearrange(context, "b t h c -> b h t c").reshape(*x.shape[:2], -1)
        else:
            context = rearrange(context, "b t h c -> b t (h c)")
        return self.multiply(context, "out_proj")


class Port(nnx.Module):
    """One of our variants that reads other weights than it holds.

    Args:
        variant: name of its class.
        config: its config.
        reads: the replacements of weights.
        rngs: random numbers for initial weights.
    """

    def __init__(self, variant: str, config: Config, reads: tuple[Read, ...] = (), *, rngs: nnx.Rngs):
        self.reads = nnx.static(reads)
        self.port = getattr(jax_attn, variant)(config, rngs=rngs)

    def __call__(
        self,
        x: Array,
        attention_mask: Array | None = None,
        context: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Call the variant."""
        options = {"attention_mask": attention_mask, "context": context, "positions": positions}
        options = {name: one for name, one in options.items() if one is not None}
        graphdef, parameters, rest = nnx.split(self.port, nnx.Param, ...)
        flat = nnx.to_flat_state(parameters)
        weights = {".".join(map(str, path)): variable.get_value() for path, variable in flat}
        weights |= read(self.reads, weights, transposed=True)
        read_from = [(path, variable.replace(weights[".".join(map(str, path))])) for path, variable in flat]
        output: Array = nnx.merge(graphdef, nnx.from_flat_state(read_from), rest)(x, **options)
        return output


def build(name: str, arguments: Mapping[str, object], order: Order | None = None) -> nnx.Module:
    """Return the block, a stock module, or one of our own.

    Args:
        name: ``Block``, ``Port``, ``Linear``, ``LayerNorm (stock)``, ``MultiheadAttention``,
            ``TransformerEncoderLayer``, or one of ours.
        arguments: the block's configuration and fault, or the sizes of the others.
        order: its order of attention implementations; by default its own, for the block the formula.
    """
    # Drawing initial weights by JAX would compile one program per shape.
    formula = order is None or order.first == OWN_FORMULA
    module = nnx.eval_shape(lambda: _make(name, arguments, nnx.Rngs(0), formula=formula))
    nnx.update(module, jax.tree.map(_fill, nnx.state(module)))
    if order is None:
        return module
    if order.first == OWN_FORMULA:
        order.serves(OWN_FORMULA)
    return kernels.running(module, order)


def forget_programs() -> None:
    """Free the memory of the programs that JAX compiled in this process."""
    jax.clear_caches()


def _make(name: str, arguments: Mapping[str, Any], rngs: nnx.Rngs, *, formula: bool) -> nnx.Module:
    if name == "Block":
        return Block(**arguments, formula=formula, rngs=rngs)
    if name == "Port":
        return Port(**arguments, rngs=rngs)
    if name == "Linear":
        return nnx.Linear(arguments["d_in"], arguments["d_out"], use_bias=arguments["bias"], rngs=rngs)
    if name == "LayerNorm (stock)":
        return nnx.LayerNorm(arguments["width"], epsilon=1e-5, rngs=rngs)
    if name == "MultiheadAttention":
        return nnx.MultiHeadAttention(arguments["num_heads"], arguments["width"], decode=False, rngs=rngs)
    if name == "TransformerEncoderLayer":
        return _EncoderLayer(**arguments, rngs=rngs)
    module: nnx.Module = getattr(jax_attn, name)(**arguments, rngs=rngs)
    return module


def _fill(leaf: jax.ShapeDtypeStruct) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.asarray(np.zeros(leaf.shape, leaf.dtype))
    return jnp.asarray(np.random.default_rng(leaf.shape).normal(size=leaf.shape).astype(leaf.dtype))


class _EncoderLayer(nnx.Module):
    """A typical port of `torch.nn.TransformerEncoderLayer`."""

    def __init__(self, width: int, num_heads: int, hidden: int, activation: str, norm_first: bool, *, rngs: nnx.Rngs):
        self.self_attn = nnx.MultiHeadAttention(num_heads, width, decode=False, dropout_rate=0.1, rngs=rngs)
        self.linear1 = nnx.Linear(width, hidden, rngs=rngs)
        self.linear2 = nnx.Linear(hidden, width, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.activation = activation
        self.norm_first = norm_first

    def __call__(self, src: Array, mask: Array | None = None) -> Array:
        if self.norm_first:
            src = src + self._attend(self.norm1(src), mask)
            return src + self._feed(self.norm2(src))
        src = self.norm1(src + self._attend(src, mask))
        return self.norm2(src + self._feed(src))

    def _attend(self, x: Array, mask: Array | None) -> Array:
        attended: Array = self.dropout(self.self_attn(x, mask=mask))
        return attended

    def _feed(self, x: Array) -> Array:
        hidden = self.linear1(x)
        active = jax.nn.relu(hidden) if self.activation == "relu" else jax.nn.gelu(hidden, approximate=False)
        fed: Array = self.dropout(self.linear2(self.dropout(active)))
        return fed


def _rounded(x: Array, dtype: object) -> Array:
    return x.astype(dtype).astype(x.dtype)


def _in_tf32(x: Array) -> Array:
    """Keep 10 bits behind the point of float32; the gradient does not notice."""
    if x.dtype != jnp.float32:
        return x
    whole = jax.lax.stop_gradient(x)
    high = whole * (2.0**13 + 1.0)
    return x + ((high - (high - whole)) - whole)


@jax.custom_vjp
def _rounded_gradient(x: Array) -> Array:
    """Return the same, with a gradient that is rounded to bfloat16."""
    return x


_rounded_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (_rounded(gradient, jnp.bfloat16),))


@jax.custom_vjp
def _softmax(scores: Array) -> Array:
    """Softmax over the last axis, with ``weights * g`` for a gradient."""
    return jax.nn.softmax(scores, -1)


def _softmax_forward(scores: Array) -> tuple[Array, Array]:
    weights = jax.nn.softmax(scores, -1)
    return weights, weights


_softmax.defvjp(_softmax_forward, lambda weights, gradient: (weights * gradient,))
