"""Mixtures of experts: a router sends every token to a few of many feed-forward layers (arXiv 2101.03961).

Twins: `jax_attn.blocks.mixture_of_experts`, `torch_attn.blocks.mixture_of_experts`. Letters: n token, e expert,
k one of its choices.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import MixtureOfExpertsConfig

from .. import functional
from ..implementations.second_derivatives import in_vmap
from ..initial_weights import filled, linear
from ..layer import Layer
from ..operations.tracing import is_traced
from ..random import JaxRngs
from ..rms_norm import RMSNorm
from .feed_forward import GatedFeedForward


class MixtureOfExperts(Layer):
    """The weighted sum of a token's experts, plus the output of shared layers for every token.

    Args:
        config: the experts, the number of experts per token, the router, and the shared layers.
        rngs: source of the initial weights (stream ``params``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation; scores and weights of the experts are float32 or wider.
    """

    def __init__(
        self,
        config: MixtureOfExpertsConfig,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config = config
        options = {"rngs": rngs, "device": device, "dtype": dtype}
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
        self.experts = nn.ModuleList(GatedFeedForward(config.expert, **options) for _ in range(config.num_experts))
        if config.shared is not None:
            self.shared = GatedFeedForward(config.shared, **options)
        if config.shared_gate:
            self.shared_gate = linear(config.d_in, 1, bias=False, **options)

    @torch.no_grad()
    def _reset_own(self) -> None:
        if self.config.router.correction:
            self.router.correction_bias.zero_()
        if self.config.router.expert_scales:
            self.router.expert_scale.fill_(1.0)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Apply the layers to ``x`` of shape ``(..., d_in)``, each token on its own."""
        tokens = x.reshape(-1, self.config.d_in)
        chosen, weights = self.choose(tokens)
        if self.config.norm is not None:
            tokens = self.norm(tokens)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(tokens)
        # A compiler and `vmap` know no numbers, and a trace would keep the experts of these: all tokens go to each.
        is_blind = torch.compiler.is_compiling() or is_traced() or in_vmap()
        for number, expert in enumerate(self.experts):
            is_here = chosen == number
            weight = torch.where(is_here, weights, 0.0).sum(-1, keepdim=True)
            if is_blind:
                # Zeros for tokens of other experts: what overflows would be NaN times a weight of 0.
                own_tokens = torch.where(is_here.any(-1, keepdim=True), tokens, 0.0)
                out = out + self._weighted(expert, own_tokens, weight)
                continue
            (rows,) = is_here.any(-1).nonzero(as_tuple=True)
            if len(rows):
                # An expert gives 16 bits under autocast.
                out = out.index_add(0, rows, self._weighted(expert, tokens[rows], weight[rows]).to(out.dtype))
        out = out.reshape(x.shape)
        if self.config.shared is None:
            return out
        shared = self.shared(x)
        if self.config.shared_gate:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return out + shared

    def _weighted(
        self, expert: GatedFeedForward, tokens: Float[Tensor, "n d"], weight: Float[Tensor, "n one"]
    ) -> Float[Tensor, "n d"]:
        """Return the output of an expert, whose outputs or inputs are multiplied by the weights of the tokens."""
        return expert(tokens * weight) if self.config.weighs == "inputs" else expert(tokens) * weight

    def choose(self, tokens: Float[Tensor, "n d"]) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
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
        scores = torch.softmax(logits, -1) if router.scores == "softmax" else torch.sigmoid(logits)
        preferred = scores if router.corrects == "scores" else logits
        # A bias that balances the load chooses experts, and does not weigh them (DeepSeek-V3, arXiv 2412.19437).
        if router.correction:
            check_width("correction_bias", self.router.correction_bias.shape[0], config.num_experts)
            preferred = preferred + self.router.correction_bias.to(logits.dtype)
        if router.groups is not None:
            preferred = self._in_best_groups(preferred)
        chosen = preferred.topk(config.top_k, -1).indices
        weights = torch.gather(scores, -1, chosen)
        if router.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + router.sum_eps)
        return chosen, self._scaled(chosen, weights)

    def _scaled(self, chosen: Int[Tensor, "n k"], weights: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the weights times the router's factor, and that of each expert."""
        router, wide = self.config.router, weights.dtype
        if router.expert_scales:
            check_width("expert_scale", self.router.expert_scale.shape[0], self.config.num_experts)
            weights = weights * self.router.expert_scale.to(wide)[chosen]
        return weights * router.scale

    def _mix_sparsely(self, logits: Float[Tensor, "n e"]) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        """Return each token's experts, taken one by one, and the share of each among the logits close to its own."""
        chosen, weights, rest, fixed = [], [], logits, logits.detach()
        for _ in range(self.config.top_k):
            best = rest.argmax(-1, keepdim=True)
            largest = torch.gather(rest, -1, best).detach()
            is_far = (largest - fixed) / torch.maximum(fixed.abs(), largest) > 2.0 * self.config.router.tolerance
            shares = torch.softmax(torch.where(is_far, -torch.inf, rest), -1)
            chosen.append(best)
            weights.append(torch.gather(shares, -1, best))
            is_best = best == torch.arange(self.config.num_experts, device=best.device)
            rest = torch.where(is_best, -torch.inf, rest)
        return functional.joined(chosen), functional.joined(weights)

    def _in_best_groups(self, preferred: Float[Tensor, "n e"]) -> Float[Tensor, "n e"]:
        """Return the scores of the experts in each token's best groups; all others are minus infinity."""
        groups = self.config.router.groups
        assert groups is not None, "asked for where there are groups"
        grouped = rearrange(preferred, "n (g e) -> n g e", g=groups.number)
        # A group counts as much as its two best experts together (DeepSeek-V3) or its best one (V2, arXiv 2405.04434).
        best = grouped.topk(2 if groups.score == "top2" else 1, -1).values.sum(-1)
        chosen = best.topk(groups.chosen, -1).indices
        is_chosen = (chosen[:, :, None] == torch.arange(groups.number, device=chosen.device)).any(1)
        return rearrange(torch.where(is_chosen[:, :, None], grouped, -torch.inf), "n g e -> n (g e)")
