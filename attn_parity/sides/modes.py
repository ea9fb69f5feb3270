"""Arguments of a call that switch between train and eval mode, as Flax modules take them: ``train``, ``deterministic``.

torch modules hold their mode, and NNX modules can; a Linen module gets it with each call. `prepare` sets the arguments
that the user left out, so that both sides run in the mode that is judged.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .subject import Arguments, Subject

IN_TRAIN_MODE = {"train": True, "training": True, "is_training": True, "is_train": True, "deterministic": False}
"""Name of an argument -> its value in train mode."""


def names_in(code: types.CodeType) -> set[str]:
    """Return the names that code uses, with those of functions defined in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names, *(name for function in inner for name in names_in(function))}


def mode_arguments(call: Callable[..., object]) -> dict[str, bool]:
    """Return name -> default of the arguments of a function that switch modes and are bools by default."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return {}
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        one.name: one.default
        for one in parameters
        if one.name in IN_TRAIN_MODE and one.kind in by_keyword and isinstance(one.default, bool)
    }


def given_modes(arguments: Arguments, names: Sequence[str], defaults: Mapping[str, bool]) -> dict[str, object]:
    """Return name -> value of the arguments that switch modes in a call.

    Args:
        arguments: the call.
        names: of the positional arguments.
        defaults: name -> default of the arguments that switch modes.
    """
    passed = dict(zip(names, arguments.args, strict=False)) | dict(arguments.kwargs)
    return {name: value for name, value in passed.items() if name in defaults}


def contradicted(passed: Collection[str], defaults: Mapping[str, bool], *, train: bool) -> dict[str, bool]:
    """Return name -> value of the arguments that were not given, and whose defaults are those of the other mode."""
    wanted = {name: IN_TRAIN_MODE[name] is train for name in defaults if name not in passed}
    return {name: value for name, value in wanted.items() if value is not defaults[name]}


def called_with(arguments: Arguments, names: Sequence[str], values: Mapping[str, object]) -> Arguments:
    """Return a call with other values of some arguments, by position where they are given by position."""
    positional = names[: len(arguments.args)]
    args = [values.get(name, one) for name, one in zip(positional, arguments.args, strict=False)]
    added = {name: value for name, value in values.items() if name not in positional}
    return Arguments((*args, *arguments.args[len(args) :]), {**arguments.kwargs, **added})


@dataclasses.dataclass(frozen=True)
class Modes:
    """The arguments of a side's call that switch modes.

    Attributes:
        names: of all positional arguments.
        defaults: name -> default of the arguments that switch modes.
        passed: name -> value of those that the user gave.
    """

    names: Sequence[str]
    defaults: Mapping[str, bool]
    passed: Mapping[str, Any]

    @classmethod
    def of(cls, subject: Subject, call: Arguments) -> Modes:
        """Return those of a subject's call."""
        names, defaults = subject.argument_names, subject.modes(call)
        return cls(names, defaults, given_modes(call, names, defaults))

    def notes(self, label: str, *, train: bool) -> list[str]:
        """Return the notes on arguments that the user did not give and that a mode sets."""
        mode = "train" if train else "eval"
        return [
            f"{mode} mode: {label} is called with {name}={value}, which is {not value} by default"
            for name, value in contradicted(self.passed, self.defaults, train=train).items()
        ]

    def in_eval_mode(self, call: Arguments, label: str) -> tuple[Arguments, list[str]]:
        """Return the call with the arguments that eval mode sets, and the notes on them."""
        added = contradicted(self.passed, self.defaults, train=False)
        return called_with(call, self.names, added), self.notes(label, train=False)
