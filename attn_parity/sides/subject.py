"""Data that the judge exchanges with the subjects of both backends: arguments, parameters, runs and recorded calls.

A subject (``subject.py`` in each room of `frameworks`) runs any side of its framework without changing it; its results
are NumPy arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from attn_bridge import backends
from attn_bridge.backends import Framework

from .dropout_masks import Draw
from .shards import Shares
from .tables import Branches, Tables
from .trees import flatten, replace

Array = np.ndarray
Arrays = dict[str, Array]


MAX_TEXT = 300
"""Most characters of an exception in a message."""


class CannotPromoteError(Exception):
    """The module has a part that exists in its own precision only, so that it can't be run in float64."""


class ModuleFailedError(ValueError):
    """The user's module, or its return value, cannot be compared; the message is one line."""


def culprit(
    error: BaseException, path_of: Callable[[Any], str | None], held_by: Callable[[Any], Mapping[str, Any]]
) -> str:
    """Describe the innermost submodule that raised an error, its own weights and its arguments; "" if outside of any.

    Args:
        error: the error, with its traceback.
        path_of: the path of a submodule; None for anything else.
        held_by: name -> weight that a submodule holds itself.
    """
    description, at = "", error.__traceback__
    while at is not None:
        code, variables = at.tb_frame.f_code, at.tb_frame.f_locals
        owner = variables.get("self")
        path = None if owner is None or code.co_name not in ("forward", "__call__") else path_of(owner)
        if path is not None:
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
            shapes = [_shapes({name: variables[name]}) for name in code.co_varnames[1:count] if name in variables]
            weights, shapes = _shapes(held_by(owner)), [one for one in shapes if one]
            what = [f"holds {weights}"] * bool(weights) + [f"was called with {', '.join(shapes)}"] * bool(shapes)
            description = (
                f"{f'{path} ({type(owner).__name__})' if path else 'the module itself'} {' and '.join(what)}".strip()
            )
        at = at.tb_next
    return description


_TAKEN_FOR_INPUT = re.compile(r"'dict' object|\bdict\b|positional argument")


def weights_first(error: BaseException, what: str) -> str:
    """Return the remedy where a function side may take its weights for an input; "" for other errors and modules."""
    is_taken = isinstance(error, (TypeError, AttributeError)) and _TAKEN_FOR_INPUT.search(str(error))
    if not is_taken or " function " not in f"{what} ":
        return ""
    return "; it is called with its weights in front of the inputs: give lambda weights, *inputs: FUNCTION(*inputs)"


def failure_of(error: Exception, dtype: str | None, what: str, details: str = "") -> Exception:
    """Return the error to raise for an exception of a side's code: one line with its text, its location and details."""
    from ..stack import raised_at

    text = " ".join(str(error).split()) or "no message"
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."
    details = "; ".join(filter(None, (raised_at(error), details)))
    message = f"{what} raised {type(error).__name__}: {text}{f' ({details})' if details else ''}"
    message += weights_first(error, what)
    return CannotPromoteError(message) if dtype == "float64" else ModuleFailedError(message)


def _shapes(named: Mapping[str, object]) -> str:
    """Return ``name float32 (2, 3)`` of every array; those of a tuple or list by their position."""
    phrases = []
    for name, value in named.items():
        places = enumerate(value) if isinstance(value, (tuple, list)) else ()
        parts = {f"{name}[{place}]": one for place, one in places} or {name: value}
        arrays = {key: one for key, one in parts.items() if hasattr(one, "shape") and hasattr(one, "dtype")}
        phrases += [f"{key} {str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for key, one in arrays.items()]
    return ", ".join(phrases)


def signature_of(function: Any) -> dict[str, bool]:
    """Return argument name -> whether it can be given by position."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {
        one.name: one.kind in positional for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }


def is_array(value: object) -> bool:
    """Return whether a leaf of arguments is a NumPy array."""
    return isinstance(value, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of a call; arrays are NumPy's, at any depth, and anything else is passed on as it is."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def leaves(self) -> list[Array]:
        """All arrays, in order: of positional arguments, then of keywords as they were given."""
        return [leaf for _, leaf in self._flat]

    @property
    def paths(self) -> list[str]:
        """Where each array stands: ``[0]``, ``['x']``, ``[1][0]``."""
        return [path for path, _ in self._flat]

    @property
    def _flat(self) -> list[tuple[str, Array]]:
        leaves = flatten(self.args, is_array)
        for key, value in self.kwargs.items():
            leaves += flatten(value, is_array, f"[{key!r}]")
        return leaves

    def with_leaves(self, leaves: Sequence[object]) -> Arguments:
        """Return the same call with other arrays (of any framework)."""
        args, values = replace((self.args, list(self.kwargs.values())), is_array, leaves)
        return Arguments(args, dict(zip(self.kwargs, values, strict=True)))

    def named(self, names: Sequence[str]) -> list[str]:
        """Return a name for each array, given the names of positional arguments."""
        leaf_names = []
        for path, _ in flatten(self.args, is_array):
            position, _, rest = path[1:].partition("]")
            leaf_names.append((names[int(position)] if int(position) < len(names) else f"inputs[{position}]") + rest)
        for key, value in self.kwargs.items():
            leaf_names += [f"{key}{path}" for path, _ in flatten(value, is_array)]
        return leaf_names

    def plain(self, names: Sequence[str]) -> list[str]:
        """Return the names of the arguments that are Python numbers, bools or strings instead of arrays."""
        positional = [(names[i] if i < len(names) else f"inputs[{i}]", one) for i, one in enumerate(self.args)]
        passed = (*positional, *self.kwargs.items())
        return [name for name, one in passed if isinstance(one, (bool, int, float, complex, str))]


@dataclasses.dataclass(frozen=True)
class SideWeight:
    """A weight of a module: shape, dtype, role, and the class and path of the module that owns it.

    `role` is ``parameter`` (trainable), ``statistic`` (a running mean or variance) or ``state`` (any other numbers kept
    between calls); `framework` is ``torch`` or ``flax``; `frozen` parameters are not trained: they have no gradient,
    and every sample keeps their numbers. State that is not `persistent` is absent from checkpoints: code computes it.
    """

    shape: tuple[int, ...]
    dtype: str
    owner: str
    path: str
    role: str = "parameter"
    framework: str = ""
    frozen: bool = False
    persistent: bool = True


@dataclasses.dataclass(frozen=True)
class Submodule:
    """A submodule: its dotted path and its class."""

    path: str
    type: str


@dataclasses.dataclass(frozen=True)
class Returned:
    """The part of the whole module's return value that is judged.

    Attributes:
        entry: attribute, key or position; None is all of it.
        axes: path of an output -> the order of its axes in which it is judged, where the side has another one.
    """

    entry: str | None = None
    axes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


WHOLE = Returned()


@dataclasses.dataclass(frozen=True)
class Run:
    """Results of one forward and backward pass.

    Attributes:
        outputs: the returned arrays, in order.
        structure: path of each output in the return value; "" is a bare array.
        input_gradients: per input array its gradient; None for one that is not floating point.
        parameter_gradients: name -> gradient.
        draws: the requested dropout masks, in train mode.
        foreign: whether other random numbers were drawn, in train mode.
        moved: how many values the mode ``tables`` moved, or how many operations ``logsumexp`` or ``flash`` replaced.
        tables: the tables that the mode ``tables`` met; None if not recorded.
        shares: how devices share the results.
        uses: name of a weight -> position of its first operation that depends on the inputs, in the mode ``uses``.
        branches: the branches of its code that it took, in float64; None if not recorded.
    """

    outputs: list[Array]
    structure: list[str]
    input_gradients: list[Array | None] = dataclasses.field(default_factory=list)
    parameter_gradients: Arrays = dataclasses.field(default_factory=dict)
    draws: list[Draw] = dataclasses.field(default_factory=list)
    foreign: bool = False
    moved: int = 0
    tables: Tables | None = None
    shares: Shares = dataclasses.field(default_factory=Shares)
    uses: Mapping[str, int] = dataclasses.field(default_factory=dict)
    branches: Branches | None = None


@dataclasses.dataclass(frozen=True)
class Substitute:
    """Replacement results for one submodule call, and terms to add to the gradients of its inputs.

    Attributes:
        outputs: the arrays to return, in order; None keeps the call's own array.
        added: per input array the term added to its gradient; None adds nothing.
    """

    outputs: list[Array | None]
    added: list[Array | None]


@dataclasses.dataclass(frozen=True)
class OutputSample:
    """One call of a submodule, all weights by name, and the outputs wanted."""

    weights: Mapping[str, Array]
    arguments: Arguments
    wanted: Sequence[Array]


@dataclasses.dataclass(frozen=True)
class GradientSample:
    """One call of a submodule, all weights by name, the gradients of its outputs, and whether a run is as wanted."""

    weights: Mapping[str, Array]
    arguments: Arguments
    cotangents: Sequence[Array | None]
    agrees: Callable[[Run], bool]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a submodule, recorded while the whole module ran.

    Attributes:
        path: dotted path of the submodule.
        number: 0 for its first call, 1 for its second ...
        order: position among all calls, by start.
        arguments: the arguments of the call.
        outputs: the returned arrays.
        cotangents: gradient of the loss with respect to each output; None for one without.
    """

    path: str
    number: int
    order: int
    arguments: Arguments
    outputs: list[Array]
    cotangents: list[Array | None]


@dataclasses.dataclass(frozen=True)
class DtypeCall:
    """The dtypes of one call of a submodule, or of the whole module (path "").

    Attributes:
        path: dotted path of the submodule.
        start: position among all calls, by start.
        end: number of calls that began before this one ended: those from `start` on are inside it.
        inputs: names of the dtypes of the arrays that it was given.
        outputs: those of the arrays that it returned.
    """

    path: str
    start: int
    end: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Subject(Protocol):
    """Interface of a runnable side; both backends implement it and document the methods."""

    device: Any
    train: bool
    framework: Framework
    returned: Returned
    """The part of the whole module's return value that is judged."""
    plain: Mapping[str, Any]
    """Path in the return value -> a Python number, bool or string."""
    kind: str
    """``torch module``, ``NNX module``, ``Linen module``, ``torch function`` or ``JAX function``."""

    @property
    def changed(self) -> Collection[str]:
        """Names that calls changed, other than weights and running statistics."""

    @property
    def name(self) -> str:
        """Class of the module."""

    @property
    def argument_names(self) -> list[str]:
        """Names of the positional arguments of a call."""

    @property
    def holds_float64(self) -> bool:
        """Whether modules can hold float64: JAX makes it float32 unless ``jax_enable_x64`` is set."""

    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters and running statistics by name, and the state that `carry` named."""

    def state(self) -> dict[str, SideWeight]:
        """Return name -> buffer, variable or collection's leaf that holds numbers and is not among the parameters."""

    def carry(self, names: Collection[str]) -> None:
        """Count the state of these names, and no other, among the parameters from now on."""

    def weights(self) -> Arrays:
        """Return copies of the weights that the module holds."""

    def tied(self) -> dict[str, str]:
        """Return further name of a weight -> the name that it has in `parameters`."""

    def few_threads(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for small work."""

    def modules(self) -> list[Submodule]:
        """Return the submodules, the module itself first."""

    def settings(self) -> dict[str, Mapping[str, object]]:
        """Return path -> the numbers that a submodule's meaning depends on."""

    def modes(self, arguments: Arguments) -> dict[str, bool]:
        """Return name -> default of the arguments of this call that switch between train and eval mode."""

    def unreached(self, arguments: Arguments) -> list[str]:
        """Describe the branches that a call in eval mode does not reach."""

    def run(
        self,
        weights: Mapping[str, Array],
        arguments: Arguments,
        cotangents: Sequence[Array | None] | None = None,
        *,
        dtype: str | None = None,
        mode: str = "eager",
        seed: int = 0,
        path: str = "",
        masks: int = 0,
        tables: Collection[int] = (),
    ) -> Run:
        """Run forward, and backward if there are cotangents.

        Args:
            weights: all weights by name; a submodule takes its own from them.
            arguments: the call; floating-point arrays get gradients.
            cotangents: one array per output (None for none).
            dtype: precision of the whole run; None leaves every dtype as given.
            mode: ``eager`` or ``jit`` (torch.compile, jax.jit of the whole); ``jitter`` (every operation rounds at
                random); ``tables`` and ``literals`` (in float64, what depends on no weight and no input, or a literal,
                is moved by a float32 unit; with the seed `STILL` by none); ``logsumexp`` (softmax by the formula of
                FlashAttention's backward pass); ``flash`` (in float64, fused attention alone by that formula, rounded
                at random; with the seed `STILL` by softmax itself; JAX has none that computes in it). Of torch alone
                ``inductor`` and ``aot`` (torch.compile of one whole graph, with or without C++ code), of JAX alone
                ``quick`` (``jit`` with a tenth of the compiling) and ``untraced`` (as a call runs it).
            seed: of the random numbers that the code may draw, and of the moves.
            path: the submodule to run instead of the whole.
            masks: which dropout masks, in train mode.
            tables: positions of the arrays among the arguments that are tables, in the mode of that name.

        Raises:
            ModuleFailedError: the code raised, or returned no array.
            CannotPromoteError: it can't be run in float64.
        """

    def uses(self, weights: Mapping[str, Array], arguments: Arguments) -> dict[str, int]:
        """Return weight -> number of the first operation that combines it with values that depend on inputs."""

    def describe_outputs(
        self, weights: Mapping[str, Array], arguments: Arguments
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Return place, shape and dtype of every output of a call."""

    def dtypes(self, weights: Mapping[str, Array], arguments: Arguments, dtype: str | None = None) -> list[DtypeCall]:
        """Return the dtypes of all calls of a forward pass, the whole module's first; JAX need not run for it.

        Args:
            weights: all weights by name.
            arguments: the call.
            dtype: precision of weights and inputs; None leaves every dtype as given.
        """

    def substituted(
        self,
        weights: Mapping[str, Array],
        arguments: Arguments,
        cotangents: Sequence[Array | None] | None,
        substitutes: Mapping[str, Sequence[Substitute]],
        *,
        path: str = "",
        dtype: str | None = "float64",
    ) -> tuple[Run, list[Call]]:
        """Run in a precision and return the results, and every call of every submodule with its inputs and outputs.

        Without cotangents it runs forward alone, and calls have none; the calls inside the submodule at `path` have
        their whole paths. The results of the calls in `substitutes`, by path, are replaced.
        """

    def changes(
        self, samples: Sequence[OutputSample], *, path: str = "", numbers: bool = False, has_literals: bool = True
    ) -> list[tuple[str, str]]:
        """Return the changes of one operation of a submodule that give other outputs, each with its line of code.

        Args:
            samples: calls of the submodule, and the outputs wanted of each.
            path: the submodule.
            numbers: whether numbers in its code are changed, instead of operations.
            has_literals: whether a side holds literals of float32 accuracy, by which results that agree may differ.
        """

    def gradient_changes(
        self, samples: Sequence[GradientSample], differing: Collection[str | int], *, path: str = ""
    ) -> list[tuple[str, str]]:
        """Return the operands to stop the gradients of, or to let them pass to, so that every sample agrees.

        Args:
            samples: calls of the submodule.
            differing: names of the weights and positions of the inputs whose gradients differ.
            path: the submodule.
        """


_ROOMS: dict[Framework, str] = {"torch": "torch", "flax": "jax"}


def load_adapter(framework: Framework, module: str = "subject") -> ModuleType:
    """Import a module that the rooms of both frameworks have.

    Args:
        framework: whose.
        module: its name; `subject` makes subjects of modules and functions.

    Raises:
        MissingBackendError: the framework is not installed.
    """
    return backends.import_for(framework, f"attn_parity.frameworks.{_ROOMS[framework]}.{module}")
