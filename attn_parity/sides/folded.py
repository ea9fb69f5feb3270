"""A recurrent torch side with a single bias: torch layers add two biases, most other libraries store their sum.

The function is the same. The two biases become one parameter, with the gradient that either of them has.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from .arrays import wide
from .subject import Arguments, Array, Arrays, Call, DtypeCall, GradientSample, Run, SideWeight, Subject, Substitute

_BIAS = re.compile(r"(.*\.)?bias_ih(_l[0-9]+(_reverse)?)?")

_SUMMED = {"LSTM": 1.0, "LSTMCell": 1.0, "RNN": 1.0, "RNNCell": 1.0, "GRU": 2 / 3, "GRUCell": 2 / 3}
"""Class -> how much of its two biases is added; a GRU resets the last third, so that it stays apart."""


@dataclasses.dataclass(frozen=True)
class Fold:
    """Two biases of one layer.

    Attributes:
        kept: the one that holds the sum.
        folded: the one that is added to it.
        summed: how many of its elements, from the first on, are added; the rest stays under its name.
    """

    kept: str
    folded: str
    summed: int


def folds(parameters: Mapping[str, SideWeight]) -> list[Fold]:
    """Return the biases of a side that are added to each other."""
    pairs = []
    for name, parameter in parameters.items():
        other = name.replace("bias_ih", "bias_hh")
        if (
            parameter.framework != "torch"
            or parameter.owner not in _SUMMED
            or not _BIAS.fullmatch(name)
            or other not in parameters
        ):
            continue
        summed = round(_SUMMED[parameter.owner] * parameter.shape[0])
        pairs.append(Fold(other, name, summed) if summed == parameter.shape[0] else Fold(name, other, summed))
    return pairs


class FoldedSubject:
    """Runs a subject whose parameters are those of another, with some biases folded into one.

    Attributes:
        folds: the biases.
    """

    def __init__(self, subject: Subject, folds: Sequence[Fold]):
        self._subject, self.folds = subject, folds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject, name)

    @property
    def train(self) -> bool:
        """Whether it runs in train mode."""
        return self._subject.train

    @train.setter
    def train(self, value: bool) -> None:
        self._subject.train = value

    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters and running statistics by name."""
        parameters = self._subject.parameters()
        for fold in self.folds:
            folded = parameters.pop(fold.folded)
            if fold.summed < folded.shape[0]:
                parameters[fold.folded] = dataclasses.replace(folded, shape=(folded.shape[0] - fold.summed,))
        return parameters

    def weights(self) -> Arrays:
        """Return copies of the weights that it holds, biases added."""
        arrays = self._subject.weights()
        for fold in self.folds:
            folded = arrays.pop(fold.folded)
            kept = wide(arrays[fold.kept]).copy()
            kept[: fold.summed] += wide(folded)[: fold.summed]
            arrays[fold.kept] = kept.astype(folded.dtype)
            if fold.summed < folded.size:
                arrays[fold.folded] = folded[fold.summed :].copy()
        return arrays

    def _unfolded(self, weights: Mapping[str, Array]) -> Arrays:
        arrays = dict(weights)
        for fold in self.folds:
            nothing = np.zeros(fold.summed, arrays[fold.kept].dtype)
            arrays[fold.folded] = np.concatenate([nothing, arrays[fold.folded]]) if fold.folded in arrays else nothing
        return arrays

    def _folded(self, run: Run) -> Run:
        gradients = dict(run.parameter_gradients)
        for fold in self.folds:
            gradient = gradients.pop(fold.folded, None)
            if gradient is not None and fold.summed < gradient.size:
                gradients[fold.folded] = gradient[fold.summed :]
        return dataclasses.replace(run, parameter_gradients=gradients)

    def run(self, weights: Mapping[str, Array], *call: Any, **options: Any) -> Run:
        """Run forward, and backward if there are cotangents."""
        return self._folded(self._subject.run(self._unfolded(weights), *call, **options))

    def uses(self, weights: Mapping[str, Array], arguments: Arguments) -> dict[str, int]:
        """Return weight -> number of the first operation that combines it with values that depend on inputs."""
        uses: dict[str, int] = self._subject.uses(self._unfolded(weights), arguments)
        return uses

    def describe_outputs(
        self, weights: Mapping[str, Array], arguments: Arguments
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Return place, shape and dtype of every output of a call."""
        return self._subject.describe_outputs(self._unfolded(weights), arguments)

    def dtypes(self, weights: Mapping[str, Array], arguments: Arguments, dtype: str | None = None) -> list[DtypeCall]:
        """Return the dtypes of all calls of a forward pass."""
        return self._subject.dtypes(self._unfolded(weights), arguments, dtype)

    def record(self, weights: Mapping[str, Array], *call: Any, **options: Any) -> list[Call]:
        """Return every call of every submodule with its inputs, outputs and cotangents."""
        return self._subject.record(self._unfolded(weights), *call, **options)

    def substituted(
        self,
        weights: Mapping[str, Array],
        arguments: Arguments,
        cotangents: Sequence[Array],
        substitutes: Mapping[str, Sequence[Substitute]],
    ) -> tuple[Run, list[Call]]:
        """Do so with the results of some submodules' calls replaced, and return the results of the whole as well."""
        run, calls = self._subject.substituted(self._unfolded(weights), arguments, cotangents, substitutes)
        return self._folded(run), calls

    def changes(
        self,
        weights: Mapping[str, Array],
        samples: Sequence[tuple[Arguments, Sequence[Array]]],
        *,
        path: str = "",
    ) -> list[tuple[str, str]]:
        """Return the changes of one operation of a submodule that give other outputs."""
        return self._subject.changes(self._unfolded(weights), samples, path=path)

    def gradient_changes(
        self,
        weights: Mapping[str, Array],
        samples: Sequence[GradientSample],
        differing: Collection[str | int],
        *,
        path: str = "",
    ) -> list[tuple[str, str]]:
        """Return the operands to stop the gradients of, or to let them pass to."""
        return self._subject.gradient_changes(self._unfolded(weights), samples, differing, path=path)
