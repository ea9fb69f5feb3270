"""The groups to measure: sizes, their floating-point operations and their inputs, the same in both frameworks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import ml_dtypes
import numpy as np

SUBJECTS = ("attention", "modules")
DTYPES = ("float32", "bfloat16")
DIRECTIONS = ("forward", "forward+backward")
MODES = ("eager", "compiled")
FRAMEWORKS = ("torch", "jax")

LINEARS = ("W_query", "W_key", "W_value", "out_proj")
"""Projections of a module, in the order of the book."""

BACKWARD = 2.5
"""A backward pass of attention as a multiple of its forward pass: five products of matrices instead of two."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """Sizes of one call.

    Attributes:
        batch: sequences.
        tokens: tokens per sequence; keys are as many as queries.
        heads: heads.
        head_dim: width of a head, of queries, keys and values alike.
    """

    batch: int
    tokens: int
    heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Read ``BxTxHxD``; ValueError if it is something else."""
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", text):
            raise ValueError(f"cell ({text}) must be BATCHxTOKENSxHEADSxHEAD_DIM, such as 4x1024x12x64")
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return "x".join(map(str, dataclasses.astuple(self)))

    @property
    def width(self) -> int:
        """Width of a token over all heads."""
        return self.heads * self.head_dim


CELLS = tuple(map(Cell.parse, ("8x256x12x64", "4x1024x12x64", "2x2048x12x64", "1x4096x12x64")))
QUICK_CELLS = tuple(map(Cell.parse, ("2x128x4x32", "1x256x4x32")))


@dataclasses.dataclass(frozen=True)
class Group:
    """One comparison: everything in it computes the same numbers, and is measured alternately.

    Attributes:
        subject: ``"attention"``, causal attention of given queries, keys and values, or ``"modules"``, causal
            multi-head self-attention with its four projections and their biases.
        cell: the sizes.
        dtype: of inputs, parameters and outputs.
        direction: ``"forward"``, or ``"forward+backward"``: also the gradients of all inputs and parameters.
    """

    subject: str
    cell: Cell
    dtype: str
    direction: str

    def to_json(self) -> dict[str, str]:
        """Return it as JSON-ready data."""
        return {"subject": self.subject, "cell": str(self.cell), "dtype": self.dtype, "direction": self.direction}

    @classmethod
    def from_json(cls, data: dict[str, str]) -> Group:
        """Read what `to_json` returned."""
        return cls(data["subject"], Cell.parse(data["cell"]), data["dtype"], data["direction"])

    def __str__(self) -> str:
        return f"{self.subject} {self.cell} {self.dtype} {self.direction}"

    @property
    def backward(self) -> bool:
        """Whether gradients are computed, too."""
        return self.direction == "forward+backward"

    def flops(self) -> float:
        """Return the floating-point operations that count, whatever an implementation really does.

        Attention is ``4 B H T T D`` forward, of which causal counts half, and `BACKWARD` times that backward. A module
        adds ``2 B T E E`` for each of its four projections, and twice that backward.
        """
        cell = self.cell
        attention = 4 * cell.batch * cell.heads * cell.tokens**2 * cell.head_dim / 2
        total = attention * (1 + BACKWARD * self.backward)
        if self.subject == "modules":
            projections = len(LINEARS) * 2 * cell.batch * cell.tokens * cell.width**2
            total += projections * (1 + 2 * self.backward)
        return total

    def square_bytes(self) -> int:
        """Return a low estimate of the memory of code that keeps ``T x T`` arrays: three of them, in float32."""
        return 3 * 4 * self.cell.batch * self.cell.heads * self.cell.tokens**2

    def inputs(self) -> dict[str, np.ndarray]:
        """Draw the inputs in their dtype, the same numbers at every call and in every process.

        Returns:
            For attention ``query key value cotangent``, each ``(B, T, H, D)``; for modules ``x cotangent``, each
            ``(B, T, E)``, and ``{linear}.weight`` ``(in, out)`` and ``{linear}.bias`` of each of `LINEARS`. The
            cotangent is the gradient of the output.
        """
        cell = self.cell
        random = np.random.default_rng([cell.batch, cell.tokens, cell.heads, cell.head_dim])
        if self.subject == "attention":
            shape = (cell.batch, cell.tokens, cell.heads, cell.head_dim)
            drawn = {name: random.standard_normal(shape, np.float32) for name in ("query", "key", "value", "cotangent")}
        else:
            shape = (cell.batch, cell.tokens, cell.width)
            drawn = {name: random.standard_normal(shape, np.float32) for name in ("x", "cotangent")}
            for name in LINEARS:
                matrix = random.standard_normal((cell.width, cell.width), np.float32)
                drawn[f"{name}.weight"] = matrix * np.float32(cell.width**-0.5)
                drawn[f"{name}.bias"] = random.standard_normal(cell.width, np.float32) * np.float32(0.1)
        return {name: array.astype(numpy_dtype(self.dtype)) for name, array in drawn.items()}


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of that name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def chosen(what: str, texts: Iterable[str], choices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in the order of `choices`, all of them if none is given; ValueError names one that is not known.

    A name may be several, with commas between them.
    """
    names = [name for text in texts for name in text.split(",")]
    for name in names:
        if name not in choices:
            raise ValueError(f"{what} ({name}) must be one of {', '.join(choices)}")
    return tuple(name for name in choices if name in names) or choices
