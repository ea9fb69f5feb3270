"""Runs any torch module for the parity judge, as it is, in float64, or submodule by submodule, and leaves it unchanged.

Weights are swapped in for the time of a call (`torch.func.functional_call`), so the
module keeps its own tensors, gradients, modes and random state.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_bridge.parity.compare.dropout_masks import Masks, Plan
from attn_bridge.parity.compare.subject import (
    Arguments,
    Arrays,
    Call,
    CannotPromoteError,
    ModuleFailedError,
    Parameter,
    Run,
    Submodule,
    flatten,
    replace,
)

from ..backend import _can_build_extensions, from_numpy, get_weights, to_numpy
from ..functional import dtype_name
from .drawing import _random_state, drawing
from .promotion import lifted
from .rounding import Jitter

STATISTICS = ("running_mean", "running_var")
"""Buffers that training changes and that Flax keeps as batch statistics; every other buffer is a constant."""


LARGE = 1 << 24
"""Weights of a module from which on a run is worth avoiding."""

SETTINGS = {"eps": "eps", "num_heads": "num_heads", "num_kv_heads": "num_kv_heads", "negative_slope": "negative_slope"}
"""Attribute -> the name that both sides have for it."""


class Harness:
    """Runs one module on NumPy arrays.

    Args:
        module: the module.
        device: where it runs; None is where its parameters are.
        train: run it in train mode, with dropout masks that are given, instead of in eval mode.

    Raises:
        ModuleFailedError: there is no such device.
    """

    framework = "torch"

    def __init__(self, module: nn.Module, device: str | None = None, *, train: bool = False):
        self.module = module
        self.train = train
        self.device = _device(module, device)
        self._compiled: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Class of the module."""
        return type(self.module).__name__

    @property
    def argument_names(self) -> list[str]:
        """Names of the positional arguments of a call."""
        return [name for name, kind in _signature(self.module).items() if kind]

    def parameters(self) -> dict[str, Parameter]:
        """Return the parameters and running statistics by name."""
        owners = dict(self.module.named_modules())
        found = {}
        for name, tensor, role in _named_weights(self.module):
            path, _, _ = name.rpartition(".")
            owner = _stock_name(owners[path]) if path in owners else ""
            found[name] = Parameter(tuple(tensor.shape), dtype_name(tensor), owner, path, role)
        return found

    def weights(self) -> Arrays:
        """Return copies of the weights that the module holds."""
        arrays = get_weights(self.module)
        return {name: np.array(arrays.get(name, None), copy=True) for name in self.parameters()}

    def few_threads(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for small work: one thread, because on a busy machine several wait for each other."""
        return _one_thread()

    def modules(self) -> list[Submodule]:
        """Return the submodules, the module itself first."""
        return [Submodule(path, type(child).__name__) for path, child in self.module.named_modules()]

    def settings(self) -> dict[str, dict[str, float]]:
        """Return path -> the numbers that a submodule's meaning depends on and its weights don't show."""
        found = {}
        for path, child in self.module.named_modules():
            known = {name: getattr(child, own, None) for own, name in SETTINGS.items()}
            found[path] = {name: value for name, value in known.items() if _is_number(value)}
        return found

    def unreached(self, arguments: Arguments) -> list[str]:
        """Describe the branches that a call does not reach."""
        found = []
        for path, child in self.module.named_modules() if not self.train else ():
            rate = next((getattr(child, name) for name in ("p", "dropout") if _is_rate(child, name)), 0.0)
            if rate and ("dropout" in type(child).__name__.lower() or isinstance(child, nn.MultiheadAttention)):
                found.append(f"dropout of {path or type(child).__name__} ({rate:g}): off in eval mode")
        names = _signature(self.module)
        given = {*list(names)[: len(arguments.args)], *arguments.kwargs}
        missing = [name for name in names if name not in given]
        return found + [f"argument {name} of the torch module: not given" for name in missing]

    def run(
        self,
        weights: Mapping[str, np.ndarray[Any, Any]],
        arguments: Arguments,
        cotangents: Sequence[np.ndarray[Any, Any] | None] | None = None,
        *,
        dtype: str | None = None,
        mode: str = "eager",
        seed: int = 0,
        path: str = "",
        masks: int = 0,
    ) -> Run:
        """Run forward, and backward if there are cotangents.

        Args:
            weights: all weights by name; a submodule takes its own from them.
            arguments: the call; floating-point arrays get gradients.
            cotangents: one array per output (None for none).
            dtype: precision of the whole run; None leaves every dtype as given.
            mode: ``eager``, ``jit`` (torch.compile) or ``jitter`` (every operation rounds at random).
            seed: of the random numbers that the module may draw.
            path: the submodule to run instead of the whole.
            masks: which dropout masks, in train mode.

        Raises:
            ModuleFailedError: the module raised, or returned no array.
            CannotPromoteError: it can't be run in float64.
        """
        module = self.module.get_submodule(path)
        call = self._call(module, path, mode, dtype)
        jitter = _Rounding(seed) if mode == "jitter" else contextlib.nullcontext()
        source = Masks(masks)
        with self._undisturbed(seed), _precision(dtype), self._drawing(source), torch.enable_grad():
            before = _random_state()
            canonical = _canonical(self.module, path)
            given = {name: weights[whole] for name, whole in canonical.items() if whole in weights}
            tensors = self._weights(module, given, dtype)
            leaves = [self._tensor(leaf, dtype) for leaf in arguments.leaves]
            leaves = [leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves]
            try:
                with jitter:
                    result = call(tensors, arguments.with_leaves(leaves))
                structure, outputs = _outputs(result, self.name)
                if cotangents is None:
                    foreign = self._has_drawn(before)
                    return Run([to_numpy(one) for one in outputs], structure, draws=source.draws, foreign=foreign)
                gradients = self._gradients(outputs, cotangents, [*leaves, *tensors.values()], jitter)
            except (CannotPromoteError, ModuleFailedError):
                raise
            except Exception as error:
                raise _failure(error, dtype, f"torch module {type(module).__name__}") from error
            foreign = self._has_drawn(before)
        of_inputs, of_weights = gradients[: len(leaves)], gradients[len(leaves) :]
        return Run(
            [to_numpy(output) for output in outputs],
            structure,
            of_inputs,
            {
                canonical[name]: _zeros(gradient, tensor)
                for (name, tensor), gradient in zip(tensors.items(), of_weights, strict=True)
                if tensor.requires_grad
            },
            source.draws,
            foreign,
        )

    def describe_outputs(
        self, weights: Mapping[str, np.ndarray[Any, Any]], arguments: Arguments
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Return place, shape and dtype of every output of a call; a small module simply runs for it."""
        if sum(array.size for array in weights.values()) > LARGE:
            # Whatever fails without numbers (a branch on a value, an operation without a shape rule) is run with them.
            with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                return self._described(weights, arguments)
        run = self.run(weights, arguments)
        return [(place, one.shape, one.dtype.name) for place, one in zip(run.structure, run.outputs, strict=True)]

    def _described(
        self, weights: Mapping[str, np.ndarray[Any, Any]], arguments: Arguments
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Do so without computing anything, inside a fake mode; any error says that it can't be done."""

        def fake(array: np.ndarray[Any, Any]) -> Tensor:
            return torch.empty(array.shape, dtype=from_numpy(array[:0] if array.ndim else array).dtype)

        with self._undisturbed(0), self._drawing(Plan()):
            tensors = {name: fake(array) for name, array in weights.items()}
            leaves = [fake(leaf) for leaf in arguments.leaves]
            result = self._call(self.module, "", "eager", None)(tensors, arguments.with_leaves(leaves))
            structure, outputs = _outputs(result, self.name)
        return [(place, tuple(one.shape), dtype_name(one)) for place, one in zip(structure, outputs, strict=True)]

    def record(
        self,
        weights: Mapping[str, np.ndarray[Any, Any]],
        arguments: Arguments,
        cotangents: Sequence[np.ndarray[Any, Any]],
    ) -> list[Call]:
        """Run in float64 and return every call of every submodule with its inputs, outputs and cotangents."""
        calls: list[tuple[int, str, Arguments, list[Tensor]]] = []
        began: dict[int, list[tuple[int, Arguments]]] = {}
        order = iter(range(10**9))
        handles = []

        def _before(path: str) -> Any:
            def _hook(child: nn.Module, args: Any, kwargs: Any) -> None:
                with torch._C.DisableTorchFunction():  # our own way to NumPy is not the module's
                    arrays = [to_numpy(one) for one in _tensors((args, kwargs))]
                frozen = replace((args, kwargs), _is_tensor, arrays)
                began.setdefault(id(child), []).append((next(order), Arguments(*frozen)))

            return _hook

        def _after(path: str) -> Any:
            def _hook(child: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
                position, frozen = began[id(child)].pop()
                calls.append((position, path, frozen, _tensors(result)))

            return _hook

        for path, child in self.module.named_modules():
            if path:
                handles.append(child.register_forward_pre_hook(_before(path), with_kwargs=True))
                handles.append(child.register_forward_hook(_after(path), with_kwargs=True))
        try:
            with self._undisturbed(0), _precision("float64"), self._drawing(Masks(0)), torch.enable_grad():
                tensors = self._weights(self.module, weights, "float64")
                leaves = [self._tensor(leaf, "float64") for leaf in arguments.leaves]
                leaves = [leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves]
                result = self._call(self.module, "", "eager", "float64")(tensors, arguments.with_leaves(leaves))
                _, outputs = _outputs(result, self.name)
                recorded = [output for _, _, _, found in calls for output in found]
                gradients = iter(self._gradients(outputs, cotangents, recorded))
        finally:
            for handle in handles:
                handle.remove()
        numbers: dict[str, int] = {}
        found = []
        for position, path, frozen, results in calls:
            cotangent = [next(gradients) for _ in results]
            found.append(
                Call(path, numbers.get(path, 0), position, frozen, [to_numpy(one) for one in results], cotangent)
            )
            numbers[path] = numbers.get(path, 0) + 1
        return sorted(found, key=lambda call: call.order)

    def _call(self, module: nn.Module, path: str, mode: str, dtype: str | None) -> Any:
        if mode == "jit":
            key = f"{path}:{mode}"
            if key not in self._compiled:
                backend = "inductor" if _can_build_extensions() else "aot_eager"
                self._compiled[key] = torch.compile(module, backend=backend)
            compiled = self._compiled[key]

            def _compiled_call(tensors: dict[str, Tensor], arguments: Arguments) -> Any:
                swap = torch.nn.utils.stateless._reparametrize_module  # functional_call refuses compiled modules
                with swap(module, self._with_buffers(module, tensors, dtype), tie_weights=True):
                    return compiled(*arguments.args, **arguments.kwargs)

            return _compiled_call

        def call(tensors: dict[str, Tensor], arguments: Arguments) -> Any:
            swapped = self._with_buffers(module, tensors, dtype)
            return torch.func.functional_call(module, swapped, arguments.args, dict(arguments.kwargs))

        return call

    def _undisturbed(self, seed: int) -> contextlib.AbstractContextManager[None]:
        return _undisturbed(self.module, seed, self.train)

    def _drawing(self, source: Masks | Plan) -> contextlib.AbstractContextManager[None]:
        return drawing(source, self.module) if self.train else contextlib.nullcontext()

    def _has_drawn(self, before: list[Tensor]) -> bool:
        return self.train and not all(map(torch.equal, before, _random_state()))

    def _tensor(self, array: np.ndarray[Any, Any], dtype: str | None) -> Tensor:
        tensor = from_numpy(array).to(self.device)
        return tensor.to(getattr(torch, dtype)) if dtype is not None and tensor.is_floating_point() else tensor

    def _weights(
        self, module: nn.Module, arrays: Mapping[str, np.ndarray[Any, Any]], dtype: str | None
    ) -> dict[str, Tensor]:
        """Return weights as tensors; trainable ones (no running statistics, no integers) get gradients."""
        trainable = {name for name, _, role in _named_weights(module) if role == "parameter"}
        tensors = {name: self._tensor(array, dtype) for name, array in arrays.items()}
        for name in tensors.keys() - trainable if self.train else ():
            tensors[name] = tensors[name].clone()  # running statistics, which are written to
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in trainable and tensor.is_floating_point())
        return tensors

    def _with_buffers(self, module: nn.Module, tensors: dict[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
        """Return the weights, and a copy of every other buffer for the module to write to."""
        found = {}
        for name, buffer in module.named_buffers():
            if name not in tensors:
                copy = buffer.detach().clone().to(self.device)
                found[name] = copy.to(getattr(torch, dtype)) if dtype and copy.is_floating_point() else copy
        return {**found, **tensors}

    def _gradients(
        self,
        outputs: list[Tensor],
        cotangents: Sequence[Any],
        sources: list[Tensor],
        inside: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[np.ndarray[Any, Any] | None]:
        pairs = [
            (output, from_numpy(cotangent).to(output.device, output.dtype))
            for output, cotangent in zip(outputs, cotangents, strict=True)
            if output.requires_grad and cotangent is not None
        ]
        wanted = [source for source in sources if source.requires_grad]
        if not pairs or not wanted:
            return [_zeros(None, source) if source.requires_grad else None for source in sources]
        edge = torch.autograd.graph.get_gradient_edge  # given tensors, torch would leave the mode that lifts
        with inside or contextlib.nullcontext():
            gradients = torch.autograd.grad(
                [edge(output) for output, _ in pairs],
                [edge(source) for source in wanted],
                [cotangent for _, cotangent in pairs],
                allow_unused=True,
                materialize_grads=False,
            )
        found = iter(gradients)
        return [_zeros(_numpy_or_none(next(found)), source) if source.requires_grad else None for source in sources]


class _Rounding(TorchDispatchMode):
    """While it is entered, operations, those of the backward pass included, round at random."""

    def __init__(self, seed: int):
        super().__init__()
        self._jitter = Jitter(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result if func.is_view else self._jitter.moved(func.overloadpacket.__name__, result)


@contextlib.contextmanager
def _undisturbed(module: nn.Module, seed: int, train: bool = False) -> Iterator[None]:
    """Put the module in eval or train mode; afterwards modes and random state are what they were."""
    training = [(child, child.training) for child in module.modules()]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(seed)
            module.train(train)
            yield
    finally:
        for child, mode in training:
            child.training = mode


def _precision(dtype: str | None) -> contextlib.AbstractContextManager[Any]:
    return lifted() if dtype == "float64" else contextlib.nullcontext()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _stock_name(module: Any) -> str:
    """Return the class of a module, or the framework's own class that it is derived from."""
    own = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.")]
    return next((kind.__name__ for kind in own if kind.__name__ != "Module"), type(module).__name__)


def _device(module: nn.Module, wanted: str | None) -> torch.device:
    if wanted is None:
        tensor = next((one for one in [*module.parameters(), *module.buffers()]), None)
        return torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "gpu" and torch.cuda.is_available():
        return torch.device("cuda")
    if wanted == "tpu":
        raise ModuleFailedError("device tpu: torch does not run on a TPU here; give --device cpu,tpu for a mixed pair")
    raise ModuleFailedError(f"device {wanted}: torch finds none on this machine")


def _named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    for name, parameter in module.named_parameters():
        yield name, parameter, "parameter"
    for name, buffer in module.named_buffers():
        if name.rpartition(".")[2] in STATISTICS:
            yield name, buffer, "statistic"


def _canonical(module: nn.Module, path: str) -> dict[str, str]:
    """Return name inside a submodule -> name in the whole module, also where the weight is tied to one elsewhere."""
    names = {id(tensor): name for name, tensor, _ in _named_weights(module)}
    return {name: names[id(tensor)] for name, tensor, _ in _named_weights(module.get_submodule(path))}


def _signature(module: nn.Module) -> dict[str, bool]:
    """Return argument name -> whether it can be given by position."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {
        one.name: one.kind in positional for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }


def _outputs(result: Any, name: str) -> tuple[list[str], list[Tensor]]:
    found = flatten(result, _is_tensor)
    if not found:
        raise ModuleFailedError(f"the torch module {name} returned {type(result).__name__}, which holds no tensor")
    return [path for path, _ in found], [tensor for _, tensor in found]


def _failure(error: Exception, dtype: str | None, what: str) -> Exception:
    text = " ".join(str(error).split()) or "no message"
    message = f"{what} raised {type(error).__name__}: {text if len(text) <= 300 else text[:300] + ' ...'}"
    return CannotPromoteError(message) if dtype == "float64" else ModuleFailedError(message)


def _is_rate(child: nn.Module, name: str) -> bool:
    value = getattr(child, name, None)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value <= 1.0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _tensors(tree: Any) -> list[Tensor]:
    return [tensor for _, tensor in flatten(tree, _is_tensor)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _numpy_or_none(gradient: Tensor | None) -> np.ndarray[Any, Any] | None:
    return None if gradient is None else to_numpy(gradient)


def _zeros(gradient: np.ndarray[Any, Any] | None, tensor: Tensor) -> np.ndarray[Any, Any]:
    return (
        np.zeros(tuple(tensor.shape), to_numpy(tensor[..., :0] if tensor.ndim else tensor).dtype)
        if gradient is None
        else gradient
    )
