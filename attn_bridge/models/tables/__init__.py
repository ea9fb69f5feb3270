"""Tables of tensors as data: ``NAME.toml`` for each layout of whole models that families share or that needs no code.

In: the name of a layout. Out: the `Layout`. A file holds the arguments of `Layout` and a TOML table per `Row`; with
``decoder = true``, rows and prefixes of the embeddings and the head are those of Llama (`rows.decoder.decoder`);
``omitted`` has the beginnings of the names of parts that a conversion leaves out.
"""

from __future__ import annotations

import functools
import importlib
import tomllib
from collections.abc import Callable
from importlib import resources

from ..layout import Layout
from ..parts import OmittedPart
from ..rows.decoder import FURTHER_LAYER, decoder
from ..rows.files import row_of

MODELS = __package__.rpartition(".")[0]
"""The package that paths of functions begin in."""


def named(path: str) -> Callable[..., object]:
    """Return a function of `attn_bridge.models` by its path, ``room.file.name``, imported when it is called."""
    module, _, name = path.rpartition(".")

    def call(*arguments: object) -> object:
        return getattr(importlib.import_module(f"{MODELS}.{module}"), name)(*arguments)

    return call


@functools.cache
def table(name: str) -> Layout:
    """Return the layout of a file, the same object on every call; ``[code]`` names arguments that are functions."""
    document = tomllib.loads(resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    rows = [row_of(row) for row in document.pop("rows")]
    for key, value in document.items():
        document[key] = tuple(value) if isinstance(value, list) else value
    document["settings"] = {setting: tuple(keys) for setting, keys in document.get("settings", {}).items()}
    document |= {role: named(path) for role, path in document.pop("code", {}).items()}
    title, parts = document.pop("title"), tuple(map(OmittedPart, document.pop("omitted", ())))
    parts += (FURTHER_LAYER,) if document.pop("further_layer", False) else ()
    if document.pop("decoder", False):
        return decoder(name, title, rows, parts=parts, **document)
    return Layout(name, title, rows, whole=True, parts=parts, **document)
