"""Parameters of two sides as tables of names and shapes, and arrays for them."""

from __future__ import annotations

import dataclasses

import numpy as np

from attn_parity.sides.subject import SideWeight

D, HIDDEN = 4, 6


@dataclasses.dataclass(frozen=True)
class Stated(SideWeight):
    """A parameter that says its framework."""

    framework: str = ""


def parameters(shapes, framework=""):
    """Return the parameters of a table of name -> (shape, class of the owner)."""
    return {
        name: Stated(tuple(shape), "float32", owner, name.rpartition(".")[0], framework=framework)
        for name, (shape, owner) in shapes.items()
    }


def linear(path, rows, columns, side):
    if side == "torch":
        return {f"{path}.weight": ((columns, rows), "Linear"), f"{path}.bias": ((columns,), "Linear")}
    return {f"{path}.kernel": ((rows, columns), "Linear"), f"{path}.bias": ((columns,), "Linear")}


def norm(path, side):
    scale = "weight" if side == "torch" else "scale"
    return {f"{path}.{scale}": ((D,), "LayerNorm"), f"{path}.bias": ((D,), "LayerNorm")}


def draw(shapes, seed=0):
    """Return arrays full of every kind of bits, NaNs and minus zero included."""
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 2**32, size=one.shape, dtype=np.uint32).view(np.float32)
        for name, one in shapes.items()
    }


BARE = parameters({"W": ((4, 4), "Own")}), parameters({"W": ((4, 4), "Own")})
