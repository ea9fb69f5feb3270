"""A family as data: the source of each field of our configs, the table of its tensors, and the proof of both."""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from ...printable import printable
from ...weights.rows import Row
from ..reading.decoders import KINDS, inverse
from ..rows.files import row_of, table_of

Value = bool | int | float | str | None
Written = bool | int | float | str | list[Any] | dict[str, Any]

ALONE = "mlp"
"""Name of the kind of layers that are feed-forward alone."""

_ACCEPTED = ("fixed", "fixed_mixer", "fixed_pattern")
"""Attributes that map a key to the values that are accepted, in a file as JSON."""


@dataclasses.dataclass(frozen=True)
class KeySource:
    """Where the value of a field of ours comes from.

    Attributes:
        key: key of the config.json; "" is a constant.
        power: exponent of the number under the key (-1.0 for a divisor of the logits).
        times: key of a whole number that multiplies the one under the key (a number of experts and their width); ""
            multiplies by 1.
        widths: where the key is null, or that of the width of the model, the value is this many times the width; 0
            takes the key as it is.
        share: where the key is null, the value is the width of the model divided by the number under this key; ""
            takes the key as it is.
        otherwise: key that is read where the key is null; "" reads null.
        or_one: whether null is 1, as of a factor.
        less: key of a whole number that is subtracted from the one under the key; "" subtracts nothing.
        plus: whole number that is added to the one under the key.
        per: key of a number, such as the width of the model, whose `per_power` divides the one under the key;
            "" divides by nothing.
        per_power: exponent of the number under `per` (0.5 for a residual that is divided by the root of the depth).
        value: the constant.
    """

    key: str = ""
    power: float = 1.0
    times: str = ""
    widths: int = 0
    share: str = ""
    otherwise: str = ""
    or_one: bool = False
    less: str = ""
    plus: int = 0
    per: str = ""
    per_power: float = 1.0
    value: Value | tuple[str, ...] = None

    def __post_init__(self) -> None:
        if bool(self.key) == (self.value is not None):
            raise ValueError(f"a source holds either a key or a value, got {self.key!r} and {self.value!r}")
        for name in ("times", "per"):
            if getattr(self, name) and not self.key:
                raise ValueError(f"a source with {name} ({getattr(self, name)!r}) needs a key")

    def root(self, value: float | None) -> float | None:
        """Return the number whose power is a value, an integer where it is one; null for null."""
        if self.power == 1.0 or value is None:
            return value
        return _whole(inverse(lambda number: number**self.power, value, value ** (1.0 / self.power)))

    def product(self, value: float, divisor: float) -> float:
        """Return the number that a divisor divides into a value, an integer where it is one."""
        return _whole(inverse(lambda number: number / divisor, value, value * divisor))


def _whole(number: float) -> float:
    """Return a number as an integer where it is one: transformers takes no float where it has an int."""
    return int(number) if number.is_integer() else number


@dataclasses.dataclass(frozen=True)
class Description:
    """A family of whole decoders.

    Attributes:
        model_type: the ``model_type`` of its configs.
        architecture: the class of `transformers` that runs it.
        layout: name of the table of its tensors.
        rows: that table, without token embeddings and head; () where the layout is that of a family written by hand.
        prefixes: the values of ``{prefix}`` in the rows, the usual one first; () are those of Llama.
        defaults: key -> the default of `transformers`.
        aliases: other names of a key that files have.
        keys: usual key -> the key that holds its value, where the usual one is about another part of the model, as the
            encoder in front of a decoder.
        written: usual key -> the name that it is written under, one of its aliases.
        fields: field of ours, as ``part.name`` -> its source.
        pattern: kinds of the layers where a config has no ``layer_types``, repeated over all layers.
        first: kinds of the first layers, which go before the pattern.
        last: kinds of the last layers, likewise.
        fixed: key with an effect that no field of ours has -> its proven values.
        unless: key of `fixed` or `fixed_mixer` -> other key -> its values that leave the former without effect.
        fixed_mixer: likewise, keys that matter only in recurrent layers.
        fixed_pattern: likewise, keys that matter only where a config has no ``layer_types``.
        same: key that is null or the same as another -> that one, such as the width of embeddings and of the model.
        required: keys that must not be null.
        libraries: other libraries with files of the family, by the names of their tables of attention ("meta").
        further_types: further ``model_type`` names that are read as the same family, and never written.
        scalings: the types of scaled positions that `transformers` takes, of heads that share the width of the model;
            () takes all.
        numbered: keys of tokens whose numbers must not be null in a file, which are written as 0.
        unset: keys that are written as null, of encoders with decoders.
        prepare: name of a function of `runs` that makes the usual keys of a file's; "" for none.
        even_heads: whether `transformers` has no model whose number of heads does not divide the width.
        renamed: key -> value in files -> the value that `transformers` reads it as.
        proof: versions, and the counts of comparisons; empty for data written by hand, which the tests prove.
    """

    model_type: str
    architecture: str
    layout: str
    rows: tuple[Row, ...] = ()
    prefixes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    written: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, KeySource] = dataclasses.field(default_factory=dict)
    pattern: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    unless: Mapping[str, Mapping[str, list[Value]]] = dataclasses.field(default_factory=dict)
    fixed_mixer: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    fixed_pattern: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)
    required: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    further_types: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    prepare: str = ""
    even_heads: bool = False
    renamed: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    proof: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def parts(self) -> frozenset[str]:
        """Parts of our configs that have fields, such as ``attention``."""
        return frozenset(field.partition(".")[0] for field in self.fields)

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of layers: without a window or a recurrent state, with it, and a third one if any."""
        source = self.fields.get("layers.kinds")
        return source.value if source is not None and isinstance(source.value, tuple) else KINDS

    @functools.cached_property
    def is_mixed(self) -> bool:
        """Whether each block has either attention or feed-forward layers (Nemotron-H)."""
        return ALONE in self.kinds

    @functools.cached_property
    def mixer(self) -> tuple[str, dict[str, str], dict[str, object]]:
        """The kind of the recurrent layers, and their fields: field -> key, and field -> constant."""
        fields = {name.partition(".")[2]: one for name, one in self.fields.items() if name.startswith("mixer.")}
        kind = str(fields.pop("kind").value)
        keys = {name: one.key for name, one in fields.items() if one.key}
        return kind, keys, {name: one.value for name, one in fields.items() if not one.key}

    def kind_of(self, layer: int, layers: int) -> str:
        """Return the kind of a layer where a config has no ``layer_types``.

        Args:
            layer: its index.
            layers: number of layers.
        """
        if layer < len(self.first):
            return self.first[layer]
        if layer >= layers - len(self.last):
            return self.last[layer - layers]
        return self.pattern[layer % len(self.pattern)]


_LISTS = tuple(field.name for field in dataclasses.fields(Description) if field.type == "tuple[str, ...]")
"""Attributes of a description that are lists of names."""


def loads(text: str, path: str) -> Description:
    """Return the family that a TOML file describes.

    Raises:
        ValueError: not TOML, or a table or key that a description lacks; the message names the file.
    """
    try:
        document = tomllib.loads(text)
        fields = {
            f"{part}.{name}": KeySource(value=tuple(source)) if isinstance(source, list) else KeySource(**source)
            for part, table in document.pop("fields", {}).items()
            for name, source in table.items()
        }
        rows = tuple(map(row_of, document.pop("rows", ())))
        for name in _ACCEPTED:
            document[name] = {key: tuple(map(json.loads, values)) for key, values in document.pop(name, {}).items()}
        aliases = {key: tuple(names) for key, names in document.pop("aliases", {}).items()}
        document |= {key: tuple(document[key]) for key in _LISTS if key in document}
        return Description(**document, rows=rows, fields=fields, aliases=aliases)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {printable(error, 400)}") from error


def dumps(description: Description) -> str:
    """Return the TOML file of a description, which `loads` reads back as the same."""
    return "\n".join(_lines(description)) + "\n"


def _lines(description: Description) -> Iterator[str]:
    yield f"# Written by: attn-bridge derive {description.model_type}"
    for name in ("model_type", "architecture", "layout", *_LISTS, "prepare", "even_heads"):
        if getattr(description, name):
            yield f"{name} = {_toml(getattr(description, name))}"
    if description.rows:
        yield "rows = ["
        yield from (f"    {_toml(table_of(row))}," for row in description.rows)
        yield "]"
    for name in ("proof", "defaults", "renamed", "same", "unless", "keys", "written", "aliases", *_ACCEPTED):
        table: Mapping[str, object] = getattr(description, name)
        if table:
            yield f"\n[{name}]"
        for key, value in table.items():
            if value is not None:
                accepted = list(map(json.dumps, value)) if name in _ACCEPTED and isinstance(value, tuple) else value
                yield f"{_key(key)} = {_toml(accepted)}"
    parts = dict.fromkeys(field.partition(".")[0] for field in description.fields)
    for part in parts:
        yield f"\n[fields.{part}]"
        for field, source in description.fields.items():
            if field.startswith(f"{part}."):
                yield f"{field.partition('.')[2]} = {_toml(_source(source))}"


def _source(source: KeySource) -> Written:
    if isinstance(source.value, tuple):
        return list(source.value)
    values = ((field, getattr(source, field.name)) for field in dataclasses.fields(source))
    return {field.name: value for field, value in values if value != field.default}


def _key(key: str) -> str:
    """Return a key as TOML writes it: in quotes unless it is a bare word."""
    return key if key.replace("_", "").isalnum() and key.isascii() else json.dumps(key)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_toml(one)}" for key, one in value.items() if one is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value)
