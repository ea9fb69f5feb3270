"""The way back of a described family: our config to the keys of a config.json."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from ...masks import causal
from ...specs.blocks.feed_forward import Activation, FeedForwardConfig
from ...specs.decoder_model import DecoderConfig, Recurrent
from ...specs.differential_attention import DifferentialAttentionConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.multi_head_latent_attention import MultiHeadLatentAttentionConfig
from ...specs.rms_norm import RMSNormConfig
from ..reading import multimodal
from ..reading.decoders import (
    ACTIVATIONS,
    KINDS,
    NAMES,
    Attention,
    attention_of,
    inverse,
    rotary_by_kind,
    window_of,
    write_heads,
    write_sizes,
    write_windows,
)
from ..reading.model_config import nested
from ..reading.rotary import write_nested, write_rotary, write_rotary_by_kind
from . import experts, latent, mixers, runs
from .description import ALONE, Description, KeySource

FROM_WINDOW = ("window or types", "types or window")
LATE, UNROTATED, CHUNKED = "types or late window", "types or unrotated window", "rotated chunk"
BOTH = "both"
"""Rule of layers with attention and a recurrent layer next to each other (Falcon-H1)."""

DENSE_INTERVAL = "layers.dense_interval"
"""Field of the interval of kinds in the layers in front of all experts; 1 gives them positions as well (Cohere 2)."""

_OF_WIDTH = ("window", "window or types")
"""Rules of layers' kinds of which a config is written with the width of the window alone."""

FIRST_WITH_WINDOW = "max_window_layers"
"""Key of the first layer with a window, in spite of its name."""

POSITIONS = "rope_parameters"
"""Key of rotary positions."""

_CONTEXT = "original_max_position_embeddings"
"""Key of the length that positions are scaled from, next to those of positions."""

ROTARY, SCALING = f"{POSITIONS}.", "rope_scaling."
"""Beginnings of keys of rotary positions, by their newer and their older name."""
ACTIVATED = ("activation", "head_activation")
"""Fields that hold activations."""

OPTIONAL = ("scale", "softcap", "logit_softcap", "clip", "query_dim", "rms_eps")
"""Fields of numbers that may be null."""


class FamilyWriter:
    """Writes the configs of a described family.

    Args:
        description: the family.
    """

    def __init__(self, description: Description):
        self.description = description

    def write(self, config: DecoderConfig) -> dict[str, object]:
        """Return the keys of a config; a value that no key holds is left out, and found when they are read again."""
        attention, heads, width = self._write_attention(config)
        if self.description.even_heads and attention is not None and config.emb_dim % attention.num_heads:
            raise ValueError(
                f"emb_dim ({config.emb_dim}) must be a multiple of num_heads ({attention.num_heads}) there"
            )
        first = config.blocks[0]
        is_full = [not isinstance(one.attention, Recurrent) for one in config.blocks]
        qk_norm, temperature, position = (_first(config, name) for name in ("qk_norm", "temperature", "position"))
        parts = {
            "attention": attention,
            "differential": attention,
            "qk_norm": qk_norm,
            "temperature": temperature,
            "position": position,
            "indexer": getattr(attention, "indexer", None),
            "norm": types.SimpleNamespace(
                **vars(first.norm), rms_eps=first.norm.eps if isinstance(first.norm, RMSNormConfig) else None
            ),
            "last_norm": config.norm,
            "block": types.SimpleNamespace(
                **vars(first), attention_scale=first.mixer_scales[0], recurrent_scale=first.mixer_scales[1]
            ),
            "model": config,
            "updates": config.updates,
            "layer_embeddings": types.SimpleNamespace(
                width=getattr(config.layer_embeddings, "dim", 0),
                rows=getattr(config.layer_embeddings, "vocab_size", None),
            ),
            "layers": types.SimpleNamespace(
                shared=sum(block.keys_of is not None for block in config.blocks),
                heads=[getattr(one.attention, "num_heads", 0) for one in config.blocks],
                rotated=[int(getattr(one.attention, "position", None) is not None) for one in config.blocks],
                listed=[layer for layer, is_one in enumerate(is_full) if is_one],
            ),
            "period": types.SimpleNamespace(**experts.period(is_full)),
            **experts.written_parts(config),
        }
        rotary = self._write_rotary(config, width)
        self._check_scaling(config, rotary, width)
        written = {
            **write_sizes(config),
            **heads,
            **rotary,
            **self._write_masks(config),
            # transformers takes a key without a default that is null for one that is set
            **{
                key: values[0]
                for key, values in self.description.fixed.items()
                if values[0] is not None or key in (*self.description.defaults, *rotary)
            },
            **{
                key: config.vocab_size if other == "vocab_size" else config.emb_dim
                for key, other in self.description.same.items()
                if other in ("vocab_size", "hidden_size")
            },
        }
        for field, key in (("head_dim", "head_dim"), ("num_kv_heads", "num_key_value_heads")):
            if f"attention.{field}" not in self.description.fields and latent.LATENT_DIM not in self.description.fields:
                written.pop(key, None)
        filled = {part for part, values in parts.items() if values is not None}
        for field, source in self.description.fields.items():
            part, _, name = field.partition(".")
            value = getattr(parts.get(part), name, None)
            if source.times and value is not None:
                written[source.key] = value // max(1, written.get(source.times, 1))
            elif (source.less or source.plus) and value is not None:
                offset = config.position_offset if source.less else 0
                written[source.key] = value + offset if source.less else value - source.plus
            elif source.key and part == "position":
                written[source.key] = _written(name, getattr(position, name, value), source)
            elif name in ACTIVATED and source.key and value is not None:
                written[source.key] = self._activation_name(source.key, value)
            elif source.per and value is not None:
                number = source.product(value, written[source.per] ** source.per_power)
                written[source.key] = self._whole(source.key, number)
            elif source.key not in ("", "hidden_size") and (value is not None or (name in OPTIONAL and part in filled)):
                written[source.key] = self._whole(source.key, _written(name, value, source))
        if isinstance(attention, GroupedQueryAttentionConfig) and "window" in self.description.parts:
            written |= self._write_widths(attention)
        if "layers.shared" in self.description.fields:
            written |= self._write_by_layer(config)
        scales, fields = [getattr(one.attention, "scale", None) for one in config.blocks], self.description.fields
        computed: dict[str, Callable[[], object]] = {
            "layers.switch": lambda: write_windows(config).get("sliding_window") is not None,
            "qk_norm.switch": lambda: qk_norm is not None,
            "temperature.switch": lambda: temperature is not None,
            "attention.scaled": lambda: width == 1 or scales[0] != 1.0,
            "attention.scaled_by_layer": lambda: len(set(scales)) > 1,
            "attention.key_scale": lambda: _key_scale(getattr(attention, "scale", None), width),
            "model.scale_switch": lambda: config.embedding_scale != 1.0,
            "feed_forward.is_adjusted": lambda: False,
            DENSE_INTERVAL: lambda: self._write_dense_interval(config),
            "sparse.count": lambda: getattr(parts.get("experts"), "num_experts", fields["sparse.above"].value),
            "position.method": lambda: None if position is None else fields["position.only"].value,
        }
        written |= {fields[field].key: value() for field, value in computed.items() if field in fields}
        if "block.mixer_stream" in self.description.fields:
            written |= self._write_streams(config)
        written |= dict.fromkeys(self.description.numbered, 0)
        lacks_positions = "position.may_lack" in self.description.fields and attention is not None and position is None
        if lacks_positions and POSITIONS not in written:
            written["rope_theta"] = None
        if mixers.PART in self.description.parts:
            written |= mixers.write(config, *self.description.mixer[:2])
        inner = {key: value for key, value in written.items() if key.startswith(ROTARY)}
        scaling = {**(written.get("rope_scaling") or {"rope_type": "default"})}
        scaling |= {key.removeprefix(ROTARY): value for key, value in inner.items()}
        written |= {"rope_scaling": scaling} if inner else {}
        names = {**self.description.keys, **self.description.written}
        kind = self.description.model_type
        alone = {"is_decoder": True, "is_encoder_decoder": False} if kind in multimodal.DECODERS else {}
        keys = {"model_type": kind, **alone, **written}
        return nested({names.get(key, key): value for key, value in keys.items() if key not in inner})

    def _write_widths(self, attention: GroupedQueryAttentionConfig) -> dict[str, object]:
        """Return the keys of key/value heads without a window, and of the width of the values (MiMo-V2-Flash)."""
        fields = self.description.fields
        times = 1 if attention.mask.reach is None else fields["window.kv_heads"].value
        heads = (attention.num_kv_heads or attention.num_heads) // int(str(times))
        return {"num_key_value_heads": heads, fields["attention.value_dim"].key: attention.value_width}

    def _write_by_layer(self, config: DecoderConfig) -> dict[str, object]:
        """Return the keys of what differs from layer to layer in Gemma 3n and 4: heads, and feed-forward layers."""
        written: dict[str, object] = {}
        fields, wide = self.description.fields, [block.dense or block.feed_forward for block in config.blocks]
        attentions = [one.attention for one in config.blocks if isinstance(one.attention, GroupedQueryAttentionConfig)]
        if len(attentions) < len(config.blocks) or not all(isinstance(one, FeedForwardConfig) for one in wide):
            raise ValueError("blocks need GroupedQueryAttention and feed-forward layers without experts alone there")
        widths = [getattr(one, "hidden_dim", 0) for one in wide]
        if "attention.heads_by_kind" in fields:
            written |= runs.write_heads(attentions)
            written[fields["attention.key_is_value"].key] = any(one.key_is_value for one in attentions)
        if "feed_forward.doubles" in fields:
            written[fields["feed_forward.doubles"].key] = widths[-1] != widths[0]
        if "feed_forward.sparsity" in fields:
            written[fields["feed_forward.hidden_dim"].key] = widths
            written[fields["feed_forward.sparsity"].key] = [getattr(one, "sparsity", 0.0) for one in wide]
        return written

    def _write_streams(self, config: DecoderConfig) -> dict[str, object]:
        """Return the keys of the factors of both sublayers' inputs and outputs."""
        written: dict[str, object] = {}
        for part, block in ((f"{'mixer_' * isinstance(one.attention, Recurrent)}block", one) for one in config.blocks):
            fields = self.description.fields
            written[fields[f"{part}.mixer_stream"].key] = block.stream_scales[0]
            written[fields[f"{part}.mixer_scale"].key] = block.residual_scale
            written[fields["block.stream"].key] = block.stream_scales[1]
        return written

    def _write_dense_interval(self, config: DecoderConfig) -> int:
        """Return 1 if a layer without experts has positions and no window, else 2: `layer_types` has the kinds."""
        forced = (
            isinstance(block.attention, GroupedQueryAttentionConfig)
            and isinstance(block.feed_forward, FeedForwardConfig)
            and block.attention.position is not None
            and window_of(block.attention.mask) is None
            for block in config.blocks
        )
        return 1 if any(forced) else 2

    def _kinds(self, config: DecoderConfig) -> list[str]:
        """Return the kind of each block."""
        windows, names = write_windows(config)["layer_types"], self.description.kinds
        if mixers.PART not in self.description.parts:
            return list(windows)
        kinds = [(block.attention, kind) for block, kind in zip(config.blocks, windows, strict=True)]
        return [
            ALONE if one is None else names[1] if isinstance(one, Recurrent) else kind if kind in names else names[0]
            for one, kind in kinds
        ]

    def _write_masks(self, config: DecoderConfig) -> dict[str, object]:
        """Return the keys of the kinds of layers, and of their window."""
        rule = self.description.fields["layers.rule"].value
        if rule in ("full", "mixer", "listed", "period", BOTH):
            return {}
        if rule == CHUNKED:
            sizes = [getattr(block.attention, "mask", causal()).reach for block in config.blocks]
            size = next((size for size in sizes if size is not None), None)
            listed = [self.description.kinds[size is not None] for size in sizes]
            return {"layer_types": listed, **({} if size is None else {"attention_chunk_size": size})}
        if mixers.PART in self.description.parts:
            listed = self._kinds(config)
            if "layers.needs_both" in self.description.fields and len({*listed}) < 2:
                raise ValueError("blocks of one kind alone are no model there")
            has_window = "layers.window" in self.description.fields or KINDS[True] in self.description.kinds
            window = write_windows(config).get("sliding_window") if has_window else None
            return {"layer_types": listed, **({"sliding_window": window} if window else {})}
        masks = write_windows(config)
        if rule in ("types", "types or window", UNROTATED):
            return masks
        if rule == LATE:  # older versions of transformers know windows by their first layer alone
            listed = masks["layer_types"]
            late = listed.index(KINDS[True]) if KINDS[True] in listed else len(listed)
            return {**masks, FIRST_WITH_WINDOW: late}
        kinds = {runs.KEY: runs.write_runs(masks.pop("layer_types"))} if rule == "runs" else {}
        # A class without windows has no key; one with runs has no null.
        width = (
            {"sliding_window": masks.get("sliding_window")} if rule in _OF_WIDTH or masks.get("sliding_window") else {}
        )
        return {**kinds, **width} if rule in ("runs", *_OF_WIDTH) else {}

    def _whole(self, key: str, value: object) -> object:
        """Return a number as the type of its default, which is the only one that `transformers` takes."""
        usual = type(self.description.defaults.get(key))
        if usual is float and type(value) is int:
            return float(value)
        if usual is not int or not isinstance(value, float):
            return value
        # Whole numbers of up to 2**53 are exact in float64.
        return max(1, round(min(value, 2.0**53)))

    def _activation_name(self, key: str, activation: Activation) -> str:
        """Return the name that a file of the family has for an activation."""
        own = self.description.renamed.get(key, {})
        names = (theirs for theirs, usual in own.items() if ACTIVATIONS.get(usual) == activation)
        return next(names, NAMES[activation])

    def _write_attention(self, config: DecoderConfig) -> tuple[Attention | None, dict[str, object], int]:
        """Return the attention, the keys of its heads, and the width that rotary positions may turn a part of."""
        if all(block.attention is None or isinstance(block.attention, Recurrent) for block in config.blocks):
            return None, {}, 0
        if latent.LATENT_DIM in self.description.fields:
            of_latent = attention_of(config, MultiHeadLatentAttentionConfig)
            return of_latent, write_heads(of_latent), of_latent.rope_dim
        attention: GroupedQueryAttentionConfig | DifferentialAttentionConfig
        if "differential" in self.description.parts:
            attention = attention_of(config, DifferentialAttentionConfig)
        else:
            attention = attention_of(config, GroupedQueryAttentionConfig)
        return attention, write_heads(attention), attention.head_dim or 0

    def _write_rotary(self, config: DecoderConfig, width: int) -> dict[str, object]:
        if self.description.fields.keys() & {"position.dim", "position.fixed"}:
            return {}  # a width alone, or nothing: the class reads neither a base nor a scaling
        positions = [getattr(block.attention, "position", None) for block in config.blocks]
        first = next((position for position in positions if position is not None), None)
        source = self.description.fields.get("position.partial")
        partial = width if source is not None and source.value else None
        if self.description.fields.keys() & {"position.nested", "position.by_kind"}:
            by_kind = rotary_by_kind(config, self._kinds(config))
            if "position.nested" in self.description.fields:
                return write_nested(by_kind, partial)
            local_key = self.description.fields.get("position.local_key")
            theta = self.description.fields["position.theta"].value
            return write_rotary_by_kind(by_kind, theta, str(local_key.value) if local_key else "")
        keys = write_rotary(first, partial)
        context = getattr(getattr(first, "scaling", None), "original_context", None)
        if context is not None and _CONTEXT in self.description.defaults:
            keys[_CONTEXT] = context
        if "rope_scaling" in self.description.fixed and keys:  # the class reads the newer key alone
            scaling = keys.pop("rope_scaling") or {"rope_type": "default"}
            return {POSITIONS: {"rope_theta": keys.pop("rope_theta"), **scaling}, **keys}
        if POSITIONS in self.description.defaults and not keys.get("rope_scaling"):  # the default may scale them
            return {POSITIONS: {"rope_type": "default", "rope_theta": keys.get("rope_theta")}}
        return keys

    def _check_scaling(self, config: DecoderConfig, rotary: Mapping[str, object], width: int) -> None:
        """Refuse scaled positions that the class has no name for, or only for heads that share the model's width."""
        scaling, allowed = rotary.get("rope_scaling"), self.description.scalings
        if not allowed or not isinstance(scaling, Mapping):
            return
        heads = attention_of(config, GroupedQueryAttentionConfig).num_heads
        if scaling["rope_type"] not in allowed or width != config.emb_dim // heads:
            raise ValueError(f"scaling ({scaling['rope_type']}, heads of {width}) can't be said there")


def _first(config: DecoderConfig, name: str) -> object:
    """Return a part of the first attention that has it; None where none has."""
    parts = (getattr(block.attention, name, None) for block in config.blocks)
    return next((part for part in parts if part is not None), None)


def _key_scale(scale: float | None, width: int) -> float:
    """Return the factor of the keys that the scale of the scores comes from; 1 without attention."""
    return 1.0 if scale is None else inverse(lambda factor: factor * width**-0.5, scale, scale * width**0.5)


def _written(name: str, value: Any, source: KeySource) -> object:
    if isinstance(value, tuple):
        return list(value)
    usual = {"pairing": "interleaved", "norms": "sandwich"}.get(name)
    return source.root(value) if usual is None else value == usual
