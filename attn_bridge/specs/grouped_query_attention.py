"""Attention whose query heads share key/value heads in groups (Ainslie et al., arXiv 2305.13245), as models run it.

With as many key/value heads as query heads it is multi-head attention (arXiv 1706.03762), with one it is multi-query
attention (arXiv 1911.02150). What Llama, Mistral, Qwen, Gemma, gpt-oss, OLMo, BLOOM and T5 add is a piece each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from ..masks import Mask, causal, chunked, full, prefix, sliding_window
from ..printable import printable
from ..validation import check_number
from .base import DERIVED, LATER, Axis, Config, Example, Parameter, Variant, linear, matrix, vector
from .layer_norm import LayerNormConfig
from .model import below
from .position import MAX_DISTANCE, Alibi, RelativeBias, Rotary
from .rms_norm import RMSNormConfig
from .rope_scaling import LinearScaling, Llama3Scaling, NTKScaling, ProportionalScaling, YaRNScaling


@dataclasses.dataclass(frozen=True)
class QKNorm:
    """Norms of query and key (arXiv 2010.04245), root mean square norms by default.

    Attributes:
        scope: ``"head"`` norms each head (Qwen3, Gemma 3), ``"full"`` the whole projection before it is split (OLMo).
        eps: constant added to the mean square.
        unit_offset: whether the scale counts from 1 (Gemma).
        rotated: whether the norms are of rotated heads (HunYuan); before any rotary position otherwise.
        kind: ``"rms"`` divides by the root mean square, ``"layer"`` takes off the mean as well and adds a shift
            (Persimmon).
        affine: whether normed features are scaled (NanoChat's are not).
    """

    scope: Literal["head", "full"] = "head"
    eps: float = 1e-6
    unit_offset: bool = False
    rotated: bool = False
    kind: Literal["rms", "layer"] = dataclasses.field(default="rms", metadata={LATER: True})
    affine: bool = dataclasses.field(default=True, metadata={LATER: True})

    def __post_init__(self) -> None:
        for field, names in (("scope", ("head", "full")), ("kind", ("rms", "layer"))):
            value = getattr(self, field)
            if value not in names:
                raise ValueError(f"{field} ({printable(repr(value))}) must be one of {', '.join(map(repr, names))}")
        norm = RMSNormConfig(1, self.eps, self.unit_offset, self.affine)  # checks them
        object.__setattr__(self, "eps", norm.eps)
        if not isinstance(self.rotated, bool):
            raise TypeError(f"rotated must be a bool, got {type(self.rotated).__name__}")
        if self.rotated and self.scope != "head":
            raise ValueError(f"rotated ({self.rotated}) needs scope 'head', got {printable(repr(self.scope))}")


@dataclasses.dataclass(frozen=True)
class Temperature:
    """A factor of the queries that grows with their position: ``1 + rate * log(1 + (position + offset) // interval)``.

    Models trained on short texts attend more sharply over long ones with it (Llama 4, Ministral 3).

    Attributes:
        rate: growth per logarithm of the number of intervals.
        interval: positions between two steps, such as the context of pretraining.
        offset: added to positions, which count from 0 (1 in Llama 4).
    """

    rate: float
    interval: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_number("rate", self.rate)
        if not 0 <= self.rate < math.inf:
            raise ValueError(f"rate ({self.rate}) must not be negative, and finite")
        object.__setattr__(self, "rate", float(self.rate))
        for name, least in (("interval", 1), ("offset", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name} of Temperature must be an integer, got {type(value).__name__}")
            if not least <= value <= MAX_DISTANCE:
                raise ValueError(
                    f"{name} of Temperature ({printable(value)}) must be at least {least} and at most {MAX_DISTANCE}"
                )
            object.__setattr__(self, name, value.__index__())


@dataclasses.dataclass(frozen=True)
class GroupedQueryAttentionConfig(Config):
    """Sizes, biases, and the pieces that a model adds to attention.

    Attributes:
        d_in: width of the input.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of `num_heads`; `num_heads` by default.
        head_dim: width of a head; ``d_in // num_heads`` by default.
        d_out: width of the output; `d_in` by default.
        qkv_bias: whether query, key and value have biases.
        out_bias: whether the output projection has one.
        position: `Rotary`, `Alibi`, `RelativeBias`, or None where positions come with the input.
        qk_norm: norms of query and key.
        mask: who attends to whom, by the places of the tokens in the sequence, without padding on the left.
        scale: factor of the scores; ``head_dim ** -0.5`` by default.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2, arXiv 2408.00118).
        sinks: whether each head has a learned logit that joins its softmax and carries no value (gpt-oss, 2508.10925).
        gate: whether the context is multiplied by a function of a projection of the input (arXiv 2505.06708).
        dropout: rate at which attention weights are dropped in training.
        clip: queries, keys and values are clipped to ``[-clip, clip]`` as they come from their projections (OLMo, MPT).
        key_bias: whether key has a bias; `qkv_bias` by default (Whisper has all but this one).
        temperature: a factor of the queries that grows with their position, behind norms and rotation.
        value_norm: constant added to the mean square in a root mean square norm of each head's values, which has no
            scale (Gemma 3n and 4); None omits the norm.
        key_is_value: whether values are the projected keys as they are before norm and rotation, so that they have no
            projection (Gemma 4).
        shared: whether keys and values come with each call, from an earlier layer, so that the layer has no projections
            of them (Gemma 3n and 4).
        gate_scope: whether that projection has a number per ``channel`` of the context, or per ``head`` (Laguna).
        gate_activation: the function: ``sigmoid``, or ``softplus`` (Laguna).
        context_norm: constant added to the mean square in a root mean square norm of the context of all heads, in front
            of the output projection and behind the gate (BitNet); None omits the norm.
        value_dim: width of a head of the values, and of the context; None is `head_dim` (MiMo-V2-Flash).
        value_scale: factor of the values.
    """

    d_in: int
    num_heads: int
    num_kv_heads: int = DERIVED
    head_dim: int = DERIVED
    d_out: int = DERIVED
    qkv_bias: bool = False
    out_bias: bool = False
    position: Rotary | Alibi | RelativeBias | None = None
    qk_norm: QKNorm | None = None
    mask: Mask = dataclasses.field(default_factory=causal)
    scale: float = DERIVED
    softcap: float | None = None
    sinks: bool = False
    gate: bool = False
    dropout: float = 0.0
    clip: float | None = None
    key_bias: bool = DERIVED
    temperature: Temperature | None = dataclasses.field(default=None, metadata={LATER: True})
    value_norm: float | None = dataclasses.field(default=None, metadata={LATER: True})
    key_is_value: bool = dataclasses.field(default=False, metadata={LATER: True})
    shared: bool = dataclasses.field(default=False, metadata={LATER: True})
    gate_scope: Literal["channel", "head"] = dataclasses.field(default="channel", metadata={LATER: True})
    gate_activation: Literal["sigmoid", "softplus"] = dataclasses.field(default="sigmoid", metadata={LATER: True})
    context_norm: float | None = dataclasses.field(default=None, metadata={LATER: True})
    value_dim: int | None = dataclasses.field(default=None, metadata={LATER: True})
    value_scale: float = dataclasses.field(default=1.0, metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_positive_ints("d_in", "num_heads")
        if self.head_dim is None:
            self._require_multiple("d_in", "num_heads")
        self._resolve("num_kv_heads", self.num_heads)
        self._resolve("head_dim", self.d_in // self.num_heads)
        self._resolve("d_out", self.d_in)
        self._require_positive_ints("num_kv_heads", "head_dim", "d_out")
        self._require_multiple("num_heads", "num_kv_heads")
        self._resolve("key_bias", self.qkv_bias)
        self._require_bools("qkv_bias", "key_bias", "out_bias", "sinks", "gate", "key_is_value", "shared")
        self._require_choice("gate_scope", ("channel", "head"))
        self._require_choice("gate_activation", ("sigmoid", "softplus"))
        for name, usual in (("gate_scope", "channel"), ("gate_activation", "sigmoid")):
            if getattr(self, name) != usual and not self.gate:
                raise ValueError(f"{name} ({getattr(self, name)}) must be {usual} without gate")
        self._require_rates("dropout")
        positions = (Rotary, Alibi, RelativeBias)
        pieces = (("position", positions), ("qk_norm", (QKNorm,)), ("temperature", (Temperature,)), ("mask", (Mask,)))
        for name, kinds in pieces:
            value = getattr(self, name)
            if not isinstance(value, kinds) and (value is not None or name == "mask"):
                names = [kind.__name__ for kind in kinds] + (["None"] if name != "mask" else [])
                raise TypeError(f"{name} must be a {' or '.join(names)}, got {type(value).__name__}")
        if isinstance(self.position, Rotary):
            self.position.width(self.head_dim)
        self._resolve("scale", self.head_dim**-0.5)
        for name in ("scale", "softcap", "clip", "value_norm", "context_norm"):
            if getattr(self, name) is not None:
                self._require_positive_number(name)
        self._check_values()
        for name in ("value_norm", "key_is_value"):
            if self.shared and getattr(self, name):
                raise ValueError(f"{name} ({getattr(self, name)}) must be left out of attention with shared keys")
        if self.key_is_value and self.key_bias != self.qkv_bias:
            raise ValueError(f"key_bias ({self.key_bias}) must be qkv_bias ({self.qkv_bias}) where keys are values")

    def _check_values(self) -> None:
        """Check the width and the factor of the values."""
        self._require_positive_number("value_scale")
        if self.value_scale != 1.0 and (self.shared or self.value_norm is not None):
            raise ValueError(f"value_scale ({self.value_scale}) must be 1.0 with shared or value_norm")
        if self.value_dim is None:
            return
        self._require_positive_ints("value_dim")
        if self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", None)
        elif self.key_is_value:
            raise ValueError(f"value_dim ({self.value_dim}) must be head_dim ({self.head_dim}) where keys are values")

    @property
    def value_width(self) -> int:
        """Width of a head of the values, and of the context."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def _widths(self) -> tuple[int, int]:
        """Widths of all query heads, and of all key heads."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    def norm_arguments(self, name: Literal["q_norm", "k_norm"]) -> dict[str, Any]:
        """Return the arguments of the `RMSNorm` or `LayerNorm` of query or key."""
        assert self.qk_norm is not None, "asked for where there are norms"
        query_width, key_width = self._widths
        full = query_width if name == "q_norm" else key_width
        width = full if self.qk_norm.scope == "full" else self.head_dim
        norm = self.qk_norm
        return {"emb_dim": width, "eps": norm.eps, "unit_offset": norm.unit_offset, "affine": norm.affine}

    @property
    def own_table(self) -> tuple[int, int] | None:
        """Shape of the table of relative biases that the layer learns, buckets and heads; None without one."""
        position = self.position if isinstance(self.position, RelativeBias) else None
        return None if position is None or position.shared else (position.num_buckets, self.num_heads)

    @property
    def takes_table(self) -> bool:
        """Whether a table of relative biases comes with each call."""
        return isinstance(self.position, RelativeBias) and self.position.shared

    @property
    def gate_name(self) -> str:
        """Name of the projection of the gate."""
        return "W_gate" if self.gate_scope == "channel" else "W_head_gate"

    @property
    def has_layer_norms(self) -> bool:
        """Whether the norms of query and key are `LayerNorm`, not `RMSNorm`."""
        return self.qk_norm is not None and self.qk_norm.kind == "layer"

    def window(self, rolling: bool) -> int | None:
        """Return how many tokens a cache has to keep: None for all, else those that the mask shows.

        Raises:
            ValueError: `rolling` with a mask that shows all tokens.
        """
        if not rolling:
            return None
        if self.mask.reach is None:
            raise ValueError(
                f"rolling ({rolling}) needs a mask that shows the last tokens only, such as sliding_window"
            )
        return self.mask.reach

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Projections, gate, output projection, norms, sinks and relative-bias table, as configured."""
        query_width, key_width = self._widths
        context_width, value_width = (count * self.value_width for count in (self.num_heads, self.num_kv_heads))
        heads, kv_heads = Axis("heads", self.num_heads), Axis("kv_heads", self.num_kv_heads)
        gates = context_width if self.gate_scope == "channel" else self.num_heads
        names: tuple[Literal["q_norm", "k_norm"], ...] = ("q_norm",) if self.shared else ("q_norm", "k_norm")
        names = () if self.qk_norm is None else names
        norm_class = LayerNormConfig if self.has_layer_norms else RMSNormConfig
        norms: dict[str, LayerNormConfig | RMSNormConfig] = {
            name: norm_class(**self.norm_arguments(name)) for name in names
        }
        norms |= {} if self.context_norm is None else {"context_norm": RMSNormConfig(context_width, self.context_norm)}
        of_head = self.qk_norm is not None and self.qk_norm.scope == "head"
        kinds: dict[str, Axis | str] = {
            "q_norm": "head_dim" if of_head else heads,
            "k_norm": "head_dim" if of_head else kv_heads,
            "context_norm": heads,
        }
        return (
            *linear("W_query", self.d_in, query_width, bias=self.qkv_bias, axes=(heads, "embed")),
            *(
                linear("W_key", self.d_in, key_width, bias=self.key_bias, axes=(kv_heads, "embed"))
                if not self.shared
                else ()
            ),
            *(
                linear("W_value", self.d_in, value_width, bias=self.qkv_bias, axes=(kv_heads, "embed"))
                if not (self.shared or self.key_is_value)
                else ()
            ),
            *(linear(self.gate_name, self.d_in, gates, bias=self.qkv_bias, axes=(heads, "embed")) if self.gate else ()),
            *linear("out_proj", context_width, self.d_out, bias=self.out_bias, axes=("embed", heads)),
            *(
                dataclasses.replace(row, axes=(kinds[name],))
                for name, norm in norms.items()
                for row in below(name, norm.parameters)
            ),
            *((vector("sinks", self.num_heads, "heads"),) if self.sinks else ()),
            *((matrix("relative_bias", *self.own_table, ("buckets", heads)),) if self.own_table is not None else ()),
        )


_SIZES = (10, 6, 2, 4)  # d_in, num_heads, num_kv_heads, head_dim

EXAMPLES = (
    Example(
        "llama",
        GroupedQueryAttentionConfig(*_SIZES, position=Rotary(scaling=Llama3Scaling(8.0, 1.0, 4.0, 16)), dropout=0.1),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16", "float16"),
    ),
    Example(
        "gpt-oss",
        GroupedQueryAttentionConfig(
            *_SIZES,
            qkv_bias=True,
            out_bias=True,
            position=Rotary(150000.0, scaling=YaRNScaling(32.0, 16, truncate=False)),
            mask=sliding_window(3),
            sinks=True,
        ),
        mask="per-head",
        return_weights=True,
        dtypes=("float64", "float32"),
    ),
    Example(
        "gemma",
        GroupedQueryAttentionConfig(
            *_SIZES,
            position=Rotary(scaling=LinearScaling(8.0)),
            qk_norm=QKNorm(unit_offset=True),
            mask=sliding_window(4),
            scale=0.4,
            softcap=1.5,
        ),
        mask="padding",
    ),
    Example("olmo", GroupedQueryAttentionConfig(*_SIZES, d_out=5, position=Rotary(500.0), qk_norm=QKNorm("full"))),
    Example(
        "qwen3-next",
        GroupedQueryAttentionConfig(10, 4, 2, 8, position=Rotary(dim=4), qk_norm=QKNorm(unit_offset=True), gate=True),
        return_weights=True,
    ),
    Example(
        "laguna",
        GroupedQueryAttentionConfig(
            10,
            4,
            2,
            8,
            position=Rotary(dim=4),
            qk_norm=QKNorm(),
            gate=True,
            gate_scope="head",
            gate_activation="softplus",
        ),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16"),
    ),
    Example(
        "bloom",
        GroupedQueryAttentionConfig(12, 6, qkv_bias=True, out_bias=True, position=Alibi()),
        mask="padding",
        return_weights=True,
    ),
    Example(
        "t5-encoder",
        GroupedQueryAttentionConfig(
            12, 6, head_dim=4, position=RelativeBias(10, 8, bidirectional=True), mask=full(), scale=1.0
        ),
        mask="padding",
        return_weights=True,
        dtypes=("float64", "float32", "bfloat16"),
    ),
    Example(
        "t5-decoder", GroupedQueryAttentionConfig(10, 4, 2, 3, position=RelativeBias(4, 8), scale=1.0), mask="per-head"
    ),
    Example(
        "one-kv-head",
        GroupedQueryAttentionConfig(16, 4, 1, position=Rotary(pairing="interleaved", scaling=NTKScaling(4.0))),
        batch=None,
    ),
    Example(
        "qwen2-vl",
        GroupedQueryAttentionConfig(10, 4, 2, 8, qkv_bias=True, position=Rotary(axes=(1, 1, 2))),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16"),
    ),
    Example(
        "qwen3-vl",
        GroupedQueryAttentionConfig(
            6,
            2,
            1,
            14,
            position=Rotary(500.0, dim=12, axes=(3, 2, 1), layout="interleaved", scaling=LinearScaling(2.0)),
            qk_norm=QKNorm(),
        ),
        mask="padding",
    ),
    Example(
        "qwen2-vl-image",
        GroupedQueryAttentionConfig(
            12, 2, head_dim=8, qkv_bias=True, out_bias=True, position=Rotary(axes=(2, 2), layout="axial"), mask=full()
        ),
        dtypes=("float64", "float32", "bfloat16"),
    ),
    Example(
        "pixtral",
        GroupedQueryAttentionConfig(8, 2, head_dim=12, position=Rotary(axes=(3, 3), layout="strided"), mask=full()),
        batch=None,
    ),
    Example("chunked", GroupedQueryAttentionConfig(*_SIZES, position=Rotary(), mask=chunked(3))),
    Example(
        "clipped", GroupedQueryAttentionConfig(*_SIZES, position=Rotary(), clip=0.4), dtypes=("float64", "float32")
    ),
    Example(
        "hunyuan",
        GroupedQueryAttentionConfig(*_SIZES, position=Rotary(), qk_norm=QKNorm(rotated=True)),
        dtypes=("float64", "float32"),
    ),
    Example(
        "persimmon",
        GroupedQueryAttentionConfig(*_SIZES, position=Rotary(dim=2), qk_norm=QKNorm(kind="layer")),
        mask="padding",
    ),
    Example(
        "ministral3",
        GroupedQueryAttentionConfig(*_SIZES, position=Rotary(), temperature=Temperature(0.7, 2)),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16"),
    ),
    Example(
        "gemma3n",
        GroupedQueryAttentionConfig(*_SIZES, position=Rotary(), qk_norm=QKNorm(), scale=1.0, value_norm=1e-3),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16"),
    ),
    Example(
        "gemma4",
        GroupedQueryAttentionConfig(
            10,
            4,
            2,
            8,
            position=Rotary(500.0, scaling=ProportionalScaling(0.5)),
            qk_norm=QKNorm(eps=1e-3),
            scale=1.0,
            value_norm=1e-6,
            key_is_value=True,
        ),
        mask="padding",
        return_weights=True,
    ),
    Example(
        "bitnet",
        GroupedQueryAttentionConfig(*_SIZES, position=Rotary(), context_norm=1e-3),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16"),
    ),
    Example(
        "mimo-v2-flash",
        GroupedQueryAttentionConfig(
            *_SIZES, position=Rotary(dim=2), mask=sliding_window(3), sinks=True, value_dim=3, value_scale=0.7
        ),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16"),
    ),
    Example("prefix", GroupedQueryAttentionConfig(*_SIZES, mask=prefix(3)), mask="padding"),
    Example("one-token", GroupedQueryAttentionConfig(*_SIZES, position=Rotary()), tokens=1, return_weights=True),
)

VARIANT = Variant(
    "GroupedQueryAttention", "grouped_query_attention", GroupedQueryAttentionConfig, group="modern", examples=EXAMPLES
)
