"""Dumps of a small net that is computed in NumPy, so that they can be made and compared without a framework."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from attn_bridge import whole_folders as folders
from attn_parity.dumps import format as dumps
from attn_parity.dumps import recording
from attn_parity.sides.subject import Arguments, Call, CannotPromoteError, Run, SideWeight, Submodule

INPUTS = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
NAMES = {"torch": "fc.weight", "flax": "fc.kernel"}
SHAPES = {"torch": (3, 4), "flax": (4, 3)}


@dataclasses.dataclass
class Net:
    """``x W + b + shift - shift``; a parameter ``spare`` is not used.

    Attributes:
        framework: whose names and axes it has.
        gain: what the result is multiplied with; anything but 1 is a fault.
        digits: to how many bits results in low precision are rounded; None is all.
        noise: what is added at random.
        has_float64: whether it can be run in float64.
    """

    framework: str
    gain: float = 1.0
    digits: int | None = None
    noise: float = 0.0
    has_float64: bool = True
    name: str = "Net"
    device: str = "cpu"
    argument_names: tuple[str, ...] = ("x",)
    seed: int = 1

    @property
    def kind(self) -> str:
        """What it is."""
        return f"{self.framework} module"

    def modes(self, arguments: Arguments) -> dict[str, bool]:
        """Return the arguments that switch modes: none."""
        del arguments
        return {}

    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters by name."""
        shapes = {NAMES[self.framework]: SHAPES[self.framework], "fc.bias": (3,), "shift": (3,), "spare": (3,)}
        return {
            name: SideWeight(
                shape,
                "float32",
                "Linear" if "." in name else "Net",
                "fc" if "." in name else "",
                framework=self.framework,
            )
            for name, shape in shapes.items()
        }

    def state(self) -> dict[str, SideWeight]:
        """Return no state."""
        return {}

    def carry(self, names) -> None:
        """Carry no state."""

    def tied(self) -> dict[str, str]:
        """Return no tied weights."""
        return {}

    def uses(self, weights, arguments) -> dict[str, int]:
        """Return that the order is not known."""
        return {}

    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights that it holds."""
        random = np.random.default_rng(self.seed)
        held = {name: random.normal(size=one.shape).astype(np.float32) for name, one in self.parameters().items()}
        weight = np.random.default_rng(self.seed).normal(size=SHAPES["torch"]).astype(np.float32)
        return held | {NAMES[self.framework]: weight if self.framework == "torch" else np.ascontiguousarray(weight.T)}

    def modules(self) -> list[Submodule]:
        """Return the submodules."""
        return [Submodule("", "Net"), Submodule("fc", "Linear")]

    def settings(self) -> dict[str, dict[str, float]]:
        """Return no settings."""
        return {"": {}, "fc": {}}

    def unreached(self, arguments: Arguments) -> list[str]:
        """Return no branches."""
        return []

    def few_threads(self) -> contextlib.AbstractContextManager[None]:
        """Return no context."""
        return contextlib.nullcontext()

    def describe_outputs(self, weights, arguments) -> list[tuple[str, tuple[int, ...], str]]:
        """Return place, shape and dtype of the output."""
        return [("", self.run(weights, arguments).outputs[0].shape, "float32")]

    def run(self, weights, arguments, cotangents=None, *, dtype=None, mode="eager", seed=0, path="", tables=()) -> Run:
        """Run forward, and backward if there are cotangents."""
        if dtype == "float64" and not self.has_float64:
            raise CannotPromoteError("it can't")
        kind = np.dtype(dtype or "float32")
        held = {name: array.astype(kind) for name, array in weights.items()}
        (x,) = (leaf.astype(kind) for leaf in arguments.leaves)
        name = NAMES[self.framework]
        matrix = held[name].T if self.framework == "torch" else held[name]
        inner = self._rounded(x @ matrix) + held["fc.bias"]
        output = inner * kind.type(self.gain) + held["shift"] - held["shift"]
        if self.noise:
            output = output + self.noise * np.random.default_rng().normal(size=output.shape).astype(kind)
        if cotangents is None:
            return Run([output], [""])
        ct = cotangents[0].astype(kind) * kind.type(self.gain)
        gradient = np.einsum("btd,bto->do", x, ct)
        of_weights = {
            name: np.ascontiguousarray(gradient.T if self.framework == "torch" else gradient),
            "fc.bias": ct.sum((0, 1)),
            "shift": np.zeros(3, kind),
            "spare": np.zeros(3, kind),
        }
        return Run([output], [""], [ct @ matrix.T], of_weights)

    def substituted(self, weights, arguments, cotangents, substitutes, *, path="") -> tuple[Run, list[Call]]:
        """Return the run and the one call of ``fc``."""
        assert not path
        plain = dataclasses.replace(self, gain=1.0, noise=0.0)
        run = plain.run(weights, arguments, cotangents, dtype="float64")
        call = arguments.with_leaves([leaf.astype(np.float64) for leaf in arguments.leaves])
        return run, [Call("fc", 0, 0, call, run.outputs, list(cotangents))]

    def _rounded(self, array: np.ndarray) -> np.ndarray:
        if self.digits is None or array.dtype == np.float64:
            return array
        mantissa, exponent = np.frexp(array)
        return np.ldexp(np.round(mantissa * 2.0**self.digits) / 2.0**self.digits, exponent).astype(array.dtype)


def write(folder: Path, net: Net, monkeypatch, *, like: Path | None = None, seeds: int = 2, **options) -> Path:
    """Write a dump of a net, as `attn_parity.dumps.recording.dump` writes that of a module."""
    stub = SimpleNamespace(SWITCHES=(), kinds=set)
    with monkeypatch.context() as patch, folders.new(folder) as target:
        patch.setattr(recording, "load_adapter", lambda framework, module: stub)
        other = None if like is None else dumps.of_side(like, "torch")
        dtypes, inputs = options.pop("dtypes", ("float32",)), options.pop("inputs", None if like else INPUTS)
        made = recording.DumpRecorder(net, inputs, other, dumps.DumpWriter(target), **options)
        with np.errstate(all="ignore"):
            made.record(seeds, 0, ("eager",), dtypes)
    return folder
