"""The family and the layout of a description: a config.json to our configs and back, and the table of its tensors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import whole_files
from ...masks import Mask, causal, chunked
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig, Recurrent
from ...specs.differential_attention import DifferentialAttentionConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm, Temperature
from ...specs.layer_norm import LayerNormConfig
from ...specs.multi_head_latent_attention import MultiHeadLatentAttentionConfig
from ...specs.position import Alibi, Rotary
from ...specs.rms_norm import RMSNormConfig
from ...specs.sparse_indexed_attention import SparseIndexedAttentionConfig
from ..family import AttentionLayer, Family
from ..layout import Layout
from ..reading import multimodal
from ..reading.decoders import KINDS, activation_of, is_rotated, mask_of
from ..reading.model_config import ConfigFile
from ..reading.rotary import (
    has_null_base,
    read_nested_rotary,
    read_proportional_rotary,
    read_rotary,
    read_rotary_by_kind,
)
from ..rows.attention import OPENAI, Table, interleaved_rotary
from ..tables.layers import attention_of_layer
from . import experts, latent, mixers, runs
from .description import ALONE, Description, dumps
from .writing import (
    ACTIVATED,
    CHUNKED,
    FIRST_WITH_WINDOW,
    FROM_WINDOW,
    LATE,
    OPTIONAL,
    POSITIONS,
    ROTARY,
    SCALING,
    UNROTATED,
    Attention,
    FamilyWriter,
)


@dataclasses.dataclass(frozen=True)
class DerivedFamily(Family):
    """A family that is data.

    Attributes:
        description: the data.
    """

    description: Description = dataclasses.field(kw_only=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the family to a TOML file, which ``from_pretrained(folder, family=path)`` reads.

        Raises:
            ValueError: the file can't be written.
        """
        whole_files.write(whole_files.checked(Path(path)), dumps(self.description))


class FamilyReader:
    """Reads the configs of a described family, and writes them.

    Args:
        description: the family.
        layout: the table of its tensors.
    """

    def __init__(self, description: Description, layout: Layout):
        self.description, self.layout = description, layout

    def family(self) -> DerivedFamily:
        """Return the family, as the tables of families hold it."""
        description = self.description
        return DerivedFamily(
            (multimodal.decoder_type(description.model_type), *description.further_types),
            self.attention,
            description.defaults,
            aliases=description.aliases,
            keys=description.keys,
            block=self.block,
            model=self.model,
            write=self.write,
            architecture=description.architecture,
            attends=self.attends if description.is_mixed else None,
            prepare=runs.PREPARE[description.prepare] if description.prepare else None,
            layout=self.layout,
            description=description,
        )

    # ---- a config.json to ours

    def attention(self, config: ConfigFile, layer: int) -> AttentionLayer:
        """Return the attention of a layer."""
        self._refuse(config)
        kind = self.kind(config, layer)
        if mixers.PART in self.description.parts and kind == self.description.kinds[True]:
            return self._mixer(config, layer)
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
        fields, options = self.description.fields, self.part(config, "attention")
        scaled, by_layer = options.pop("scaled", True), options.pop("scaled_by_layer", False)
        if options.pop("shares_width", False):  # transformers makes positions of that width, and heads of this one
            config.refuse("head_dim", None, width // heads)
        if not options.get("gate", True):
            options.pop("gate_scope", None)
        if options.pop("last_out_bias", False):
            options["out_bias"] = layer == config.integer("num_hidden_layers") - 1
        if "window" in self.description.parts and kind == KINDS[True]:  # MiMo-V2-Flash has twice the heads there
            window = self.part(config, "window")
            options |= {"num_kv_heads": config.integer("num_key_value_heads") * window["kv_heads"]}
            options |= {"sinks": window["sinks"]}
        if "layers.heads" in fields:
            heads = runs.read_number(config, fields["layers.heads"].key, layer, heads)
        head_dim = options.get("head_dim") or _shared_width(config)
        if not scaled or by_layer:
            options["scale"] = (head_dim**-0.5 if scaled else 1.0) / (layer + 1 if by_layer else 1)
        position = self._position(config, kind, head_dim) if turns else None
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

    def _is_on(self, config: ConfigFile, part: str) -> bool:
        """Return whether a key, if the family has one, leaves a part switched on."""
        switch = f"{part}.switch"
        return switch not in self.description.fields or bool(self.value(config, switch))

    @property
    def _rule(self) -> str:
        return str(self.description.fields["layers.rule"].value)

    def _mixer(self, config: ConfigFile, layer: int) -> AttentionLayer:
        """Return a recurrent layer."""
        for key, accepted in self.description.fixed_mixer.items():
            config.refuse(key, *accepted)
        spec = mixers.read(config, layer, *self.description.mixer)
        return attention_of_layer(self.layout, config, layer, spec)

    def attends(self, config: ConfigFile, layer: int) -> bool:
        """Return whether a layer has attention or is recurrent; other layers of Nemotron-H are feed-forward alone."""
        return self.kind(config, layer) != ALONE

    def _layer(self, config: ConfigFile, layer: int, spec: Attention) -> AttentionLayer:
        """Return a layer, whose sizes are those of its attention: what files call them differs between families."""
        numbers = {"num_heads": spec.num_heads}
        if isinstance(spec, MultiHeadLatentAttentionConfig):
            numbers |= {"kv_lora_rank": spec.latent_dim, "qk_nope_head_dim": spec.nope_dim}
            return attention_of_layer(self.layout, config, layer, spec, numbers=numbers)
        numbers["num_kv_heads"] = spec.num_kv_heads or spec.num_heads
        libraries: dict[str, Table] = {}
        if "meta" in self.description.libraries and not spec.qkv_bias and not spec.out_bias:  # which its files lack
            libraries["meta"] = interleaved_rotary(spec.num_heads, numbers["num_kv_heads"])
        if "openai" in self.description.libraries:
            libraries["openai"] = OPENAI
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

    def block(self, config: ConfigFile, layer: int, attention: Any) -> DecoderBlockConfig:
        """Return a block around the attention."""
        is_alone = attention is not None and self.description.is_mixed
        layers = None if is_alone else self._feed_forward(config, layer)
        options = self.part(config, "block")
        if isinstance(attention, Recurrent):
            options |= self.part(config, "mixer_block")
        options |= {} if layer else self.part(config, "first_block")
        if "mixer_scale" in options and options.pop("mixer_scale") != options["residual_scale"]:
            keys = (self.description.fields[f"{part}.mixer_scale"].key for part in ("block", "mixer_block"))
            raise ValueError(f"{' and '.join(keys)} of {config.model_type} must be the scale of the other outputs")
        if "mixer_stream" in options:
            options["stream_scales"] = (options.pop("mixer_stream"), options.pop("stream"))
        if isinstance(layers, MixtureOfExpertsConfig) and self.part(config, "experts").get("last_norm"):
            options["norms"] = "pre_and_last"
        return DecoderBlockConfig(attention, layers, self._norm(config), **options)

    def _feed_forward(self, config: ConfigFile, layer: int) -> FeedForwardConfig | MixtureOfExpertsConfig | None:
        """Return the feed-forward layers of a block, or its experts; None in a family without."""
        if "feed_forward" not in self.description.parts:
            return None
        width, options = config.integer("hidden_size"), self.part(config, "feed_forward")
        if options.pop("is_adjusted", False):
            options["hidden_dim"] = runs.adjusted_width(config, options["hidden_dim"])
        if not self._may_have_experts or not self._is_sparse(config, layer):
            return FeedForwardConfig(width, **options)
        values = self.part(config, "experts")
        router, groups = self.part(config, "router"), self._groups(config)
        return experts.read_experts(width, options["activation"], values, router, groups)

    @property
    def _may_have_experts(self) -> bool:
        return "experts.num_experts" in self.description.fields

    def _is_sparse(self, config: ConfigFile, layer: int) -> bool:
        """Return whether a block has experts."""
        values = self.part(config, "sparse")
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

    def _groups(self, config: ConfigFile) -> dict[str, Any]:
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

    def model(self, config: ConfigFile) -> dict[str, Any]:
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
        return options

    def kind(self, config: ConfigFile, layer: int) -> str:
        """Return the kind of a layer: with a window, or without.

        The field ``layers.rule`` selects the source: "window", the width; "window or types" and "types or window",
        ``layer_types``, or else the width; "types or late window", likewise, from the layer ``max_window_layers`` on;
        "types or unrotated window", likewise, in layers without rotary positions; "types", ``layer_types``, or else the
        pattern; with the field ``layers.interval``, or else the last layer of each interval has no window.
        """
        rule, kinds = self._rule, self.description.kinds
        is_off = "layers.switch" in self.description.fields and not self.value(config, "layers.switch")
        if is_off and rule == "window":
            return KINDS[False]
        if rule == "window":
            return KINDS[config.integer_or_none("sliding_window") is not None]
        if rule in FROM_WINDOW:
            return config.layer_type(layer, KINDS[config.integer_or_none("sliding_window") is not None])
        if rule in ("full", "mixer"):
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
            usual = kinds[bool((layer + (not begins)) % self.value(config, "layers.interval"))]
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

    def part(self, config: ConfigFile, part: str) -> dict[str, Any]:
        """Return field -> value of a part of our configs, such as ``attention``, without the key that switches it."""
        start = f"{part}."
        return {
            field.removeprefix(start): self.value(config, field)
            for field in self.description.fields
            if field.startswith(start) and field != f"{start}switch"
        }

    def value(self, config: ConfigFile, field: str) -> Any:
        """Return the value of a field."""
        source = self.description.fields[field]
        if not source.key:
            return source.value
        name = field.partition(".")[2]
        if source.key.startswith(ROTARY) and config.mapping("rope_scaling"):  # which goes before, as in read_rotary
            source = dataclasses.replace(source, key=source.key.replace(ROTARY, SCALING))
        renamed = self.description.renamed.get(source.key, {})
        word = config.get(source.key)
        if isinstance(word, str) and word in renamed:
            keys = {**config.given, source.key: renamed[word]}
            config = config.with_given(keys)
        read = _READ.get(name)
        if source.times:
            return config.integer(source.key, 0) * config.integer(source.times, 0)
        if source.widths and (source.key == "hidden_size" or config.get(source.key) is None):
            return config.integer("hidden_size") * source.widths
        if source.share and config.get(source.key) is None:
            return config.integer("hidden_size") // config.integer(source.share)
        if source.less or source.plus:
            return config.integer(source.key, 0) - (config.integer(source.less, 0) if source.less else 0) + source.plus
        if read is not None:
            return read(config, source.key)
        may_lack = name in OPTIONAL and source.power == 1.0
        number = config.number_or_none(source.key) if may_lack else config.positive(source.key)
        if number is None or not source.per:
            return None if number is None else number**source.power
        return number**source.power / config.positive(source.per) ** source.per_power

    def _refuse(self, config: ConfigFile) -> None:
        for key, accepted in self.description.fixed.items():
            without_effect = self.description.unless.get(key, {})
            has_effect = not any(config.get(other) in values for other, values in without_effect.items())
            if has_effect or not isinstance(config.get(key), bool):
                config.refuse(key, *accepted)
        for key, other in self.description.same.items():
            config.refuse(key, None, config.get(other))
        for key in self.description.required:
            if config.get(key) is None:
                raise ValueError(f"{key} (null) of {config.model_type} is not supported, only a value")

    def _norm(self, config: ConfigFile, own: str = "", width: int | None = None) -> RMSNormConfig | LayerNormConfig:
        options = self.part(config, "norm") | self.part(config, own)
        kind = RMSNormConfig if options.pop("kind") == "rms" else LayerNormConfig
        return kind(config.integer("hidden_size") if width is None else width, **options)

    def _position(self, config: ConfigFile, kind: str, width: int) -> Rotary | Alibi | None:
        options = self.part(config, "position")
        if not options or kind not in options.pop("kinds"):
            return None
        if options.pop("method", None) != options.pop("only", None):
            return None
        if options.pop("may_lack", False) and has_null_base(config):
            return None
        if "part" in options:
            config = config.with_given({**config.given, "partial_rotary_factor": options.pop("part")})
        if "alibi" in options:
            return Alibi()
        if "dim" in options:
            return Rotary(options["theta"], options["dim"], options.get("pairing", "half"))
        if options.pop("fixed", False):  # the class reads no key of rotary positions
            return Rotary(options["theta"], width, options.get("pairing", "half"))
        if options.pop("proportional", False):
            return read_proportional_rotary(config, width, kind)
        if options.pop("nested", False):
            return read_nested_rotary(config, width, kind, **options)
        if options.pop("by_kind", False):
            return read_rotary_by_kind(config, width, kind, **options)
        usual = self.description.defaults.get(POSITIONS)
        if usual and config.get(POSITIONS) is None:  # null stands for the default, too
            config = config.with_given({**config.given, POSITIONS: usual})
        return read_rotary(config, width, kind, renamed=self.description.renamed.get("rope_type"), **options)

    def _turns(self, config: ConfigFile, layer: int) -> bool:
        """Return whether a layer has rotary positions, in families that switch them by layer."""
        return "layers.rotated" not in self.description.fields or is_rotated(config, layer)

    # ---- tensors

    def write(self, config: DecoderConfig, model_type: str) -> dict[str, object]:
        """Return the keys of a config, as `FamilyWriter` writes them."""
        return FamilyWriter(self.description).write(config)


_SWITCHES = (
    *("switch", "scale_switch", "scaled", "scaled_by_layer", "is_adjusted"),
    *("correction", "gate", "head_bias", "head_linear_bias"),
)
_FLAGS = (*_SWITCHES, "qkv_bias", "key_bias", "out_bias", "bias", "tie", "normalise", "shared_bias")
_COUNTS = ("shared", "first", "last", "step")
_READ: dict[str, Callable[[ConfigFile, str], object]] = {
    **dict.fromkeys(_FLAGS, ConfigFile.flag),
    **dict.fromkeys(("hidden_dim", "num_experts", "top_k", "number", "chosen", "num_heads"), ConfigFile.integer),
    **dict.fromkeys(("num_positions", "num_token_types", "dim"), ConfigFile.integer),
    **dict.fromkeys(("embedding_width", "head_width"), ConfigFile.integer),
    **dict.fromkeys(_COUNTS, lambda config, key: config.integer(key, -1)),
    **dict.fromkeys(("types", "dense", "method", "listed"), ConfigFile.get),
    "norms": lambda config, key: "sandwich" if config.flag(key) else "pre",
    "rate": ConfigFile.number,
    "value_scale": lambda config, key: 1.0 if config.get(key) is None else config.positive(key),
    "dropout": lambda config, key: config.number_or_none(key) or 0.0,
    "interval": ConfigFile.integer,
    **dict.fromkeys(("offset", "count"), lambda config, key: config.integer(key, 0)),
    "head_dim": ConfigFile.integer_or_none,
    **dict.fromkeys(("num_kv_heads", "query_dim"), ConfigFile.integer_or_none),
    **dict.fromkeys(("latent_dim", "nope_dim", "rope_dim", "value_dim"), ConfigFile.integer),
    "position_offset": lambda config, key: config.integer(key, 0),
    "pairing": lambda config, key: "interleaved" if config.flag(key) else "half",
    **dict.fromkeys(ACTIVATED, lambda config, key: activation_of(config, key)),
}


def _shared_width(config: ConfigFile) -> int:
    """Return the width of a head where the heads share that of the model."""
    return config.integer("hidden_size") // config.integer("num_attention_heads")
