"""Tables of tensors as data: ``NAME.toml`` for each layout of whole models that families share or that needs no code.

In: the name of a layout. Out: the `Layout`. A file holds the arguments of `Layout` and a TOML table per `Row`; with
``decoder = true``, rows and prefixes of the embeddings and the head are those of Llama (`rows.decoder.decoder`);
``omitted`` has the parts that a conversion leaves out: beginnings of names, or arguments of `OmittedPart`. A file with
``forms``, the usual one first, is a `ChosenLayout`; ``when`` of a row lists the values of a form that has it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from ...weights.rows import Row
from ...weights.toml import packaged
from ..layout import Layout
from ..layout.chosen import ChosenLayout, Form
from ..parts import OmittedPart
from ..rows.decoder import FURTHER_LAYER, decoder
from ..rows.files import row_of

TABLES = (
    *("hf-gpt2", "nanogpt", "hf-bert", "hf-llama", "hf-mixtral", "hf-llama4", "hf-phi3", "hf-diffllama", "hf-gemma"),
    *("hf-gemma4-moe", "hf-gemma4", "hf-gemma3n", "hf-gpt-oss", "hf-olmo", "hf-olmo2", "hf-deepseek"),
    *("hf-cohere2-moe", "hf-qwen3-moe", "hf-qwen3-next", "hf-qwen3-5", "hf-mamba2", "hf-bamba", "hf-mamba"),
    *("hf-dbrx", "hf-jamba", "hf-lfm2", "hf-lfm2-moe", "hf-lfm3", "hf-granitemoehybrid", "hf-granitemoehybrid-dense"),
    *("hf-falcon-h1", "hf-nemotron-h", "hf-mimo-v2-flash", "hf-minimax", "hf-modernbert-decoder", "hf-kimi-linear"),
    *("hf-olmo-hybrid", "hf-bloom", "hf-bart", "hf-whisper", "hf-t5", "hf-umt5", "meta-llama", "openai-gpt-oss"),
    *("book-llama3", "book-qwen3", "book-gemma3", "gguf-llama", "gguf-qwen", "gguf-gemma", "gguf-gpt2"),
)
LIBRARIES = (
    *("tunix-llama3", "tunix-qwen2", "tunix-qwen3", "tunix-gemma3", "gemma-linen"),
    *("keras-gpt2", "keras-llama", "keras-mistral", "keras-qwen2", "keras-qwen3", "keras-gemma", "keras-gemma2"),
    *("keras-gemma3", "keras-bert"),
)
"""Names of the files of this room; layouts in code, and vLLM's, stand between these lists."""

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
    document = packaged(__name__, f"{name}.toml")
    rows = [(row.pop("when", {}), row_of(row)) for row in document.pop("rows")]
    for key, value in document.items():
        document[key] = tuple(value) if isinstance(value, list) else value
    document["settings"] = {setting: tuple(keys) for setting, keys in document.get("settings", {}).items()}
    document |= {role: named(path) for role, path in document.pop("code", {}).items()}
    if "model_types_of" in document:
        others = map(table, document.pop("model_types_of"))
        document["model_types"] = tuple(kind for layout in others for kind in layout.model_types)
    omitted = (one if isinstance(one, dict) else {"begin": one} for one in document.pop("omitted", ()))
    title, parts = document.pop("title"), tuple(OmittedPart(**one) for one in omitted)
    parts += (FURTHER_LAYER,) if document.pop("further_layer", False) else ()

    def rows_of(form: Form) -> list[Row]:
        return [row for when, row in rows if all(form[key] in values for key, values in when.items())]

    if "forms" in document:
        return ChosenLayout(name, title, rows_of, whole=True, parts=parts, **document)
    if document.pop("decoder", False):
        return decoder(name, title, rows_of({}), parts=parts, **document)
    return Layout(name, title, rows_of({}), whole=True, parts=parts, **document)
