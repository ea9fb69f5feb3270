"""Small transformers of torch and NNX in several styles, with a spot for a fault at every place in the code.

A spot is a call of `at(name, x)` in a forward pass; a module whose `faults` name the spot changes x there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from attn_parity.localisation import Localisation
from attn_parity.localisation.search import find_on
from attn_parity.localisation.sides import Sides
from attn_parity.sides.subject import Arguments

WIDTH, HEADS, INNER, DEPTH = 8, 2, 12, 2
X = np.random.default_rng(1).normal(size=(2, 5, WIDTH)).astype(np.float32)


# ---- faults


class _TorchGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.01


@jax.custom_vjp
def _flax_gradient(x: Any) -> Any:
    return x


_flax_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * 1.01,))

TORCH_FAULTS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda x: x * 1.001,
    "shift": lambda x: x + 1e-4,
    "roll": lambda x: torch.roll(x, 1, 1),
    "gradient": _TorchGradient.apply,
    "detach": lambda x: x.detach(),
}
FLAX_FAULTS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda x: x * 1.001,
    "shift": lambda x: x + 1e-4,
    "roll": lambda x: jnp.roll(x, 1, 1),
    "gradient": lambda x: _flax_gradient(x),
    "detach": jax.lax.stop_gradient,
}
BACKWARD = ("gradient", "detach")


class _TorchSpots(nn.Module):
    faults: Mapping[str, str] = {}

    def at(self, name: str, x: Any) -> Any:
        return TORCH_FAULTS[self.faults[name]](x) if name in self.faults else x


class _FlaxSpots(nnx.Module):
    def at(self, name: str, x: Any) -> Any:
        faults = getattr(self, "faults", {})
        return FLAX_FAULTS[faults[name]](x) if name in faults else x


# ---- attention and feed-forward code that both kinds of blocks share


def attend(spots: Any, q: Any, k: Any, v: Any, softmax: Callable[[Any], Any]) -> Any:
    """Attention over heads, in operations that torch and JAX arrays both know."""
    length = q.shape[1]
    split = [one.reshape(-1, length, HEADS, WIDTH // HEADS).swapaxes(1, 2) for one in (q, k, v)]
    scores = spots.at("scores", split[0] @ split[1].swapaxes(-1, -2) / 2.0)
    return spots.at("context", softmax(scores) @ split[2]).swapaxes(1, 2).reshape(-1, length, WIDTH)


def torch_softmax(scores: Any) -> Any:
    return torch.softmax(scores, -1)


class TorchLinear(nn.Linear, _TorchSpots):
    def forward(self, x: Any) -> Any:
        return self.at("linear", super().forward(x))


class TorchAttention(_TorchSpots):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = TorchLinear(WIDTH, WIDTH), TorchLinear(WIDTH, WIDTH)
        self.v_proj, self.out_proj = TorchLinear(WIDTH, WIDTH), TorchLinear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = self.at("attn start", x)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(self.at("before v", x))
        return self.at("attn end", self.out_proj(attend(self, q, k, v, torch_softmax)))


class TorchMLP(_TorchSpots):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = TorchLinear(WIDTH, INNER), nn.GELU(), TorchLinear(INNER, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.at("mlp end", self.fc2(self.at("inner", self.act(self.fc1(x)))))


class TorchBlock(_TorchSpots):
    """Attention and feed-forward part are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), TorchAttention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), TorchMLP()

    def forward(self, x: Any) -> Any:
        x = self.at("block start", x)
        x = self.at("residual", x) + self.attn(self.at("normed", self.norm1(x)))
        x = self.at("between", x)
        return self.at("block end", x + self.at("after mlp", self.mlp(self.norm2(x))))


class TorchFlatBlock(_TorchSpots):
    """All layers sit in the block itself, the feed-forward part in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj = TorchLinear(WIDTH, WIDTH), TorchLinear(WIDTH, WIDTH)
        self.v_proj, self.out_proj = TorchLinear(WIDTH, WIDTH), TorchLinear(WIDTH, WIDTH)
        self.ff = nn.Sequential(TorchLinear(WIDTH, INNER), nn.GELU(), TorchLinear(INNER, WIDTH))

    def forward(self, x: Any) -> Any:
        x = self.at("block start", x)
        y = self.at("attn start", self.at("normed", self.norm1(x)))
        q, k, v = self.q_proj(y), self.k_proj(y), self.v_proj(self.at("before v", y))
        y = self.at("attn end", self.out_proj(attend(self, q, k, v, torch_softmax)))
        x = self.at("between", self.at("residual", x) + y)
        return self.at("block end", x + self.at("after mlp", self.at("mlp end", self.ff(self.norm2(x)))))


class TorchModel(_TorchSpots):
    def __init__(self, block: Callable[[], nn.Module] = TorchBlock, depth: int = DEPTH) -> None:
        super().__init__()
        self.embed = TorchLinear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = TorchLinear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        x = self.at("model start", self.embed(x))
        for block in self.blocks:
            x = self.at("model between", block(x))
        return self.at("model end", self.head(x))


class FlaxLinear(nnx.Linear, _FlaxSpots):
    def __call__(self, x: Any) -> Any:
        return self.at("linear", super().__call__(x))


def linear(*shape: int) -> FlaxLinear:
    return FlaxLinear(*shape, rngs=nnx.Rngs(0))


def norm() -> nnx.LayerNorm:
    return nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))


class FlaxAttention(_FlaxSpots):
    def __init__(self) -> None:
        self.q_proj, self.k_proj = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.v_proj, self.out_proj = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def __call__(self, x: Any) -> Any:
        x = self.at("attn start", x)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(self.at("before v", x))
        return self.at("attn end", self.out_proj(attend(self, q, k, v, jax.nn.softmax)))


class FlaxMLP(_FlaxSpots):
    def __init__(self) -> None:
        self.fc1, self.fc2 = linear(WIDTH, INNER), linear(INNER, WIDTH)

    def __call__(self, x: Any) -> Any:
        return self.at("mlp end", self.fc2(self.at("inner", jax.nn.gelu(self.fc1(x), approximate=False))))


class FlaxBlock(_FlaxSpots):
    def __init__(self) -> None:
        self.norm1, self.attn, self.norm2, self.mlp = norm(), FlaxAttention(), norm(), FlaxMLP()

    def __call__(self, x: Any) -> Any:
        x = self.at("block start", x)
        x = self.at("residual", x) + self.attn(self.at("normed", self.norm1(x)))
        x = self.at("between", x)
        return self.at("block end", x + self.at("after mlp", self.mlp(self.norm2(x))))


class FlaxFlatBlock(_FlaxSpots):
    """All layers sit in the block itself."""

    def __init__(self) -> None:
        self.norm1, self.norm2 = norm(), norm()
        self.q_proj, self.k_proj = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.v_proj, self.out_proj = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = linear(WIDTH, INNER), linear(INNER, WIDTH)

    def __call__(self, x: Any) -> Any:
        x = self.at("block start", x)
        y = self.at("attn start", self.at("normed", self.norm1(x)))
        k, q, v = self.k_proj(y), self.q_proj(y), self.v_proj(self.at("before v", y))
        y = self.at("attn end", self.out_proj(attend(self, q, k, v, jax.nn.softmax)))
        x = self.at("between", self.at("residual", x) + y)
        y = self.fc2(self.at("inner", jax.nn.gelu(self.fc1(self.norm2(x)), approximate=False)))
        return self.at("block end", x + self.at("after mlp", self.at("mlp end", y)))


class FlaxModel(_FlaxSpots):
    def __init__(self, block: Callable[[], nnx.Module] = FlaxBlock, depth: int = DEPTH) -> None:
        self.embed = linear(WIDTH, WIDTH)
        self.blocks = nnx.List([block() for _ in range(depth)])
        self.head = linear(WIDTH, 3)

    def __call__(self, x: Any) -> Any:
        x = self.at("model start", self.embed(x))
        for block in self.blocks:
            x = self.at("model between", block(x))
        return self.at("model end", self.head(x))


# ---- a pair without the judge


def subject(module: Any) -> Any:
    """Return what runs a module."""
    if isinstance(module, nn.Module):
        from attn_parity.frameworks.torch import subject as room
    else:
        from attn_parity.frameworks.jax import subject as room
    return room.subject_of(module)


@dataclasses.dataclass(frozen=True)
class Named:
    """A tensor of one side."""

    name: str
    parameter: Any


@dataclasses.dataclass(frozen=True)
class Match:
    """One tensor on both sides."""

    first: Named
    second: Named


class ByLeaves:
    """Pairs parameters by the last words of their names, in order; kernels are transposed weights.

    Args:
        first: parameters of the first side by name.
        second: parameters of the second side.
    """

    def __init__(self, first: Mapping[str, Any], second: Mapping[str, Any]):
        ours, theirs = (self._sorted(side) for side in (first, second))
        assert len(ours) == len(theirs)
        self.matches = [
            Match(Named(one, first[one]), Named(two, second[two])) for one, two in zip(ours, theirs, strict=True)
        ]

    @staticmethod
    def _sorted(names: Mapping[str, Any]) -> list[str]:
        same = {
            "kernel": "weight",
            "scale": "weight",
            "ff.0": "fc1",
            "ff.2": "fc2",
            "mlp.": "",
            "attn.": "",
            "inner.": "",
        }

        def key(name: str) -> str:
            for word, plain in same.items():
                name = name.replace(word, plain)
            return name

        return sorted(names, key=key)

    @staticmethod
    def _turned(match: Match) -> bool:
        return (
            match.first.name.endswith(("weight", "kernel"))
            and (match.first.name.endswith("kernel") != match.second.name.endswith("kernel"))
            and len(match.first.parameter.shape) == 2
        )

    def to_second(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the first side's weights."""
        return {
            one.second.name: np.array(
                arrays[one.first.name].T if self._turned(one) else arrays[one.first.name], order="C"
            )
            for one in self.matches
        }

    def aligned(self, arrays: Mapping[str, Any], side: str) -> dict[str, Any]:
        """Return one side's arrays under first names and with the first side's axes."""
        names = {getattr(one, side).name: one for one in self.matches}
        return {
            names[name].first.name: array.T if side == "second" and self._turned(names[name]) else array
            for name, array in arrays.items()
            if name in names
        }


def sides_of(first: Any, second: Any, *inputs: Any, second_inputs: Any = None) -> Sides:
    """Return two modules as localisation takes them, with weights drawn for both."""
    subjects = {"first": subject(first), "second": subject(second)}
    pairing = ByLeaves(subjects["first"].parameters(), subjects["second"].parameters())
    random = np.random.default_rng(3)
    held = subjects["first"].weights()
    drawn = {name: (array + 0.3 * random.normal(size=array.shape)).astype(np.float32) for name, array in held.items()}
    arguments = Arguments(inputs or (X,))
    second_arguments = arguments if second_inputs is None else Arguments(second_inputs)
    return Sides(
        subjects,
        pairing,
        {"first": arguments, "second": second_arguments},
        {"first": drawn, "second": pairing.to_second(drawn)},
    )


def place(first: Any, second: Any, *inputs: Any, **more: Any) -> Localisation:
    """Return where two modules part."""
    return find_on(sides_of(first, second, *inputs, **more), "meaning")
