"""Mixtures of experts: a router sends every token to a few of many feed-forward layers (arXiv 2101.03961).

Twins: `jax_attn.blocks.mixture_of_experts`, `torch_attn.blocks.mixture_of_experts`. Letters: n token, e expert,
k one of its choices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import MixtureOfExpertsConfig

from .. import functional
from ..decoding import running
from ..initial_weights import filled, linear
from ..random import Rngs
from ..rms_norm import RMSNorm
from .feed_forward import GatedFeedForward


class MixtureOfExperts(nnx.Module):
    """The weighted sum of a token's experts, plus the output of shared layers for every token.

    Args:
        config: the experts, the number of experts per token, the router, and the shared layers.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one; scores and weights
            of the experts are float32 or wider.
    """

    def __init__(
        self,
        config: MixtureOfExpertsConfig,
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        self.config = config
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        self.router = linear(config.d_in, config.num_experts, config.router.bias, **options)
        if config.router.correction:
            self.router.correction_bias = filled(config.num_experts, 0.0, **options)
        if config.router.expert_scales:
            self.router.expert_scale = filled(config.num_experts, 1.0, **options)
        if config.router.norm is not None:
            norm = config.router.norm
            self.router_norm = RMSNorm(norm.emb_dim, norm.eps, norm.unit_offset, norm.affine, **options)
        if config.norm is not None:
            norm = config.norm
            self.norm = RMSNorm(norm.emb_dim, norm.eps, norm.unit_offset, norm.affine, **options)
        self.experts = nnx.List(GatedFeedForward(config.expert, **options) for _ in range(config.num_experts))
        if config.shared is not None:
            self.shared = GatedFeedForward(config.shared, **options)
        if config.shared_gate:
            self.shared_gate = linear(config.d_in, 1, bias=False, **options)

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Apply the layers to ``x`` of shape ``(..., d_in)``, each token on its own."""
        tokens = x.reshape(-1, self.config.d_in)
        chosen, weights = self.choose(tokens)
        if self.config.norm is not None:
            tokens = self.norm(tokens)
        weights = weights.astype(x.dtype)
        out = jnp.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            is_here = chosen == number
            weight = jnp.where(is_here, weights, 0.0).sum(-1, keepdims=True)
            if not running.is_known(is_here):  # shapes must not depend on numbers: all tokens or none
                # Zeros for tokens of other experts: what overflows would be NaN times a weight of 0.
                own_tokens = jnp.where(is_here.any(-1, keepdims=True), tokens, 0.0)
                add = functools.partial(
                    lambda expert, own_tokens, out, weight: out + self._weighted(expert, own_tokens, weight),
                    expert,
                    own_tokens,
                )
                out = jax.lax.cond(is_here.any(), add, lambda out, weight: out, out, weight)
                continue
            (rows,) = np.nonzero(np.asarray(is_here).any(-1))
            if len(rows):
                out = out.at[rows].add(self._weighted(expert, tokens[rows], weight[rows]))
        out = out.reshape(x.shape)
        if self.config.shared is None:
            return out
        shared = self.shared(x)
        if self.config.shared_gate:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x))
        return out + shared

    def _weighted(
        self, expert: GatedFeedForward, tokens: Float[Array, "n d"], weight: Float[Array, "n one"]
    ) -> Float[Array, "n d"]:
        """Return the output of an expert, whose outputs or inputs are multiplied by the weights of the tokens."""
        return expert(tokens * weight) if self.config.weighs == "inputs" else expert(tokens) * weight

    def choose(self, tokens: Float[Array, "n d"]) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
        """Return the numbers of each token's experts ``(N, top_k)``, and their weights, float32 or wider."""
        config, router = self.config, self.config.router
        if router.norm is not None:
            tokens = self.router_norm(tokens)
        if router.input_scale != 1.0:
            tokens = tokens * router.input_scale
        logits = functional.widened(self.router, tokens)
        check_width("router", logits.shape[-1], config.num_experts)
        if router.scores == "sparse_mixer":
            chosen, weights = self._mix_sparsely(logits)
            return chosen, self._scaled(chosen, weights)
        scores = jax.nn.softmax(logits, -1) if router.scores == "softmax" else jax.nn.sigmoid(logits)
        preferred = scores if router.corrects == "scores" else logits
        # A bias that balances the load chooses experts, and does not weigh them (DeepSeek-V3, arXiv 2412.19437).
        if router.correction:
            check_width("correction_bias", self.router.correction_bias.shape[0], config.num_experts)
            preferred = preferred + self.router.correction_bias.astype(logits.dtype)
        if router.groups is not None:
            preferred = self._in_best_groups(preferred)
        chosen = jax.lax.top_k(preferred, config.top_k)[1]
        weights = jnp.take_along_axis(scores, chosen, -1)
        if router.normalise:
            weights = weights / (weights.sum(-1, keepdims=True) + router.sum_eps)
        return chosen, self._scaled(chosen, weights)

    def _scaled(self, chosen: Int[Array, "n k"], weights: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """Return the weights times the router's factor, and that of each expert."""
        router, wide = self.config.router, weights.dtype
        if router.expert_scales:
            check_width("expert_scale", self.router.expert_scale.shape[0], self.config.num_experts)
            weights = weights * self.router.expert_scale.astype(wide)[chosen]
        return weights * router.scale

    def _mix_sparsely(self, logits: Float[Array, "n e"]) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
        """Return each token's experts, taken one by one, and the share of each among the logits close to its own."""
        chosen, weights, rest, fixed = [], [], logits, jax.lax.stop_gradient(logits)
        for _ in range(self.config.top_k):
            best = rest.argmax(-1, keepdims=True)
            largest = jax.lax.stop_gradient(jnp.take_along_axis(rest, best, -1))
            is_far = (largest - fixed) / jnp.maximum(jnp.abs(fixed), largest) > 2.0 * self.config.router.tolerance
            shares = jax.nn.softmax(jnp.where(is_far, -jnp.inf, rest), -1)
            chosen.append(best)
            weights.append(jnp.take_along_axis(shares, best, -1))
            is_best = best == jnp.arange(self.config.num_experts)
            rest = jnp.where(is_best, -jnp.inf, rest)
        return functional.joined(chosen), functional.joined(weights)

    def _in_best_groups(self, preferred: Float[Array, "n e"]) -> Float[Array, "n e"]:
        """Return the scores of the experts in each token's best groups; all others are minus infinity."""
        groups = self.config.router.groups
        assert groups is not None, "asked for where there are groups"
        grouped = rearrange(preferred, "n (g e) -> n g e", g=groups.number)
        # A group counts as much as its two best experts together (DeepSeek-V3) or its best one (V2, arXiv 2405.04434).
        best = jax.lax.top_k(grouped, 2 if groups.score == "top2" else 1)[0].sum(-1)
        chosen = jax.lax.top_k(best, groups.chosen)[1]
        is_chosen = (chosen[:, :, None] == jnp.arange(groups.number)).any(1)
        return rearrange(jnp.where(is_chosen[:, :, None], grouped, -jnp.inf), "n g e -> n (g e)")
