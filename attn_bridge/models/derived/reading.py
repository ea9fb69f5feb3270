"""The family and the layout of a description: a config.json to our configs and back, and the table of its tensors."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ... import whole_files
from ...masks import Mask, causal, chunked
from ...specs.blocks.alternating_updates import AlternatingUpdatesConfig
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.layer_embeddings import LayerEmbeddingsConfig, LayerInputConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig, Recurrent
from ...specs.differential_attention import DifferentialAttentionConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm, Temperature
from ...specs.multi_head_latent_attention import MultiHeadLatentAttentionConfig
from ...specs.position import Alibi
from ...specs.rms_norm import RMSNormConfig
from ...specs.sparse_indexed_attention import SparseIndexedAttentionConfig
from ..attention_layer import AttentionLayer
from ..layout import Layout
from ..reading.decoders import KINDS, Attention, WrittenKeys, is_rotated, mask_of
from ..reading.model_config import ConfigFile
from ..tables import table
from ..tables.layers import attention_of_layer, table_of_layer
from . import experts, latent, mixers, runs
from .description import ALONE, dumps
from .fields import FieldReader, Options
from .writing import (
    BOTH,
    CHUNKED,
    DENSE_INTERVAL,
    FIRST_WITH_WINDOW,
    FROM_WINDOW,
    LATE,
    UNROTATED,
    FamilyWriter,
)

LIBRARIES = {"meta": "meta-llama", "openai": "openai-gpt-oss"}
"""Name of a library in a description -> the layout of its files."""


class DerivedFamily(FieldReader):
    """A family of decoders."""

    whole = DecoderConfig
    layout: Layout

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the family to a TOML file, which ``from_pretrained(folder, family=path)`` reads.

        Raises:
            ValueError: the file can't be written.
        """
        whole_files.write(whole_files.checked(Path(path)), dumps(self.description))

    # ---- a config.json to ours

    def attention(self, config: ConfigFile, layer: int) -> AttentionLayer:
        """Return the attention of a layer."""
        self._refuse(config)
        kind = self.kind(config, layer)
        if mixers.PART in self.description.parts and kind == self.description.kinds[True]:
            return attention_of_layer(self.layout, config, layer, self._recurrent(config, layer))
        if kind == ALONE:
            raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which has no attention")
        if latent.LATENT_DIM in self.description.fields:
            return self._latent(config, layer, kind)
        is_llama4, turns = self._rule == CHUNKED, self._turns(config, layer)
        # Llama 4 normalises where it rotates, and tempers elsewhere.
        has_norm = (turns or not is_llama4) and self._is_on(config, "qk_norm")
        has_temperature = not (turns and is_llama4) and self._is_on(config, "temperature")
        qk_norm = self.part(config, "qk_norm") if has_norm else {}
        temperature = self.part(config, "temperature") if has_temperature else {}
        width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        share = width // heads
        fields, options = self.description.fields, self.part(config, "attention")
        scaled, by_layer = options.pop("scaled", True), options.pop("scaled_by_layer", False)
        key_scale = options.pop("key_scale", 1.0)
        if options.pop("shares_width", False):  # transformers makes positions of that width, and heads of this one
            config.refuse("head_dim", None, share)
        if not options.get("gate", True):
            options.pop("gate_scope", None)
        if options.pop("heads_by_kind", False):
            options |= runs.read_heads(config, self._kinds(config), layer)
        if self._lender(config, layer) is not None:
            options |= {"shared": True, "value_norm": None, "key_is_value": False}
        elif options.get("key_is_value"):
            options["key_is_value"] = kind == KINDS[False]
        if options.pop("last_out_bias", False):
            options["out_bias"] = layer == config.integer("num_hidden_layers") - 1
        if "window" in self.description.parts and kind == KINDS[True]:  # MiMo-V2-Flash has twice the heads there
            window = self.part(config, "window")
            options |= {"num_kv_heads": config.integer("num_key_value_heads") * window["kv_heads"]}
            options |= {"sinks": window["sinks"]}
        if "layers.heads" in fields:
            heads = runs.read_number(config, fields["layers.heads"].key, layer, heads)
        head_dim = options.get("head_dim") or share
        if not scaled or by_layer or key_scale != 1.0:
            options["scale"] = key_scale * (head_dim**-0.5 if scaled else 1.0) / (layer + 1 if by_layer else 1)
        position = self._position(config, self._turned_as(config, layer, kind), head_dim) if turns else None
        if "differential" in self.description.parts:
            start = DifferentialAttentionConfig.lambda_of_layer(layer)
            options |= {**self.part(config, "differential"), "lambda_init": start, "position": position}
            return self._layer(config, layer, DifferentialAttentionConfig(width, heads, **options))
        spec = GroupedQueryAttentionConfig(
            width,
            heads,
            **{"dropout": config.number_or_none("attention_dropout") or 0.0, **options},
            position=position,
            qk_norm=QKNorm(**qk_norm) if qk_norm else None,
            temperature=Temperature(**temperature) if temperature else None,
            mask=self._mask(config, layer, kind),
        )
        return self._layer(config, layer, spec)

    def _mask(self, config: ConfigFile, layer: int, kind: str) -> Mask:
        """Return the mask of a layer: of its kind, or by the width of the window where kinds are about recurrence."""
        if self._rule == CHUNKED:
            size = config.integer("attention_chunk_size")  # which transformers needs even if no layer has chunks
            return chunked(size) if kind == self.description.kinds[True] else causal()
        if "layers.window" not in self.description.fields:
            return mask_of(config, layer, kind)
        return mask_of(config, layer, KINDS[config.integer_or_none("sliding_window") is not None])

    @property
    def _rule(self) -> str:
        return str(self.description.fields["layers.rule"].value)

    def _recurrent(self, config: ConfigFile, layer: int) -> Recurrent:
        self._refuse_others(config, self.description.fixed_mixer)
        return mixers.read(config, layer, *self.description.mixer)

    def _layer(self, config: ConfigFile, layer: int, spec: Attention) -> AttentionLayer:
        """Return a layer, whose sizes are those of its attention: what files call them differs between families."""
        numbers = {"num_heads": spec.num_heads}
        if isinstance(spec, MultiHeadLatentAttentionConfig):
            numbers |= {"kv_lora_rank": spec.latent_dim, "qk_nope_head_dim": spec.nope_dim}
            return attention_of_layer(self.layout, config, layer, spec, numbers=numbers)
        numbers["num_kv_heads"] = spec.num_kv_heads or spec.num_heads
        others = [name for name in self.description.libraries if name != "meta" or not (spec.qkv_bias or spec.out_bias)]
        sizes = {**numbers, "head_dim": spec.head_dim or 0}
        libraries = {name: table_of_layer(table(LIBRARIES[name]), spec, sizes) for name in others}
        return attention_of_layer(self.layout, config, layer, spec, numbers=numbers, libraries=libraries)

    def _latent(self, config: ConfigFile, layer: int, kind: str) -> AttentionLayer:
        values = self.part(config, "attention")
        position = self._position(config, kind, values["rope_dim"])
        if isinstance(position, Alibi):
            raise ValueError(f"ALiBi of {config.model_type} does not fit keys that are made of a latent")
        spec = latent.read_latent(config, values, position, mask_of(config, layer, kind))
        indexer = self.part(config, "indexer")
        if indexer:
            spec = SparseIndexedAttentionConfig.of(spec, latent.read_indexer(config, indexer))
        return self._layer(config, layer, spec)

    def model(self, config: ConfigFile, names: Collection[str] = ()) -> DecoderConfig:
        """Return a whole decoder."""
        layers = config.depth("num_hidden_layers")
        return DecoderConfig(
            vocab_size=config.integer("vocab_size"),
            emb_dim=config.integer("hidden_size"),
            blocks=tuple(self._block(config, layer) for layer in range(layers)),
            **self._model(config),
        )

    def _block(self, config: ConfigFile, layer: int) -> DecoderBlockConfig:
        has_attention = not self.description.is_mixed or self.kind(config, layer) != ALONE
        attention: Any = self.attention(config, layer).config if has_attention else None
        is_alone = attention is not None and self.description.is_mixed
        layers = None if is_alone else self._feed_forward(config, layer)
        options = {**self.part(config, "block"), **self._additions(config, layer, layers)}
        if isinstance(attention, Recurrent):
            options |= self.part(config, "mixer_block")
        if self._rule == BOTH:
            options["recurrent"] = self._recurrent(config, layer)
            options["mixer_scales"] = (options.pop("attention_scale"), options.pop("recurrent_scale"))
        options |= {} if layer else self.part(config, "first_block")
        if "mixer_scale" in options and options.pop("mixer_scale") != options["residual_scale"]:
            keys = (self.description.fields[f"{part}.mixer_scale"].key for part in ("block", "mixer_block"))
            raise ValueError(f"{' and '.join(keys)} of {config.model_type} must be the scale of the other outputs")
        if "mixer_stream" in options:
            options["stream_scales"] = (options.pop("mixer_stream"), options.pop("stream"))
        if isinstance(layers, MixtureOfExpertsConfig) and self.part(config, "experts").get("last_norm"):
            options["norms"] = "pre_and_last"
        return DecoderBlockConfig(attention, layers, self._norm(config), **options)

    def _additions(self, config: ConfigFile, layer: int, layers: object) -> Options:
        """Return what blocks of Gemma 3n and 4 have in addition."""
        parts, width = self.description.parts, config.integer("hidden_size")
        options: Options = {"keys_of": self._lender(config, layer)}
        if "updates" in parts:
            options["updates"] = AlternatingUpdatesConfig(width, **self.part(config, "updates"))
        embeddings = self._layer_embeddings(config)
        if embeddings is not None:
            activation = self.value(config, "feed_forward.activation")
            options["layer_input"] = LayerInputConfig(embeddings.dim, activation)
        if isinstance(layers, MixtureOfExpertsConfig) and "experts.beside" in self.description.fields:
            options["dense"] = FeedForwardConfig(width, **self._widths(config, layer))
        return options

    def _layer_embeddings(self, config: ConfigFile) -> LayerEmbeddingsConfig | None:
        """Return the per-layer embeddings; None of a model without.

        Raises:
            ValueError: tokens without a row, in a family whose models need them all; shared keys without embeddings.
        """
        values = self.part(config, "layer_embeddings")
        if not values:
            return None
        width, rows = (self.description.fields[f"layer_embeddings.{name}"].key for name in ("width", "rows"))
        if not config.integer(width, 0 if "may_lack" in values else 1):
            shared = self.description.fields.get("layers.shared")
            if shared is not None and config.integer(shared.key, 0):
                raise ValueError(
                    f"{shared.key} ({config.get(shared.key)}) of {config.model_type} must be 0 where {width} is: "
                    "transformers fails at shared keys without per-layer embeddings"
                )
            return None
        vocab = config.integer("vocab_size")
        if "covers" in values and values["rows"] < vocab:
            raise ValueError(
                f"{rows} ({values['rows']}) of {config.model_type} must be at least vocab_size ({vocab}): "
                "transformers fails at other tokens"
            )
        sizes = (values["rows"], config.integer("hidden_size"), values["width"], config.integer("num_hidden_layers"))
        return LayerEmbeddingsConfig(*sizes, values["eps"])

    def _lender(self, config: ConfigFile, layer: int) -> int | None:
        """Return the earlier layer whose keys and values a layer reads; None for a layer that projects them."""
        source = self.description.fields.get("layers.shared")
        return None if source is None else runs.read_lender(config, source.key, self._kinds(config), layer)

    def _kinds(self, config: ConfigFile) -> list[str]:
        """Return the kind of every layer.

        Raises:
            ValueError: ``layer_types`` has more or fewer entries than there are layers.
        """
        layers, types = config.integer("num_hidden_layers"), config.get("layer_types")
        if isinstance(types, Sequence) and len(types) != layers:
            raise ValueError(f"layer_types of {config.model_type} has {len(types)} entries for {layers} layers")
        return [self.kind(config, layer) for layer in range(layers)]

    def _feed_forward(self, config: ConfigFile, layer: int) -> FeedForwardConfig | MixtureOfExpertsConfig | None:
        """Return the feed-forward layers of a block, or its experts; None in a family without."""
        if "feed_forward" not in self.description.parts:
            return None
        width, options = config.integer("hidden_size"), self._widths(config, layer)
        if not self._may_have_experts or not self._is_sparse(config, layer):
            return FeedForwardConfig(width, **options)
        values = self.part(config, "experts")
        router, groups = self.part(config, "router"), self._groups(config)
        norm = RMSNormConfig(width, self._norm(config).eps) if values.get("normed") else None
        return experts.read_experts(width, options["activation"], values, router, groups, norm)

    def _widths(self, config: ConfigFile, layer: int) -> Options:
        """Return the arguments of the feed-forward layers of a block."""
        sparsity = self.description.fields.get("feed_forward.sparsity")
        source = self.description.fields.get("feed_forward.hidden_dim")
        if sparsity is not None and source is not None and isinstance(config.get(source.key), Sequence):
            width = runs.read_of_layer(config, source.key, layer)
            config = config.with_given({**config.given, source.key: width})
        options = self.part(config, "feed_forward")
        if sparsity is not None:
            options["sparsity"] = runs.read_sparsity(config, sparsity.key, layer)
        if options.pop("is_adjusted", False):
            options["hidden_dim"] = runs.adjusted_width(config, options["hidden_dim"])
        if options.pop("doubles", False) and self._lender(config, layer) is not None:
            options["hidden_dim"] *= 2
        return options

    @property
    def _may_have_experts(self) -> bool:
        return "experts.num_experts" in self.description.fields

    def _is_sparse(self, config: ConfigFile, layer: int) -> bool:
        """Return whether a block has experts."""
        values = self.part(config, "sparse")
        if not self._is_on(config, "sparse"):
            return False
        if "interval" in values:
            values["recurs"] = self._recurs(config, layer, "sparse")
        return experts.is_sparse(config, layer, values)

    def _recurs(self, config: ConfigFile, layer: int, part: str) -> bool:
        """Return whether a layer is the one of its interval that has a part of the model (Jamba).

        Raises:
            ValueError: the offset is not within the interval.
        """
        (interval, period), (offset, first) = (
            (self.description.fields[f"{part}.{name}"].key, self.value(config, f"{part}.{name}"))
            for name in ("interval", "offset")
        )
        if first >= period:
            raise ValueError(f"{offset} ({first}) must be less than {interval} ({period})")
        return bool(layer % period == first)

    def _groups(self, config: ConfigFile) -> Options:
        """Return the arguments of `ExpertGroups`; none where a key switches groups off."""
        method = self.description.fields.get("groups.method")
        if method is not None:
            config.refuse(method.key, *experts.METHODS)
            if config.get(method.key) == experts.METHODS[False]:
                return {}
        values = self.part(config, "groups")
        if values.pop("several", False) and values["number"] == 1:
            return {}
        return {name: value for name, value in values.items() if name != "method"}

    def _model(self, config: ConfigFile) -> Options:
        """Return the arguments of a model other than blocks, vocabulary and width."""
        self._refuse(config)  # again: no layer may have attention
        if (
            self._may_have_experts
            and "experts.may_be_dense" not in self.description.fields
            and not any(self._is_sparse(config, layer) for layer in range(config.integer("num_hidden_layers")))
        ):
            # Its tensors would be those of another family, whose layout claims them.
            raise ValueError(f"no layer of {config.model_type} has experts, which needs at least one")
        options = {"norm": True, **self.part(config, "model")}
        if not options.pop("scale_switch", True):
            options.pop("embedding_scale", None)
        for name in ("norm", "embedding_norm", "head_norm"):
            if name in options:
                width = options.get({"embedding_norm": "embedding_width", "head_norm": "head_width"}.get(name, ""))
                options[name] = self._norm(config, f"last_{name}", width) if options[name] else None
        return {**options, "layer_embeddings": self._layer_embeddings(config)}

    def kind(self, config: ConfigFile, layer: int) -> str:
        """Return the kind of a layer: with a window, or without.

        The field ``layers.rule`` selects the source: "window", the width; "window or types" and "types or window",
        ``layer_types``, or else the width; "types or late window", likewise, from the layer ``max_window_layers`` on;
        "types or unrotated window", likewise, in layers without rotary positions; "types", ``layer_types``, or else the
        pattern; with the field ``layers.interval``, or else the last layer of each interval has no window; layers in
        front of all experts may have another interval. "both" has attention and a recurrent layer in each.
        """
        rule, kinds = self._rule, self.description.kinds
        if "layers.ends_full" in self.description.fields and layer == config.integer("num_hidden_layers") - 1:
            return KINDS[False]
        is_off = "layers.switch" in self.description.fields and not self.value(config, "layers.switch")
        if is_off and rule == "window":
            return KINDS[False]
        if rule == "window":
            return KINDS[config.integer_or_none("sliding_window") is not None]
        if rule in FROM_WINDOW:
            return config.layer_type(layer, KINDS[config.integer_or_none("sliding_window") is not None])
        if rule in ("full", "mixer", BOTH):
            return kinds[rule == "mixer"]
        if rule == "listed":
            return kinds[layer not in (self.value(config, "layers.listed") or ())]
        if rule == "period":
            return kinds[not self._recurs(config, layer, "period")]
        if rule == "runs":
            return runs.read_kind(config, layer)
        if config.get("layer_types") is None:
            for key, accepted in self.description.fixed_pattern.items():
                config.refuse(key, *accepted)
        if rule == LATE:
            slides = not is_off and config.get("sliding_window") is not None
            usual = KINDS[slides and layer >= config.integer(FIRST_WITH_WINDOW, 0)]
        elif rule == CHUNKED:
            usual = kinds[self._turns(config, layer)]
        elif rule == UNROTATED:
            usual = KINDS[not is_off and config.get("sliding_window") is not None and not self._turns(config, layer)]
        elif "layers.interval" in self.description.fields:
            begins = "layers.begins" in self.description.fields
            number, interval = layer, self.value(config, "layers.interval")
            if DENSE_INTERVAL in self.description.fields:
                dense = max(0, self.value(config, "sparse.first"))
                number -= dense
                if number < 0:
                    number, interval = layer, self.value(config, DENSE_INTERVAL)
            usual = kinds[bool((number + (not begins)) % interval)]
        elif "layers.published" in self.description.fields:
            usual = runs.read_published_kind(config, layer)
        elif "layers.listed" in self.description.fields:
            listed = self.value(config, "layers.listed")
            usual = kinds[listed is not None and layer not in listed]
        else:
            layers = config.integer("num_hidden_layers")
            usual = self.description.kind_of(layer, layers)
            if "layers.is_shallow" in self.description.fields and layer == layers - 1 < len(self.description.pattern):
                usual = self.description.pattern[-1]
        kind = config.layer_type(layer, usual)
        if is_off and kind != KINDS[False] and rule != UNROTATED:  # which the masks of SmolLM3 ignore
            raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, but windows are switched off")
        if "layers.kinds" in self.description.fields:
            kind = self.description.renamed.get("layer_types", {}).get(kind, kind)
            if kind not in kinds:
                only = " or ".join(kinds)
                raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {only}")
        return kind

    def _turns(self, config: ConfigFile, layer: int) -> bool:
        """Return whether a layer has rotary positions, in families that switch them by layer."""
        return "layers.rotated" not in self.description.fields or is_rotated(config, layer)

    def _turned_as(self, config: ConfigFile, layer: int, kind: str) -> str:
        """Return the kind whose positions a layer has: Cohere's dense layers may have those of a window without it."""
        is_forced = DENSE_INTERVAL in self.description.fields and self.value(config, DENSE_INTERVAL) == 1
        return KINDS[True] if is_forced and not self._is_sparse(config, layer) else kind

    # ---- ours to a config.json

    def write(self, config: DecoderConfig) -> WrittenKeys:
        """Return the keys of a config, as `FamilyWriter` writes them."""
        return FamilyWriter(self.description).write(config)
