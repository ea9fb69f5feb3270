"""The base of a family of models, and tables of the package that a user's family overrides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

from ...specs.decoder_model import DecoderConfig
from ...specs.encoder_decoder_model import EncoderDecoderConfig
from ..attention_layer import AttentionLayer
from ..layout import Layout
from ..reading import multimodal
from ..reading.decoders import WrittenKeys
from ..reading.model_config import ConfigFile
from .description import Description
from .runs import PREPARE


class Family:
    """Models of one description, which subclasses read and write.

    Args:
        description: the data.
        layout: the table of their tensors; None of encoders with decoders, which name theirs alone.

    Attributes:
        whole: class of the config of a whole model.
    """

    whole: ClassVar[type[DecoderConfig] | type[EncoderDecoderConfig]]

    def __init__(self, description: Description, layout: Layout | None = None):
        self.description, self.layout = description, layout

    @property
    def model_types(self) -> tuple[str, ...]:
        """The ``model_type`` of their configs, the one that is written first."""
        kind = self.description.model_type
        kind = multimodal.decoder_type(kind) if self.whole is DecoderConfig else kind
        return (kind, *self.description.further_types)

    @property
    def architecture(self) -> str:
        """The class of `transformers` that runs them."""
        return self.description.architecture

    @property
    def depth(self) -> str:
        """Key of the number of layers."""
        return "num_hidden_layers"

    def file(self, keys: Mapping[str, object], model_type: str) -> ConfigFile:
        """Return a config.json with the defaults of the family."""
        description = self.description
        prepared = PREPARE[description.prepare](keys) if description.prepare else keys
        return ConfigFile(prepared, model_type, description.defaults, description.aliases, description.keys)

    def attention(self, config: ConfigFile, layer: int) -> AttentionLayer:
        """Return the attention of a layer."""
        raise NotImplementedError

    def model(self, config: ConfigFile, names: Collection[str] = ()) -> DecoderConfig | EncoderDecoderConfig:
        """Return the config of a whole model; the names of its tensors decide cases that its file leaves open."""
        raise NotImplementedError

    def write(self, config: Any) -> WrittenKeys:
        """Return the keys of a whole model's config.json; values without a key are left out or refused."""
        raise NotImplementedError


V = TypeVar("V")

_IN_USE: ContextVar[Family | None] = ContextVar("attn_bridge_family", default=None)


@contextlib.contextmanager
def using(family: Family | None) -> Iterator[None]:
    """Put a family before those of the package, in this thread and while the context is open; None adds none."""
    token = _IN_USE.set(_IN_USE.get() if family is None else family)
    try:
        yield
    finally:
        _IN_USE.reset(token)


class Scoped(Mapping[str, V]):
    """A table of the package, with the entries of the family in use before its own.

    Args:
        table: the package's entries.
        entries: from a family to its entries.
    """

    def __init__(self, table: Mapping[str, V], entries: Callable[[Family], Mapping[str, V]]):
        self._table, self._entries = table, entries

    def _all(self) -> Mapping[str, V]:
        family = _IN_USE.get()
        return self._table if family is None else {**self._table, **self._entries(family)}

    def __getitem__(self, name: str) -> V:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
