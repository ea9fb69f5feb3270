"""Run a port: the test of its author, the usual rules and the judge, on the same pair."""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from attn_bridge import parity
from attn_parity.results.findings import TensorVerdict
from fault_lab.planted.usual_rules import rejections

from .authors import Array
from .catalogue import Port

RULES = ("1e-5", "1e-2", "mean")
"""The usual rules of the table, on outputs."""

RATE = 0.05
"""Learning rate of the authors' tests that the loss falls."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one port.

    Attributes:
        port: the port.
        own: whether the test of its author passes.
        rules: usual rule -> whether it accepts the outputs.
        report: the judge's report.
    """

    port: Port
    own: bool
    rules: dict[str, bool]
    report: parity.Report

    @property
    def witness(self) -> TensorVerdict | None:
        """The tensor that shows the fault, an output before a gradient; None for equal sides."""
        return min(self.report.failures, key=lambda tensor: tensor.kind != "output", default=None)


def run(port: Port) -> Outcome:
    """Run one port with the weights that the original draws from seed 0 of torch."""
    with tempfile.TemporaryDirectory() as folder:
        code = _loaded(port, Path(folder))
        torch.manual_seed(0)
        module = code.original().eval()
        inputs = code.inputs(np.random.default_rng(0))
        own = port.test.passes(_Ported(code, module))
        report = parity.compare(module, _side(code.port(module)), inputs)
    rejected = {rule: outputs for rule, (outputs, _) in rejections(report.pictures).items()}
    return Outcome(port, own, {rule: not rejected[rule] for rule in RULES}, report)


def _loaded(port: Port, folder: Path) -> ModuleType:
    """Write the port's text to a file and import it: the judge reads the code of both sides."""
    file = folder / f"{port.kind}.py"
    file.write_text(port.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(port.kind, file)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    return code


def _side(port: object) -> object:
    """Return the port as a side of `compare`: a pure function comes with its weights."""
    return parity.function(*port) if isinstance(port, tuple) and not hasattr(port[0], "apply") else port


class _Ported:
    """An original and its port as the tests of authors take them."""

    def __init__(self, code: ModuleType, module: torch.nn.Module):
        self.code, self.module = code, module
        port = code.port(module)
        if not isinstance(port, tuple):
            graph, self.weights = nnx.split(port)
            self.call = lambda weights, *inputs: nnx.merge(graph, weights)(*inputs)
        else:
            self.call, self.weights = port
            self.call = getattr(self.call, "apply", self.call)

    def original(self, *inputs: Array) -> list[Array]:
        with torch.no_grad():
            outputs = self.module(*map(torch.from_numpy, inputs))
        return [one.numpy() for one in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def port(self, *inputs: Array) -> list[Array]:
        return [np.asarray(one) for one in jax.tree.leaves(self.call(self.weights, *inputs))]

    def draw(self, **options: object) -> tuple[Array, ...]:
        return self.code.inputs(np.random.default_rng(1), **options)

    def learn(self, inputs: Sequence[Array], steps: int) -> list[float]:
        def loss(weights: object) -> jax.Array:
            return sum(jnp.mean(one**2) for one in jax.tree.leaves(self.call(weights, *inputs)))

        weights, losses = self.weights, []
        for _ in range(steps):
            value, gradients = jax.value_and_grad(loss)(weights)
            losses.append(float(value))
            weights = jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients)
        return losses
