"""Run any torch code for the parity judge, in its own precision, in float64 or part by part, and leave it unchanged.

`subject_of` takes a module or a pure function with its weights. Runs take and return NumPy arrays. Weights stay swapped
in until the backward pass is done: the user's own tensors, gradients, modes and random state stay as they are, and a
checkpoint recomputes with the same weights in the same precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from torch_attn.backend import few_threads, from_numpy, to_numpy
from torch_attn.functional import dtype_name
from torch_attn.shards import is_sharded

from ...hints.settings import read as read_settings
from ...sides.arrays import class_of, is_large
from ...sides.dropout_masks import MaskPlan, Masks
from ...sides.subject import (
    WHOLE,
    Arguments,
    Array,
    Arrays,
    Call,
    DtypeCall,
    GradientSample,
    OutputSample,
    Run,
    SideWeight,
    Submodule,
    Substitute,
)
from ...sides.trees import plain_values
from .drawing import drawing
from .recording import CallRecorder, DtypeRecorder
from .running.execution import Execution, NeedsBackwardError, as_written, can_build_extensions
from .running.gradients import StoppedCalls
from .running.gradients import found as stopped_in
from .running.operations import ChangedCalls, found
from .running.replicas import read
from .running.state import ONE_AT_A_TIME, asks_for_mode, eager, undisturbed
from .substitution import Substitution
from .weights import ModuleSide, TorchFunctionSide, TorchPart, check_readable, device_of, outputs_of, side_of

LARGE = 1 << 24
"""Weights of a module from which on a run is worth avoiding."""


def subject_of(value: object, device: str | None = None, *, train: bool = False) -> TorchSubject:
    """Make a torch side runnable.

    Args:
        value: an `nn.Module`, or a `Function`: a pure function with the tree of its weights.
        device: where it runs; None is the device of its weights.
        train: run it in train mode, with shared dropout masks, instead of in eval mode.

    Raises:
        ModuleFailedError: the value is of another type, or the device is missing.
    """
    return TorchSubject(value, device, train=train)


class TorchSubject:
    """Runs one torch module or function on NumPy arrays; the arguments are those of `subject_of`.

    Raises:
        ModuleFailedError: the value is of another type, or the device is missing.
    """

    framework = "torch"
    changed: set[str]
    """Names that calls changed, other than weights and running statistics."""

    def __init__(self, value: object, device: str | None = None, *, train: bool = False):
        self.side: ModuleSide | TorchFunctionSide = side_of(value)
        self.train = train
        self.device = device_of(self.side.tensors(), device)
        self.changed = set()
        self.mesh = next((one.device_mesh for one in self.side.tensors().values() if is_sharded(one)), None)
        self.apart: list[str] = []
        self.plain: dict[str, object] = {}
        self.returned = WHOLE
        self.parts: dict[str, list[Tensor | None]] = {}
        self._compiled: dict[tuple[str, str], nn.Module] = {}
        self._accumulates = False

    @property
    def kind(self) -> str:
        """The kind of side: ``torch module`` or ``torch function``."""
        return self.side.kind

    @property
    def name(self) -> str:
        """Class of the module, or name of the function."""
        return self.side.name

    @property
    def argument_names(self) -> list[str]:
        """Names of the positional arguments of a call."""
        return [name for name, positional in self.side.signature().items() if positional]

    @property
    def holds_float64(self) -> bool:
        """Whether modules can hold float64; torch's always can."""
        return True

    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters and running statistics by name, and the state that `carry` named."""
        with ONE_AT_A_TIME:
            return self.side.parameters()

    def state(self) -> dict[str, SideWeight]:
        """Return name -> buffer, without running statistics."""
        with ONE_AT_A_TIME:
            return self.side.state()

    def carry(self, names: Collection[str]) -> None:
        """Count the buffers of these names, and no other, among the parameters."""
        self.side.carry(names)

    def weights(self) -> Arrays:
        """Return copies of the weights that it holds; large ones are its own, where they lie in memory as NumPy has it.

        Raises:
            ModuleFailedError: one of them is sparse, nested, quantised or on the meta device.
        """
        with ONE_AT_A_TIME:  # a run in another thread has the module hold its own
            tensors = self.side.tensors()
            tensors = {name: tensors[name] for name in self.parameters()}
            check_readable(tensors, f"{self.kind} {self.name}")
            arrays = {}
            self.apart = []
            for name, tensor in tensors.items():
                if self.mesh is None:
                    arrays[name] = to_numpy(tensor)
                    continue
                arrays[name], difference = read(tensor, f"weight {name}", self.mesh)
                self.apart += [difference] if difference else []
            return {name: array if is_large(array) else array.copy() for name, array in arrays.items()}

    def tied(self) -> dict[str, str]:
        """Return further name of a weight -> the name that it has in `parameters`."""
        return self.side.tied()

    def few_threads(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for small work: one thread, because on a busy machine several wait for each other."""
        return few_threads()

    def modules(self) -> list[Submodule]:
        """Return the submodules, the whole itself first."""
        modules = self.side.modules()
        return [Submodule(path, type(child).__name__ if path else self.name) for path, child in modules.items()]

    def settings(self) -> dict[str, Mapping[str, object]]:
        """Return path -> the settings that a submodule's meaning depends on and its weights don't show."""
        with ONE_AT_A_TIME:
            return {path: read_settings(child) for path, child in {**self.side.modules(), **self.side.layers}.items()}

    def modes(self, arguments: Arguments) -> dict[str, bool]:
        """Return nothing: torch modules hold their mode themselves."""
        return {}

    def unreached(self, arguments: Arguments) -> list[str]:
        """Describe the parts of the side that a call does not reach, and the behaviour that the comparison ignores."""
        behaviour = []
        for path, child in self.side.modules().items():
            rate = next((getattr(child, name) for name in ("p", "dropout") if _is_rate(child, name)), 0.0)
            name = path or type(child).__name__
            if self.train:
                continue
            if rate and ("dropout" in type(child).__name__.lower() or isinstance(child, nn.MultiheadAttention)):
                behaviour.append(f"dropout of {name} ({rate:g}): off in eval mode")
            elif getattr(child, "running_mean", None) is not None:
                behaviour.append(f"statistics of {name}: those of a batch are for train mode")
            elif asks_for_mode(child):
                behaviour.append(f"train mode of {name}: its code asks which mode it is in")
        names = self.side.signature()
        passed = {*list(names)[: len(arguments.args)], *arguments.kwargs}
        missing = [name for name in names if name not in passed]
        behaviour += [f"the {self.kind}'s `{name}` (you gave none)" for name in missing]
        for name, tensor in self.side.tensors().items():
            if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                behaviour.append(f"hooks on the gradient of {name}: gradients are compared without them")
        if self.changed:
            changed = ", ".join(sorted(self.changed))
            behaviour.append(f"a second call: what a call changes is put back before each and not compared ({changed})")
        return behaviour

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
        tables: Sequence[int] = (),
    ) -> Run:
        """Run forward, and backward if there are cotangents; see `Subject.run`."""
        dtype = "float64" if mode in ("tables", "flash", "literals") else dtype
        with ONE_AT_A_TIME:
            execution = Execution(self, self.side.part(path), path, dtype, mode, seed, masks, frozenset(tables))
            try:
                return as_written(lambda: execution.results(weights, arguments, cotangents, self._accumulates))
            except NeedsBackwardError:
                run = execution.results(weights, arguments, cotangents, accumulate=True)
            self._accumulates = True
        return run

    def uses(self, weights: Mapping[str, Array], arguments: Arguments) -> dict[str, int]:
        """Return weight -> number of the first operation that combines it with values that depend on inputs."""
        return dict(self.run(weights, arguments, mode="uses").uses)

    def describe_outputs(
        self, weights: Mapping[str, Array], arguments: Arguments
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Return place, shape and dtype of every output of a call; a small module simply runs for it."""
        if sum(array.size for array in weights.values()) > LARGE:
            # Whatever fails without numbers (a branch on a value, an operation without a shape rule) is run with them.
            with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                return self._described(weights, arguments)
        run = self.run(weights, arguments)
        return [(place, one.shape, one.dtype.name) for place, one in zip(run.structure, run.outputs, strict=True)]

    def _described(self, weights: Mapping[str, Array], arguments: Arguments) -> list[tuple[str, tuple[int, ...], str]]:
        """Describe the outputs by a run in fake mode, without computing; raise if the code cannot run there."""

        def fake(array: Array) -> Tensor:
            return torch.empty(array.shape, dtype=from_numpy(array[:0] if array.ndim else array).dtype)

        part = self.side.part("")
        modules = self.side.modules()
        with ONE_AT_A_TIME, undisturbed(modules.values(), 0, self.train), self.drawing(MaskPlan()), eager():
            tensors = {name: fake(array) for name, array in weights.items()}
            leaves = [fake(leaf) for leaf in arguments.leaves]
            with part.holding({**self.constants(part, None), **tensors}, part.target) as call:
                result = call(arguments.with_leaves(leaves))
                self.plain = plain_values(result)
                structure, outputs = outputs_of(result, f"{self.kind} {self.name}", self.returned)
        return [(place, tuple(one.shape), dtype_name(one)) for place, one in zip(structure, outputs, strict=True)]

    def dtypes(self, weights: Mapping[str, Array], arguments: Arguments, dtype: str | None = None) -> list[DtypeCall]:
        """Return the dtypes of all calls of a forward pass; see `Subject.dtypes`."""
        recorder = DtypeRecorder(self.side.modules())
        execution = Execution(self, self.side.part(""), "", dtype, "eager", 0, 0, frozenset())
        with ONE_AT_A_TIME, recorder.recording():
            run = execution.results(weights, arguments, None, self._accumulates)
        names = [leaf.dtype.name for leaf in arguments.leaves]
        inputs = tuple(dtype if dtype is not None and class_of(name) == "float" else name for name in names)
        outputs = tuple(array.dtype.name for array in run.outputs)
        return [DtypeCall("", -1, recorder.count, inputs, outputs), *recorder.calls]

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
        """Run with the results of some submodules' calls replaced, and return every call; see `Subject.substituted`."""
        execution = Execution(self, self.side.part(path), path, dtype, "eager", 0, 0, frozenset())
        with ONE_AT_A_TIME:
            for accumulate in (self._accumulates, True):
                recorder = CallRecorder(self.side.modules(), self.mesh)
                # Its hooks come first, and so the recorder sees what was replaced.
                substitution = Substitution(self.side.modules(), substitutes)
                try:
                    with substitution.holding(), recorder.recording():
                        results = execution.results(weights, arguments, cotangents, accumulate)
                except NeedsBackwardError:
                    continue
                self.parts = self.parts if path else recorder.parts
                return results, [call for call in recorder.calls() if call.path != path]
        raise AssertionError("gradients that are accumulated need no other way")

    @property
    def _is_distributed(self) -> bool:
        """Whether several processes run the side: they might try other changes each, and wait for ever."""
        processes = torch.distributed.is_available() and torch.distributed.is_initialized()
        return self.mesh is not None or (processes and torch.distributed.get_world_size() > 1)

    def changes(
        self, samples: Sequence[OutputSample], *, path: str = "", numbers: bool = False, has_literals: bool = True
    ) -> list[tuple[str, str]]:
        """Return the changes of one operation that give the outputs wanted; see `Subject.changes`."""

        def run(sample: int, calls: ChangedCalls) -> Sequence[Array]:
            part = self.side.part(path)
            execution = Execution(self, part, path, "float64", "eager", 0, 0, frozenset(), calls)
            call = samples[sample]
            return execution.results(call.weights, call.arguments, None, self._accumulates).outputs

        with ONE_AT_A_TIME:
            wanted = [one.wanted for one in samples]
            return [] if self._is_distributed else found(run, wanted, numbers=numbers, has_literals=has_literals)

    def gradient_changes(
        self, samples: Sequence[GradientSample], differing: Collection[str | int], *, path: str = ""
    ) -> list[tuple[str, str]]:
        """Return the changes of what gradients pass with which every sample agrees; see `Subject.gradient_changes`."""

        def run(number: int, calls: StoppedCalls) -> Run:
            execution = Execution(self, self.side.part(path), path, "float64", "eager", 0, 0, frozenset(), calls)
            sample = samples[number]
            return execution.results(sample.weights, sample.arguments, sample.cotangents, self._accumulates)

        with ONE_AT_A_TIME:
            return [] if self._is_distributed else stopped_in(run, samples)

    def drawing(self, source: Masks | MaskPlan | None) -> contextlib.AbstractContextManager[object]:
        """Return the context in which dropout takes its masks from `source`, in train mode."""
        return drawing(source, self.side.modules()[""]) if self.train else contextlib.nullcontext()

    def tensor(self, array: Array, dtype: str | None) -> Tensor:
        """Return an array as a new tensor on the subject's device."""
        return _cast(from_numpy(array).to(self.device), dtype)

    def constants(self, part: TorchPart, dtype: str | None) -> dict[str, Tensor]:
        """Return copies of the buffers of a part, for it to write to."""
        return {name: _cast(one.detach().clone().to(self.device), dtype) for name, one in part.constants.items()}

    def compiled(self, part: TorchPart, path: str, mode: str) -> nn.Module:
        """Return the part compiled by torch.compile; a second run takes the first one's."""
        if (path, mode) not in self._compiled:
            backend = "inductor" if mode != "aot" and can_build_extensions() else "aot_eager"
            if mode != "jit":
                torch.compiler.reset()  # which gives up on code that it has compiled for many modules
            self._compiled[path, mode] = torch.compile(part.target, backend=backend, fullgraph=mode != "jit")
        return self._compiled[path, mode]


def _cast(tensor: Tensor, dtype: str | None) -> Tensor:
    return tensor.to(getattr(torch, dtype)) if dtype is not None and tensor.is_floating_point() else tensor


def _is_rate(child: nn.Module, name: str) -> bool:
    value = getattr(child, name, None)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value <= 1.0
