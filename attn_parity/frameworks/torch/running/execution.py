"""One run of a part of a subject: from its precision and mode to its results, or to a one-line error.

Gradients are computed per source by ``torch.autograd.grad``, or accumulated as ``loss.backward()`` does.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import pathlib
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_attn.backend import to_numpy
from torch_attn.shards import cut_as, is_sharded

from ....sides.arrays import lends
from ....sides.dropout_masks import Masks
from ....sides.shards import Shares
from ....sides.subject import (
    WHOLE,
    Arguments,
    Array,
    CannotPromoteError,
    ModuleFailedError,
    Run,
    culprit,
    failure_of,
)
from ....sides.tables import STILL, Branches
from ....sides.trees import plain_values
from ..probes.flash import Flash, LogSumExp
from ..probes.literals import DispatchLiterals
from ..probes.rounding import Rounding
from ..probes.uses import Uses
from ..weights import TorchPart, outputs_of
from .gradients import StoppedCalls
from .lent import LentTensor, Loan, returned
from .operations import ChangedCalls
from .promotion import promoted
from .replicas import cut_of, read
from .state import StateChanges, Watching, eager, undisturbed, unregistered
from .tables import DispatchTables

if TYPE_CHECKING:
    from ..subject import TorchSubject

COMPILED = ("jit", "inductor", "aot")
"""Modes in which torch.compile runs the code; what gives way to its compiler is left out there."""


class Execution:
    """One run of a part of a subject: how it is run, from `TorchSubject.run`."""

    def __init__(
        self,
        subject: TorchSubject,
        part: TorchPart,
        path: str,
        dtype: str | None,
        mode: str,
        seed: int,
        masks: int,
        tables: frozenset[int],
        calls: ChangedCalls | StoppedCalls | None = None,
    ):
        self.subject, self.part, self.path = subject, part, path
        self.dtype, self.mode, self.seed, self.tables = dtype, mode, seed, tables
        self.masks = masks
        self.calls = calls
        self.branches = Branches() if (dtype, mode, path, calls) == ("float64", "eager", "", None) else None
        self.label = f"{subject.kind} {part.name}"

    def results(
        self,
        weights: Mapping[str, Array],
        arguments: Arguments,
        cotangents: Sequence[Array | None] | None,
        accumulate: bool,
    ) -> Run:
        """Run it; `accumulate` has gradients added to their leaves, as ``loss.backward()`` does."""
        source = Masks(self.masks) if self.subject.train else None
        with self._prepared(source) as drawn:
            tensors = self._weights(weights)
            leaves = self._cut([self.subject.tensor(leaf, self.dtype) for leaf in arguments.leaves])
            leaves = [leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves]
            tensors_of_cotangents = [
                None if one is None else self.subject.tensor(one, None) for one in cotangents or ()
            ]
            try:
                operands = [*tensors.values(), *map(_source, tensors.values()), *leaves]
                with self._probe(operands, tensors_of_cotangents, tensors) as probe, self._holding(tensors) as call:
                    changes = StateChanges(
                        self.subject.side.modules() if not self.path and self.mode == "eager" else {}
                    )
                    result = call(arguments.with_leaves(self._given(leaves, probe)))
                    self.subject.changed |= changes.found()
                    self.subject.plain = plain_values(result)
                    structure, outputs = outputs_of(result, self.label, WHOLE if self.path else self.subject.returned)
                    apart, mesh = [*self.subject.apart], self.subject.mesh
                    places = zip(structure, outputs, strict=True)
                    # before a checkpoint that computes again writes to them
                    results = [_copy(one, f"output{place}", apart, mesh) for place, one in places]
                    sources = [] if cotangents is None else [*leaves, *map(_source, tensors.values())]
                    names = [f"grad {name}" for name in (*arguments.named(self.subject.argument_names), *tensors)]
                    gradients = gradients_of(
                        outputs,
                        tensors_of_cotangents,
                        sources,
                        accumulate,
                        lambda at, tensor: _read(tensor, names[at], apart, mesh),
                    )
            except (CannotPromoteError, ModuleFailedError, NeedsBackwardError):
                raise
            except Exception as error:  # whatever the module raises is told as its own
                names = arguments.named(self.subject.argument_names)
                labels = [
                    f"{name} {leaf.dtype.name} {leaf.shape}" for name, leaf in zip(names, arguments.leaves, strict=True)
                ]
                raise failure(error, self.dtype, self.label, self.subject.side.modules(), labels) from error
            named = dict(zip(tensors, gradients[len(leaves) :], strict=False))
            lent = {name: one for name, one in tensors.items() if name in named and isinstance(one, LentTensor)}
            named |= {name: _gradient(one) for name, one in lent.items()}
            return Run(
                results,
                structure,
                gradients[: len(leaves)],
                {self.part.names[name]: one for name, one in named.items() if one is not None},
                [] if source is None else source.draws,
                drawn is not None and drawn.foreign(),
                getattr(probe, "moved", 0),
                probe.met if isinstance(probe, (DispatchTables, DispatchLiterals)) and self.seed == STILL else None,
                self._shares(outputs, tensors, apart),
                {self.part.names[name]: at for name, at in probe.first_uses.items()} if isinstance(probe, Uses) else {},
                self.branches,
            )

    def _shares(self, outputs: Sequence[Tensor], tensors: Mapping[str, Tensor], apart: Sequence[str]) -> Shares:
        """Return how devices share the results."""
        if self.subject.mesh is None and not any(map(is_sharded, outputs)):
            return Shares()
        cuts = {self.part.names[name]: cut_of(one) for name, one in tensors.items() if is_sharded(one)}
        parameters = {name: cut for name, cut in cuts.items() if cut.is_cut}
        return Shares(tuple(map(cut_of, outputs)), parameters, tuple(apart))

    @contextlib.contextmanager
    def _prepared(self, source: Masks | None) -> Iterator[Any]:
        """Enter modes, precision, masks, and contexts that leave the user's process unchanged."""
        subject = self.subject
        modules = subject.side.modules()
        hidden = unregistered(modules, subject.name, subject.side.call)
        with contextlib.ExitStack() as stack:
            stack.enter_context(undisturbed(modules.values(), self.seed, subject.train))
            if self.mode in COMPILED or "torch._dynamo" in sys.modules:
                stack.enter_context(_quiet())
            if self.mode not in COMPILED and (self.mode, self.dtype, subject.train) != ("eager", None, False):
                stack.enter_context(eager())
            stack.enter_context(precision_of(self.dtype, self.branches))
            drawn = stack.enter_context(subject.drawing(source))
            if hidden and self.mode not in COMPILED:
                stack.enter_context(Watching(hidden, self.label))
            stack.enter_context(differentiable())
            yield drawn

    def _weights(self, weights: Mapping[str, Array]) -> dict[str, Tensor]:
        """Return weights as tensors; trainable ones (no running statistics, no integers) get gradients."""
        names = {name: whole for name, whole in self.part.names.items() if whole in weights}
        lent = {
            name: LentTensor.of(Loan(weights[whole]))
            for name, whole in names.items()
            if lends(weights[whole], self.dtype)
            and name in self.part.trainable
            and self.subject.device.type == "cpu"
            and not is_sharded(self.part.tensors[name])
        }
        tensors = {
            name: lent[name]
            if name in lent
            else cut_as(self.subject.tensor(weights[whole], self.dtype), self.part.tensors[name])
            for name, whole in names.items()
        }
        for name, tensor in tensors.items():
            if name not in lent:
                tensor.requires_grad_(name in self.part.trainable and tensor.is_floating_point())
        return tensors

    def _cut(self, leaves: list[Tensor]) -> list[Tensor]:
        """Return a submodule's inputs, sharded as they were when the whole ran: its hooks receive plain arrays."""
        parts = self.subject.parts.get(self.path, ())
        if len(parts) != len(leaves):
            return leaves
        pairs = zip(leaves, parts, strict=True)
        return [one if like is None or like.shape != one.shape else cut_as(one, like) for one, like in pairs]

    @contextlib.contextmanager
    def _holding(self, tensors: dict[str, Tensor]) -> Iterator[Callable[..., object]]:
        compiled = self.mode in COMPILED
        target = self.subject.compiled(self.part, self.path, self.mode) if compiled else self.part.target
        lends_any = any(isinstance(one, LentTensor) for one in tensors.values())
        with (
            self.part.holding({**self.subject.constants(self.part, self.dtype), **tensors}, target) as call,
            returned() if lends_any else contextlib.nullcontext(),
        ):
            yield call

    @contextlib.contextmanager
    def _probe(
        self, tensors: list[Tensor], cotangents: list[Tensor | None], weights: Mapping[str, Tensor]
    ) -> Iterator[Any]:
        """Enter the probe of the run's mode and yield it; `tensors` are weights and inputs."""
        if self.mode == "jitter":
            floats = [one.dtype for one in tensors if one.is_floating_point()]
            with Rounding(self.seed, low=not floats or any(one != torch.float64 for one in floats)) as rounding:
                yield rounding
        elif self.mode == "tables":
            floating = [one for one in (*tensors, *cotangents) if one is not None and one.is_floating_point()]
            tables = DispatchTables(self.seed, floating)
            with tables.following():
                yield tables
        elif self.mode == "literals":
            with DispatchLiterals(self.seed) as literals:
                yield literals
        elif self.mode == "logsumexp":
            with LogSumExp(tensors) as formula:
                yield formula
        elif self.mode == "flash":
            with Flash(self.seed) as attention:
                yield attention
        elif self.calls is not None:
            with self.calls:
                yield self.calls
        elif self.mode == "uses":
            with Uses(weights, tensors[2 * len(weights) :]) as uses:
                yield uses
        else:
            yield None

    def _given(self, leaves: list[Tensor], probe: object) -> list[Tensor]:
        """Return the arguments for the code: copies, which it may write to."""
        if not isinstance(probe, DispatchTables):
            return [leaf.clone() for leaf in leaves]
        return [probe.table(leaf) if place in self.tables else leaf.clone() for place, leaf in enumerate(leaves)]


def _source(tensor: Tensor) -> Tensor:
    """Return the tensor with respect to which a weight's gradient is computed."""
    return tensor.loan.anchor if isinstance(tensor, LentTensor) else tensor


def _gradient(lent: LentTensor) -> Array:
    """Return the gradient accumulated for a large weight; zeros if nothing depends on it."""
    loan = lent.loan
    return np.zeros(loan.array.shape) if loan.gradient is None else loan.gradient


def _copy(tensor: Tensor, what: str, apart: list[str], mesh: object) -> Array:
    """Return a tensor as a new array."""
    with torch._C.DisableTorchFunction():  # what is done here is not the module's
        return np.array(_read(tensor, what, apart, mesh), copy=True)


def _read(tensor: Tensor, what: str, apart: list[str], mesh: object) -> Array:
    """Return a tensor as an array, and note where devices hold other copies of it."""
    if mesh is None and not is_sharded(tensor):
        return to_numpy(tensor)
    array, difference = read(tensor, what, mesh)
    if difference:
        apart.append(difference)
    return array


def as_written(run: Callable[[], Run]) -> Run:
    """Run code without torch's compiler; repeat the run if it was the first to import the compiler.

    The compiler can be disabled only once it is imported.
    """
    is_imported = "torch._dynamo" in sys.modules
    try:
        result = run()
    except Exception:  # perhaps only for the compiler that was not told to stand back
        if is_imported or "torch._dynamo" not in sys.modules:
            raise
    else:
        if is_imported or "torch._dynamo" not in sys.modules:
            return result
    return run()


def can_build_extensions() -> bool:
    """Return whether torch.compile can build its CPU kernels here: a C++ compiler and Python.h."""
    compilers = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    headers = pathlib.Path(sysconfig.get_paths()["include"], "Python.h")
    return headers.exists() and any(shutil.which(compiler) for compiler in compilers if compiler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch.compile from warning that it looks for the gradient of a copy of an input."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def precision_of(dtype: str | None, branches: Branches | None = None) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a run has the precision `dtype`; in float64, branches are noted."""
    return promoted(branches) if dtype == "float64" else contextlib.nullcontext()


CONSTANT = "bind an array without a gradient to the code, as functools.partial does, in place of a weight or an input"
"""Remedy where torch has no derivative with respect to an array, such as the class weights of its losses."""


def failure(
    error: Exception,
    dtype: str | None,
    what: str,
    modules: Mapping[str, nn.Module] | None = None,
    inputs: Sequence[str] = (),
) -> Exception:
    """Return the error to raise for an exception of the user's code: one line with its text, location and arguments."""
    details = ""
    if isinstance(error, (RuntimeError, TypeError, ValueError, IndexError)) and not _is_raised_by_user(error):
        paths = {id(child): path for path, child in (modules or {}).items()}
        details = culprit(error, lambda module: paths.get(id(module)), lambda module: module._parameters)
        if not details and inputs:
            details = f"called with {', '.join(inputs)}"
    failed = failure_of(error, dtype, what, details)
    is_constant = "is not differentiable with respect to argument" in str(error)
    return type(failed)(f"{failed}; {CONSTANT}") if is_constant else failed


def _is_raised_by_user(error: Exception) -> bool:
    """Return whether a raise statement outside torch raised the error; its message then needs no details."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or at.tb_frame.f_globals.get("__name__", "").startswith("torch."):
        return False
    return at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]


class NeedsBackwardError(Exception):
    """Gradients could not be asked for by their sources; a checkpoint with ``use_reentrant=True`` accumulates them."""


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Hold the context in which gradients can be asked for, whatever the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def gradients_of(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    sources: Sequence[Tensor],
    accumulate: bool,
    read: Callable[[int, Tensor], Array],
) -> list[Array | None]:
    """Return the gradient of each source; None if it requires none, zeros if no output depends on it.

    Args:
        outputs: the tensors to differentiate.
        cotangents: gradient of the loss for each output, or None.
        sources: the tensors to differentiate with respect to.
        accumulate: add the gradients to their sources, as ``loss.backward()`` does.
        read: makes an array of the gradient of the source at a position.

    Raises:
        NeedsBackwardError: the graph has a checkpoint that only accumulates.
    """
    wanted = [source for source in sources if source.requires_grad]
    with torch._C.DisableTorchFunction():  # what is done here is not the module's
        pairs = [
            (output, cut_as(cotangent.to(output.device, output.dtype), output))
            for output, cotangent in zip(outputs, cotangents, strict=bool(cotangents))
            if output.requires_grad and cotangent is not None
        ]
    if not pairs or not wanted:
        return [_zeros_for(None, source) if source.requires_grad else None for source in sources]
    edge = torch.autograd.graph.get_gradient_edge  # given tensors, torch would leave the modes that are entered
    roots = tuple(edge(output) for output, _ in pairs)
    cotangents_of_roots = tuple(cotangent for _, cotangent in pairs)
    # As `torch.autograd.grad` and `backward`, which first import SymPy to compare shapes: half a second.
    differentiate = torch.autograd.graph._engine_run_backward
    if accumulate:
        differentiate(roots, cotangents_of_roots, False, False, (), True, accumulate_grad=True)
        gradients = iter([source.grad for source in wanted])
    else:
        edges = tuple(map(edge, wanted))
        try:
            gradients = iter(
                differentiate(roots, cotangents_of_roots, False, False, edges, True, accumulate_grad=False)
            )
        except RuntimeError as error:
            raise NeedsBackwardError from error
    return [
        _zeros_for(_numpy_or_none(next(gradients), functools.partial(read, position)), one)
        if one.requires_grad
        else None
        for position, one in enumerate(sources)
    ]


def _zeros_for(gradient: Array | None, tensor: Tensor) -> Array:
    """Return the gradient, or zeros in the shape of the tensor for None."""
    if gradient is not None:
        return gradient
    return np.zeros(tuple(tensor.shape), to_numpy(tensor[..., :0] if tensor.ndim else tensor).dtype)


def _numpy_or_none(gradient: Tensor | None, read: Callable[[Tensor], Array]) -> Array | None:
    return None if gradient is None else read(gradient if gradient.layout == torch.strided else gradient.to_dense())
