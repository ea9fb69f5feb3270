"""Modules for planting faults, a transformer block and ports of our variants, and modules that are known to be right.

`fault_lab.planted.mutants` has the configurations, `block_faults` and `port_faults` there the faults. Letters: b batch,
t query position, s key position, k key/value head, g query heads per key/value head, h head, c channel of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor, nn

import torch_attn
from attn_bridge.specs import Config
from torch_attn import functional

from ...planted.kernels import OWN_FORMULA, Order
from ...planted.mutants import BlockConfig
from ...planted.port_reads import Read, read
from . import kernels


class Norm(nn.Module):
    """LayerNorm with a bias, or RMSNorm without, over the last axis (arXiv 1607.06450, 1910.07467).

    Args:
        kind: ``layer`` or ``rms``.
        width: width of the features.
        eps: constant added to the variance.
        fault: name of the fault; "" for none.
    """

    def __init__(self, kind: str, width: int, eps: float, fault: str = ""):
        super().__init__()
        self.kind = kind
        self.eps = eps
        self.fault = fault
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "layer" else None

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Normalise the last axis."""
        fault, width = self.fault, x.shape[-1]
        eps = {1e-5: 1e-6, 1e-6: 1e-5}[self.eps] if fault == "norm-eps" else self.eps
        mean = x.mean(-1, keepdim=True)
        centred = x - mean if (self.kind == "layer") != (fault == "norm-kind-wrong") else x
        variance = (centred * centred).mean(-1, keepdim=True)
        if fault == "norm-fast-variance" and self.kind == "layer":
            variance = (x * x).mean(-1, keepdim=True) - mean * mean
        if fault == "norm-unbiased-variance" and self.kind == "layer":
            variance = variance * (width / (width - 1))
        outside = fault == "norm-eps-outside-root"
        weight = self.weight + 1.0 if fault == "norm-weight-plus-one" else self.weight
        normed = centred / (torch.sqrt(variance) + eps if outside else torch.sqrt(variance + eps)) * weight
        return normed if self.bias is None else normed + self.bias


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and with a residual connection.

    Args:
        config: its shape.
        fault: name of the fault; "" for none.
        formula: run attention by the code below; else by the correct code of `functional`.
    """

    def __init__(self, config: BlockConfig, fault: str = "", *, formula: bool = True):
        super().__init__()
        width, inner = config.d_model, config.num_heads * config.head_dim
        inner_kv = config.num_kv_heads * config.head_dim
        self.config = config
        self.fault = fault
        self.formula = formula
        self.attention_norm = Norm(config.norm, width, config.eps, fault)
        if config.fused:
            self.qkv_proj = nn.Linear(width, inner + 2 * inner_kv, bias=config.qkv_bias)
        else:
            self.q_proj = nn.Linear(width, inner, bias=config.qkv_bias)
            self.k_proj = nn.Linear(width, inner_kv, bias=config.qkv_bias)
            self.v_proj = nn.Linear(width, inner_kv, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = Norm("rms", config.head_dim, config.eps, fault)
            self.k_norm = Norm("rms", config.head_dim, config.eps, fault)
        if config.sinks:
            self.sinks = nn.Parameter(torch.zeros(config.num_heads))
        self.dropout = nn.Dropout(config.dropout)
        self.out_proj = nn.Linear(inner, width, bias=config.out_bias)
        if config.hidden:
            self.mlp_norm = Norm(config.norm, width, config.eps, fault)
            self.fc_in = nn.Linear(width, config.hidden)
            self.fc_out = nn.Linear(config.hidden, width)

    def forward(self, x: Float[Tensor, "b t d"], attention_mask: Bool[Tensor, "b s"] | None = None) -> Any:
        """Return the block's output, and with two outputs the contribution of attention to it."""
        normed = x if self.fault == "norm-after-attention" else self.attention_norm(x)
        added = self.attend(normed, attention_mask)
        skipped = normed if self.fault == "residual-of-normed" else x
        out = added if self.fault == "residual-missing" else skipped + added
        if self.fault == "norm-after-attention":
            out = self.attention_norm(out)
        if self.config.hidden:
            approximate = "tanh" if self.fault == "gelu-tanh" else "none"
            hidden = nn.functional.gelu(self.multiply(self.mlp_norm(out), "fc_in"), approximate=approximate)
            out = out + self.multiply(hidden, "fc_out")
        if self.config.outputs == 1:
            return out
        return out, out if self.fault == "second-output-is-first" else added

    def multiply(self, x: Float[Tensor, "... i"], name: str) -> Float[Tensor, "... o"]:
        """Apply the linear layer of that name."""
        layer = getattr(self, name)
        weight, bias = layer.weight, layer.bias
        word = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}.get(name, name)
        if self.fault == f"{word}-weight-not-transposed":
            weight = weight.reshape(weight.T.shape).T
        if self.fault == "weights-in-float16":
            weight = _rounded(weight, torch.float16)
        product = x @ weight.T
        return product if bias is None or self.fault == f"{word}-bias-dropped" else product + bias

    def project(self, x: Float[Tensor, "b t d"]) -> tuple[Tensor, Tensor, Tensor]:
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

    def place(self, query: Float[Tensor, "b t h c"], key: Float[Tensor, "b t k c"]) -> tuple[Tensor, Tensor]:
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

    def rotate(self, x: Float[Tensor, "b t h c"]) -> Float[Tensor, "b t h c"]:
        """Rotate pairs of channels by an angle that grows with the position (arXiv 2104.09864)."""
        theta = self.config.rope_theta * (10.0 if self.fault == "rope-theta-wrong" else 1.0)
        positions = np.arange(x.shape[1]) + (1 if self.fault == "rope-positions-shifted" else 0)
        angles = positions[:, None, None] * theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
        cos, sin = (torch.as_tensor(table).to(x.device, x.dtype) for table in (np.cos(angles), np.sin(angles)))
        sin = -sin if self.fault == "rope-backwards" else sin
        order = "b t h (c two) -> two b t h c" if self.fault == "rope-interleaved" else "b t h (two c) -> two b t h c"
        first, second = rearrange(x, order, two=2)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin])
        return rearrange(turned, " -> ".join(reversed(order.split(" -> "))))

    def allowed(self, shape: tuple[int, int], attention_mask: Tensor | None) -> Bool[Tensor, "b 1 t s"] | None:
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
        allowed = torch.as_tensor(seen)[None, None]
        if attention_mask is not None and fault != "padding-ignored":
            pattern = "b t -> b 1 t 1" if fault == "padding-on-queries" else "b s -> b 1 1 s"
            allowed = allowed.to(attention_mask.device) & rearrange(attention_mask, pattern)
        return ~allowed if fault == "mask-inverted" else allowed

    def score(self, query: Float[Tensor, "b t h c"], key: Float[Tensor, "b s h c"]) -> Float[Tensor, "b h t s"]:
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

    def cap(self, scores: Float[Tensor, "b h t s"]) -> Float[Tensor, "b h t s"]:
        """Keep scores within the soft-cap (arXiv 2408.00118)."""
        softcap = self.config.softcap
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def weigh(self, scores: Float[Tensor, "b h t s"], allowed: Tensor | None) -> Float[Tensor, "b h t s"]:
        """Return the attention weights; a query that sees no key has none."""
        fault, axis = self.fault, -2 if self.fault == "softmax-over-queries" else -1
        after, has_key = None, None
        if allowed is not None and fault == "mask-after-softmax":
            after = allowed
        elif allowed is not None and fault == "fill-0":
            scores = scores * allowed
        elif allowed is not None and fault in ("fill-minus-10", "fill-minus-1e4"):
            scores = torch.where(allowed, scores, -10.0 if fault == "fill-minus-10" else -1e4)
        elif allowed is not None:
            scores = torch.where(allowed, scores, -torch.inf)
            scores = self.cap(scores) if fault == "softcap-after-mask" else scores
            has_key = (scores != -torch.inf).any(axis, keepdim=True)
            scores = torch.where(has_key, scores, 0.0)  # a row of minus infinities would be NaN
        if self.config.sinks and fault != "sinks-missing":
            column = rearrange(self.sinks, "h -> h 1 1").expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], -1)
        weights = _Softmax.apply(scores) if fault == "softmax-gradient-without-sum" else torch.softmax(scores, axis)
        if self.config.sinks and fault != "sinks-missing":
            weights = weights[..., :-1]
        weights = _rounded(weights, torch.bfloat16) if fault == "softmax-in-bfloat16" else weights
        weights = weights if after is None else weights * after
        return weights if has_key is None else torch.where(has_key, weights, 0.0)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Float[Tensor, "b t h c"]:
        """Return the values of each head, weighted, by the plain formula."""
        weights = self.weigh(self.score(query, key), allowed)
        rate = self.config.dropout
        weights = nn.functional.dropout(weights, rate) if self.fault == "dropout-in-eval" else self.dropout(weights)
        context: Tensor = einsum(weights, value, "b h t s, b s h c -> b t h c")
        return context

    def call(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Float[Tensor, "b t h c"]:
        """Return the same from our own function, which knows many ways to compute it; heads may share keys."""
        c = self.config
        context: Tensor = functional.dot_product_attention(
            query,
            key,
            value,
            mask=allowed,
            scale=c.scale,
            softcap=c.softcap,
            sinks=self.sinks if c.sinks else None,
            **functional.attention_arguments(self),
        )
        return context

    def attend(self, x: Float[Tensor, "b t d"], attention_mask: Tensor | None) -> Float[Tensor, "b t d"]:
        """Return the contribution of attention to the residual stream, from the normalised input."""
        fault, groups = self.fault, self.config.groups
        query, key, value = self.project(x)
        query, key = self.place(query, key)
        if self.formula or fault == "kv-heads-tiled":
            pattern = "b s k c -> b s (g k) c" if fault == "kv-heads-tiled" else "b s k c -> b s (k g) c"
            key, value = repeat(key, pattern, g=groups), repeat(value, pattern, g=groups)
        key = key.detach() if fault == "keys-detached" else key
        value = _RoundedGradient.apply(value) if fault == "value-gradient-in-bfloat16" else value
        allowed = self.allowed((query.shape[1], key.shape[1]), attention_mask)
        context = self.mix(query, key, value, allowed) if self.formula else self.call(query, key, value, allowed)
        if fault == "heads-merged-without-transpose":
            context = rearrange(context, "b t h c -> b h t c").reshape(*x.shape[:2], -1)
        else:
            context = rearrange(context, "b t h c -> b t (h c)")
        return self.multiply(context, "out_proj")


class Port(nn.Module):
    """One of our variants that reads other weights than it holds.

    Args:
        variant: name of its class.
        config: its config.
        reads: the replacements of weights.
    """

    def __init__(self, variant: str, config: Config, reads: tuple[Read, ...] = ()):
        super().__init__()
        self.reads = reads
        self.port = getattr(torch_attn, variant)(config)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Call the variant."""
        options = {"attention_mask": attention_mask, "context": context, "positions": positions}
        options = {name: one for name, one in options.items() if one is not None}
        weights = read(self.reads, dict(self.port.named_parameters()), transposed=False)
        output: Tensor = torch.func.functional_call(self.port, weights, (x,), options)
        return output


def build(name: str, arguments: Mapping[str, object], order: Order | None = None) -> nn.Module:
    """Return the block, a stock module, or one of our own.

    Args:
        name: ``Block``, ``Port``, ``Linear``, ``LayerNorm (stock)``, ``MultiheadAttention``,
            ``TransformerEncoderLayer``, or one of ours.
        arguments: the block's configuration and fault, or the sizes of the others.
        order: its order of attention implementations; by default its own, for the block the formula.
    """
    module = _make(name, arguments, formula=order is None or order.first == OWN_FORMULA)
    if order is None:
        return module
    if order.first == OWN_FORMULA:
        order.serves(OWN_FORMULA)
    return kernels.running(module, order)


def _make(name: str, arguments: Mapping[str, Any], *, formula: bool) -> nn.Module:
    if name == "Block":
        return Block(**arguments, formula=formula)
    if name == "Port":
        return Port(**arguments)
    if name == "Linear":
        return nn.Linear(arguments["d_in"], arguments["d_out"], bias=arguments["bias"])
    if name == "LayerNorm (stock)":
        return nn.LayerNorm(arguments["width"])
    if name == "MultiheadAttention":
        return nn.MultiheadAttention(arguments["width"], arguments["num_heads"], batch_first=True)
    if name == "TransformerEncoderLayer":
        return nn.TransformerEncoderLayer(
            arguments["width"],
            arguments["num_heads"],
            arguments["hidden"],
            activation=arguments["activation"],
            norm_first=arguments["norm_first"],
            batch_first=True,
        )
    module: nn.Module = getattr(torch_attn, name)(**arguments)
    return module


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _in_tf32(x: Tensor) -> Tensor:
    """Keep 10 bits behind the point of float32; the gradient does not notice."""
    if x.dtype != torch.float32:
        return x
    whole = x.detach()
    high = whole * (2.0**13 + 1.0)
    return x + ((high - (high - whole)) - whole)


class _RoundedGradient(torch.autograd.Function):
    """The identity, with a gradient that is rounded to bfloat16."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return _rounded(gradient, torch.bfloat16) if gradient.dtype == torch.float32 else gradient


class _Softmax(torch.autograd.Function):
    """Softmax over the last axis, with ``weights * g`` for a gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        return weights * gradient
