"""Makes the parts of a whole model from its folder, one at a time: of our twins, and of `transformers`' own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_bridge import backends
from attn_bridge.checkpoints import containers, modules
from attn_bridge.specs import DecoderConfig

from ...sides.subject import Array, load_adapter


class Twin:
    """One of our twins.

    Args:
        name: its framework.
        folder: of the model.
        config: the model's.
        dtype: of the parameters.
    """

    def __init__(self, name: modules.Side, folder: Path, config: DecoderConfig, dtype: str):
        self.name: modules.Side = name
        self.folder, self.config, self.dtype = folder, config, dtype
        self.backend: Any = backends.load(name)

    def block(self, index: int, *, numbered: bool = False) -> Any:
        """Return a block with its weights; `numbered`: give each element of the checkpoint a distinct number."""
        return self._part("DecoderBlock", self.config.blocks[index], f"trf_blocks.{index}.", None, numbered)

    def ends(self, rows: int, *, numbered: bool = False) -> Any:
        """Return embeddings, last norm and head of the first `rows` tokens."""
        config = self.config.replace(blocks=(), vocab_size=rows)
        return self._part("DecoderModel", config, "", (self.config.vocab_size, rows), numbered)

    def _part(self, kind: str, config: object, prefix: str, rows: tuple[int, int] | None, numbered: bool) -> object:
        dtype = "float64" if numbered else self.dtype
        with self.backend.precision(dtype):
            module = self.backend.build_blank(kind, config, dtype)
            modules.load_part(self.name, self.folder, module, prefix, rows=rows, numbered=numbered)
        return module

    def run(self, function: object, array: Array) -> Array:
        """Apply a part, or a method of one, to an array."""
        with self.backend.precision(self.dtype):
            output: Array = self.backend.call(function, array)
        return output


class Theirs:
    """The model of `transformers`; the arguments are those of `Twin`.

    Raises:
        UnknownModelError: `transformers` is not installed, or does not know the model.
    """

    name = "transformers"

    def __init__(self, folder: Path, config: DecoderConfig, dtype: str):
        self.folder, self.config, self.dtype = folder, config, dtype
        self.backend: Any = backends.load("torch")
        self._library: Any = load_adapter("torch", "hugging_face")
        self._config = self._library.read_config(folder)

    def block(self, index: int, *, numbered: bool = False) -> Any:
        """Return a block with its weights."""
        state = modules.read_part(self.folder, f"trf_blocks.{index}.", numbered=numbered)
        return self._library.layer(self._config, index, state, "float64" if numbered else self.dtype)

    def ends(self, rows: int, *, numbered: bool = False) -> Any:
        """Return embeddings, last norm and head of the first `rows` tokens."""
        state: Mapping[str, Array] = modules.read_part(
            self.folder, "", rows=(self.config.vocab_size, rows), numbered=numbered
        )
        return self._library.ends(self._config, rows, state, "float64" if numbered else self.dtype)

    def run(self, function: object, array: Array) -> Array:
        """Apply a part, or a method of one, to an array."""
        output: Array = self.backend.call(function, array)
        return output


Maker = Twin | Theirs
"""Maker of the parts of a model, one at a time, for one side of a comparison."""


def dtype_of(folder: Path) -> str:
    """Return the dtype that most numbers of a folder have, in which the model is built."""
    with containers.open_reader(folder) as reader:
        counts: dict[str, int] = {}
        for info in reader.tensors.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + info.nbytes
    floating = {name: count for name, count in counts.items() if "float" in name}
    return max(floating, key=lambda name: floating[name]) if floating else "float32"
