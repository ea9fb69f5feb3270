"""Mixtures of experts: a router sends every token to a few of many feed-forward layers (arXiv 2101.03961)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from ...printable import printable
from ...validation import check_number
from ..base import LATER, Config, Parameter, linear, vector
from ..model import below
from ..rms_norm import RMSNormConfig
from .feed_forward import FeedForwardConfig

Scores = Literal["softmax", "sigmoid", "sparse_mixer"]
GroupScore = Literal["max", "top2"]
Corrects = Literal["scores", "logits"]
Weighs = Literal["outputs", "inputs"]


@dataclasses.dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts, of which a token takes some before it takes experts (DeepSeek, arXiv 2412.19437).

    Attributes:
        number: how many groups there are.
        chosen: how many of them a token takes.
        score: a group counts as much as its best expert (``max``, DeepSeek V2) or its best two together (``top2``, V3).
    """

    number: int
    chosen: int
    score: GroupScore = "max"

    def __post_init__(self) -> None:
        for name in ("number", "chosen"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} of groups must be an integer, got {type(value).__name__}")
        if not 1 <= self.chosen <= self.number:
            raise ValueError(f"chosen groups ({self.chosen}) must be at least 1 and at most all ({self.number})")
        if self.score not in get_args(GroupScore):
            raise ValueError(f"score of groups ({printable(repr(self.score))}) must be 'max' or 'top2'")


@dataclasses.dataclass(frozen=True)
class Router(Config):
    """How the experts of a token, and their weights, come from its scores, in float32 or wider.

    Attributes:
        scores: function of the logits before experts are chosen: ``softmax`` over all of them, or ``sigmoid`` of each;
            ``sparse_mixer`` takes experts one by one, each weighted by a softmax over the remaining logits that are
            close to the largest (arXiv 2409.12136).
        normalise: whether the weights of the chosen experts are divided by their sum; after ``softmax`` that is the
            softmax over the chosen ones (Mixtral, gpt-oss).
        scale: factor of the weights at the end.
        bias: whether the logits have a bias.
        correction: whether a learned bias joins the scores where experts are chosen, and not in their weights (DeepSeek
            V3, arXiv 2408.15664).
        corrects: the numbers that experts are chosen by, which that bias joins: the ``scores``, or the ``logits``
            behind them (Kolibri; Llama 4, without a bias), which differ where scores are rounded to equal ones.
        groups: the groups of experts that a token may choose from; None is all experts.
        sum_eps: constant added to that sum (LFM2).
        tolerance: with ``sparse_mixer``, half the relative distance from the largest logit within which logits count.
        norm: config of a norm of the router's input (Gemma 4), or None.
        input_scale: factor of that input behind the norm.
        expert_scales: whether the weights of each expert are multiplied by a learned number at the end.
    """

    scores: Scores = "softmax"
    normalise: bool = True
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    corrects: Corrects = "scores"
    groups: ExpertGroups | None = None
    # `router_jitter_noise` of Phi-3.5-MoE.
    tolerance: float = 0.01
    sum_eps: float = dataclasses.field(default=0.0, metadata={LATER: True})
    norm: RMSNormConfig | None = dataclasses.field(default=None, metadata={LATER: True})
    input_scale: float = dataclasses.field(default=1.0, metadata={LATER: True})
    expert_scales: bool = dataclasses.field(default=False, metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_choice("scores", get_args(Scores))
        self._require_bools("normalise", "bias", "correction", "expert_scales")
        self._require_choice("corrects", get_args(Corrects))
        for name in ("scale", "tolerance", "input_scale"):
            check_number(name, getattr(self, name))
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} ({getattr(self, name)}) must be positive and finite")
            object.__setattr__(self, name, float(getattr(self, name)))
        check_number("sum_eps", self.sum_eps)
        if not 0 <= self.sum_eps < math.inf:
            raise ValueError(f"sum_eps ({self.sum_eps}) must be at least 0 and finite")
        object.__setattr__(self, "sum_eps", float(self.sum_eps))
        if self.sum_eps and not self.normalise:
            raise ValueError(f"sum_eps ({self.sum_eps}) needs normalise")
        has_choice = self.normalise or self.correction or self.corrects != "scores" or self.groups
        if self.scores == "sparse_mixer" and has_choice:
            raise ValueError(f"scores ({self.scores}) need a router without normalise, correction and groups")
        if self.groups is not None:
            self._require_kind("groups", ExpertGroups)
        if self.norm is not None:
            self._require_kind("norm", RMSNormConfig)


@dataclasses.dataclass(frozen=True)
class MixtureOfExpertsConfig(Config):
    """Experts, the router, and the shared layers of every token.

    Attributes:
        expert: config of every expert.
        num_experts: number of experts.
        top_k: number of experts per token.
        router: how they are chosen.
        shared: config of feed-forward layers that every token passes as well, or None.
        shared_gate: whether their output is multiplied by the sigmoid of a projection of the token to one number.
        norm: config of a norm of the experts' input, which the router does not read (Gemma 4); None omits it.
        weighs: whether the weights of a token multiply the outputs of its experts, or their inputs (Llama 4).
    """

    expert: FeedForwardConfig
    num_experts: int
    top_k: int
    router: Router = dataclasses.field(default_factory=Router)
    shared: FeedForwardConfig | None = None
    shared_gate: bool = False
    norm: RMSNormConfig | None = dataclasses.field(default=None, metadata={LATER: True})
    weighs: Weighs = dataclasses.field(default="outputs", metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_kind("expert", FeedForwardConfig)
        self._require_positive_ints("num_experts", "top_k")
        self._require_kind("router", Router)
        self._require_bools("shared_gate")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts})")
        if not self.expert.gated:
            raise ValueError(f"expert ({self.expert}) must be gated")
        for name, layers in (("expert", self.expert), ("shared", self.shared)):
            if isinstance(layers, FeedForwardConfig) and layers.hidden_norm is not None:
                raise ValueError(f"hidden_norm of {name} ({layers.hidden_norm}) must be None")
        self._require_choice("weighs", get_args(Weighs))
        if self.weighs == "inputs" and self.expert.bias:
            raise ValueError(f"weighs ({self.weighs}) needs experts without biases")
        if self.shared is not None:
            self._require_kind("shared", FeedForwardConfig)
            if self.shared.d_in != self.d_in or not self.shared.gated:
                raise ValueError(f"shared ({self.shared}) must be gated and of the width of the experts ({self.d_in})")
        elif self.shared_gate:
            raise ValueError(f"shared_gate ({self.shared_gate}) needs shared")
        if self.norm is not None:
            self._require_kind("norm", RMSNormConfig)
            if self.shared is not None:
                raise ValueError("shared must be None where the experts' input has a norm")
        for name, norm in (("norm", self.norm), ("norm of router", self.router.norm)):
            if norm is not None and norm.emb_dim != self.d_in:
                raise ValueError(f"emb_dim of {name} ({norm.emb_dim}) must be the width of the experts ({self.d_in})")
        groups = self.router.groups
        if groups is not None:
            if self.num_experts % groups.number:
                raise ValueError(f"num_experts ({self.num_experts}) must be a multiple of groups ({groups.number})")
            size = self.num_experts // groups.number
            if self.top_k > groups.chosen * size:
                raise ValueError(f"top_k ({self.top_k}) must be at most the experts of the chosen groups")
            if groups.score == "top2" and size < 2:
                raise ValueError(f"groups of {size} expert have no best two, which their score needs")

    @property
    def d_in(self) -> int:
        """Width of the input, and of the output."""
        return self.expert.d_in

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The router, the experts one by one, and what every token goes to."""
        experts = (row for j in range(self.num_experts) for row in below(f"experts.{j}", self.expert.parameters))
        return (*self._router_parameters, *experts, *self._shared_parameters)

    @property
    def count(self) -> int:
        """How many numbers the parameters hold."""
        others = (*self._router_parameters, *self._shared_parameters)
        return self.num_experts * self.expert.count + sum(math.prod(row.shape) for row in others)

    @property
    def _router_parameters(self) -> tuple[Parameter, ...]:
        router = self.router
        correction, scales = (vector(name, self.num_experts, "experts") for name in ("correction_bias", "expert_scale"))
        return (
            *linear("router", self.d_in, self.num_experts, bias=router.bias, axes=("experts", "embed")),
            *(below("router", [correction]) if router.correction else ()),
            *(below("router", [scales]) if router.expert_scales else ()),
            *(below("router_norm", router.norm.parameters) if router.norm is not None else ()),
            *(below("norm", self.norm.parameters) if self.norm is not None else ()),
        )

    @property
    def _shared_parameters(self) -> tuple[Parameter, ...]:
        return (
            *(below("shared", self.shared.parameters) if self.shared is not None else ()),
            *(linear("shared_gate", self.d_in, 1, bias=False, axes=("one", "embed")) if self.shared_gate else ()),
        )
