"""Values of the fields of a described family, from a config.json; its norms and positions, which are fields alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...specs.layer_norm import LayerNormConfig
from ...specs.position import Alibi, Rotary
from ...specs.rms_norm import RMSNormConfig
from ..reading.decoders import activation_of
from ..reading.model_config import ConfigFile
from ..reading.rotary import (
    has_null_positions,
    read_nested_rotary,
    read_rotary,
    read_rotary_by_kind,
)
from .family import Family
from .writing import ACTIVATED, OPTIONAL, POSITIONS, ROTARY, SCALING

Options: TypeAlias = dict[str, Any]
"""Arguments of our configs."""


class FieldReader(Family):
    """A family that reads the fields of its description."""

    def part(self, config: ConfigFile, part: str) -> Options:
        """Return field -> value of a part of our configs, such as ``attention``, without the key that switches it."""
        start = f"{part}."
        return {
            field.removeprefix(start): self.value(config, field)
            for field in self.description.fields
            if field.startswith(start) and field != f"{start}switch"
        }

    def _is_on(self, config: ConfigFile, part: str) -> bool:
        """Return whether a key, if the family has one, leaves a part switched on."""
        switch = f"{part}.switch"
        return switch not in self.description.fields or bool(self.value(config, switch))

    def value(self, config: ConfigFile, field: str) -> Any:
        """Return the value of a field."""
        source = self.description.fields[field]
        if not source.key:
            return source.value
        name = field.partition(".")[2]
        if source.key.startswith(ROTARY) and config.mapping("rope_scaling"):  # which goes before, as in read_rotary
            source = dataclasses.replace(source, key=source.key.replace(ROTARY, SCALING))
        if source.otherwise and config.get(source.key) is None:
            source = dataclasses.replace(source, key=source.otherwise)
        if source.or_one and config.get(source.key) is None:
            return 1.0
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

    def _refuse_others(self, config: ConfigFile, fixed: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse other values of keys than those that are proven, unless another key leaves them without effect."""
        for key, accepted in fixed.items():
            without_effect = self.description.unless.get(key, {})
            has_effect = not any((config.get(other) or False) in values for other, values in without_effect.items())
            if has_effect or not isinstance(config.get(key), int | float):
                config.refuse(key, *accepted)

    def _refuse(self, config: ConfigFile) -> None:
        self._refuse_others(config, self.description.fixed)
        for key, other in self.description.same.items():
            config.refuse(key, None, config.get(other))
        for key in self.description.required:
            if config.get(key) is None:
                raise ValueError(f"{key} (null) of {config.model_type} is not supported, only a value")

    def _norm(self, config: ConfigFile, own: str = "", width: int | None = None) -> RMSNormConfig | LayerNormConfig:
        options, width = self.part(config, "norm") | self.part(config, own), width or config.integer("hidden_size")
        rms_eps = options.pop("rms_eps", None)
        if rms_eps is not None:
            return RMSNormConfig(width, rms_eps)
        return (RMSNormConfig if options.pop("kind") == "rms" else LayerNormConfig)(width, **options)

    def _position(self, config: ConfigFile, kind: str, width: int) -> Rotary | Alibi | None:
        options = self.part(config, "position")
        if not options or kind not in options.pop("kinds"):
            return None
        repeated = options.pop("base", None)
        if options.pop("method", None) != options.pop("only", None):
            return None
        if options.pop("may_lack", False) and has_null_positions(config, kind):
            return None
        if "part" in options:
            config = config.with_given({**config.given, "partial_rotary_factor": options.pop("part")})
        if "alibi" in options:
            return Alibi()
        if "dim" in options:
            return Rotary(options["theta"], options["dim"], options.get("pairing", "half"))
        if options.pop("fixed", False):  # the class reads no key of rotary positions
            return Rotary(options["theta"], width, options.get("pairing", "half"))
        if options.pop("nested", False):
            return read_nested_rotary(config, width, kind, **options)
        if options.pop("by_kind", False):
            return read_rotary_by_kind(config, width, kind, **options)
        usual = self.description.defaults.get(POSITIONS)
        if usual and config.get(POSITIONS) is None:  # null stands for the default, too
            config = config.with_given({**config.given, POSITIONS: usual})
        rotary = read_rotary(config, width, kind, renamed=self.description.renamed.get("rope_type"), **options)
        if repeated not in (None, rotary.base):
            key = self.description.fields["position.base"].key
            raise ValueError(f"{key} ({repeated}) of {config.model_type} must be rope_theta ({rotary.base})")
        return rotary


_SWITCHES = (
    *("switch", "scale_switch", "scaled", "scaled_by_layer", "is_adjusted"),
    *("correction", "gate", "head_bias", "head_linear_bias"),
)
_FLAGS = (
    *(*_SWITCHES, "qkv_bias", "key_bias", "out_bias", "bias", "tie", "normalise", "shared_bias"),
    *("key_is_value", "scale_corrected", "doubles"),
)
_COUNTS = ("shared", "first", "last", "step")
_INTEGERS = (
    *("hidden_dim", "num_experts", "top_k", "number", "chosen", "num_heads", "num_streams", "rows", "laurel_rank"),
    *("channels", "num_positions", "num_token_types", "dim", "embedding_width", "head_width", "num_buckets"),
    *("max_distance", "interval", "dense_interval", "latent_dim", "nope_dim", "rope_dim", "value_dim"),
)
_FROM_ZERO = ("offset", "count", "active", "width", "position_offset")
_AS_THEY_ARE = ("types", "dense", "method", "listed", "scores", "combined", "projection", "sparsity")
_READ: dict[str, Callable[[ConfigFile, str], object]] = {
    **dict.fromkeys(_FLAGS, ConfigFile.flag),
    **dict.fromkeys(_INTEGERS, ConfigFile.integer),
    **dict.fromkeys(("head_dim", "num_kv_heads", "query_dim"), ConfigFile.integer_or_none),
    **dict.fromkeys(_COUNTS, lambda config, key: config.integer(key, -1)),
    **dict.fromkeys(_FROM_ZERO, lambda config, key: config.integer(key, 0)),
    **dict.fromkeys(_AS_THEY_ARE, ConfigFile.get),
    "num_layers": ConfigFile.depth,
    "scales": lambda config, key: config.factors(key, 2),
    "norms": lambda config, key: "sandwich" if config.flag(key) else "pre",
    "rate": ConfigFile.number,
    "dropout": lambda config, key: config.number_or_none(key) or 0.0,
    "pairing": lambda config, key: "interleaved" if config.flag(key) else "half",
    **dict.fromkeys(ACTIVATED, lambda config, key: activation_of(config, key)),
}
