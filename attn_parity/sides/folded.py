"""A recurrent torch side with a single bias: torch layers add two biases, most other libraries store their sum.

The function is the same. The two biases become one parameter, with the gradient that either of them has.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .arrays import wide
from .subject import Array, Arrays, Call, Run, SideWeight, Subject

_BIAS = re.compile(r"(.*\.)?bias_ih(_l[0-9]+(_reverse)?)?")

_SUMMED = {"LSTM": 1.0, "LSTMCell": 1.0, "RNN": 1.0, "RNNCell": 1.0, "GRU": 2 / 3, "GRUCell": 2 / 3}
"""Class -> how much of its two biases is added; a GRU resets the last third, so that it stays apart."""


_TAKES_WEIGHTS = frozenset({"uses", "describe_outputs", "dtypes", "changes", "gradient_changes"})
"""Methods of a subject that take its weights first and return nothing by their names."""


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
        method = getattr(self._subject, name)
        if name not in _TAKES_WEIGHTS:
            return method
        return lambda weights, *call, **options: method(self._unfolded(weights), *call, **options)

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

    def substituted(self, weights: Mapping[str, Array], *call: Any, **options: Any) -> tuple[Run, list[Call]]:
        """Record the calls with the results of some replaced, and return the results of the whole as well."""
        run, calls = self._subject.substituted(self._unfolded(weights), *call, **options)
        return self._folded(run), calls
