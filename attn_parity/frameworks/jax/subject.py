"""Runs any JAX side for the parity judge, as it is, in float64, or submodule by submodule, and leaves it unchanged.

`subject_of` picks the adapter: an NNX module, a Linen module with its variables, or a function with its weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.extend import core
from jax.typing import ArrayLike

from jax_attn.backend import to_numpy

from ...sides.dropout_masks import Draw, MaskPlan, Masks
from ...sides.function import Function
from ...sides.modes import mode_arguments
from ...sides.subject import (
    WHOLE,
    Arguments,
    Array,
    Arrays,
    CannotPromoteError,
    DtypeCall,
    ModuleFailedError,
    Run,
    SideWeight,
    Submodule,
    failure_of,
    is_array,
)
from ...sides.trees import flatten, plain_values
from .drawing import _draws_more
from .probed import TAPES, ProbedSide
from .probes.numpy_interpreter import evaluate
from .probes.rounding import JaxprJitter
from .recording import Tape, recording
from .running.execution import (
    UNTRACEABLE,
    Differentiated,
    ProgramResults,
    cast,
    counted,
    directly,
    is_double,
    is_probe,
    kept_wide,
    moving_literals,
    moving_tables,
    noting_branches,
    op_by_op,
    outputs_of,
    precise,
    quick_options,
    trace,
    walk,
    weight_in,
)
from .running.promotion import promoted
from .sides.adapter import Adapter, JaxPart, Setting, is_jax_float, shares_of
from .sides.function import JaxFunctionSide
from .sides.linen_module import LinenModule, of_bridge
from .sides.nnx_module import NNXModule

MODES = ("eager", "jit", "quick", "untraced", "jitter", "tables", "logsumexp", "flash", "literals")
"""Ways to run; `JaxSubject.run` documents each."""


def subject_of(value: object, device: str | None = None, *, train: bool = False) -> JaxSubject:
    """Make a JAX side runnable.

    Args:
        value: an NNX module, ``(module, variables)`` of Linen, a `nnx.bridge.ToNNX`, or a `Function`.
        device: where it runs; None is the device of its weights.
        train: run it in train mode, with shared dropout masks, instead of in eval mode.

    Raises:
        ModuleFailedError: the value is of another type, a weight is not an array, or the device is missing.
    """
    return JaxSubject(_adapter(value, device), train=train)


def _adapter(value: object, device: str | None) -> Adapter:
    if isinstance(value, Function):
        return JaxFunctionSide(value, device)
    if isinstance(value, nnx.bridge.ToNNX):
        return of_bridge(value, device)
    if isinstance(value, nnx.Module):
        return NNXModule(value, device)
    if isinstance(value, linen.Module):
        raise ModuleFailedError(
            f"the Linen module {type(value).__name__} comes without variables; give (module, variables), with "
            "variables = module.init(key, *inputs)"
        )
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], linen.Module):
        return LinenModule(*value, device)
    raise ModuleFailedError(
        f"a JAX side is an NNX module, (module, variables) of Linen or a function with its weights, "
        f"got {type(value).__name__}"
    )


@dataclasses.dataclass
class _Program:
    """Traced and compiled forms of a side for one layout of its operands."""

    run: Callable[..., ProgramResults]
    structure: list[str]


class JaxSubject(ProbedSide):
    """Runs one side on NumPy arrays.

    Args:
        adapter: the adapter for its kind.
        train: run it in train mode, with shared dropout masks, instead of in eval mode.
    """

    framework = "flax"

    def __init__(self, adapter: Adapter, *, train: bool = False):
        self._adapter = adapter
        self.train = train
        self.home = adapter.home
        self._parts: dict[str, JaxPart] = {}
        self._programs: dict[Hashable, _Program] = {}
        self._promoted: dict[Hashable, tuple[core.ClosedJaxpr, jax.tree_util.PyTreeDef]] = {}
        self._asked: dict[Hashable, tuple[list[Draw], bool]] = {}
        self.plain: dict[str, object] = {}
        self.returned = WHOLE

    @property
    def device(self) -> str:
        """Where it runs, in words."""
        return str(self.home)

    @property
    def kind(self) -> str:
        """The kind of side: ``NNX module``, ``Linen module`` or ``JAX function``."""
        return self._adapter.kind

    @property
    def name(self) -> str:
        """Class of the module, or name of the function."""
        return self._adapter.name

    @property
    def module(self) -> nnx.Module | linen.Module | None:
        """The module itself; None for a function."""
        return getattr(self._adapter, "module", None)

    @property
    def argument_names(self) -> list[str]:
        """Names of the positional arguments of a call."""
        return [name for name, kind in self._adapter.signature().items() if kind]

    @property
    def holds_float64(self) -> bool:
        """Whether modules can hold float64; JAX's can where ``jax_enable_x64`` is set."""
        return bool(jax.config.jax_enable_x64)

    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters and running statistics by name, and the state that `carry` named."""
        return self._adapter.parameters()

    def state(self) -> dict[str, SideWeight]:
        """Return the variables of other kinds, or the leaves of other collections, by name."""
        return self._adapter.state()

    def carry(self, names: Collection[str]) -> None:
        """Count the state of these names, and no other, among the parameters."""
        self._adapter.carry(names)
        for made_before in (self._parts, self._programs, self._promoted, self._asked):
            made_before.clear()

    def weights(self) -> Arrays:
        """Return copies of the weights that the side holds."""
        return self._adapter.weights()

    def tied(self) -> dict[str, str]:
        """Return further name of a weight -> the name that it has in `parameters`."""
        return self._adapter.tied()

    def few_threads(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for small work; JAX needs none."""
        return contextlib.nullcontext()

    def modules(self) -> list[Submodule]:
        """Return the submodules, the module itself first; those of Linen are known after `describe_outputs`."""
        return self._adapter.modules()

    def settings(self) -> dict[str, Mapping[str, object]]:
        """Return path -> the numbers that a submodule's meaning depends on and its weights don't show."""
        return self._adapter.settings()

    @property
    def changed(self) -> set[str]:
        """Names that calls changed, other than weights, running statistics and random state."""
        return self.part("").changed

    def modes(self, arguments: Arguments) -> dict[str, bool]:
        """Return name -> default of the arguments of this call that switch between train and eval mode."""
        return mode_arguments(self._adapter.called(arguments.kwargs.get("method")))

    def unreached(self, arguments: Arguments) -> list[str]:
        """Describe the branches that a call does not reach."""
        branches = [] if self.train else self._adapter.switched_off()
        names = self._adapter.signature()
        passed = {*list(names)[: len(arguments.args)], *arguments.kwargs}
        missing = [name for name in names if name not in passed]
        what = self._adapter.label.removesuffix(f" {self.name}")
        texts = [f"the {what}'s `{name}` (you gave none)" for name in missing]
        changed = ", ".join(sorted(self.changed))
        again = f"a second call: what a call changes is put back before each and not compared ({changed})"
        return [*branches, *self._adapter.caches(), *texts, *[again] * bool(changed)]

    def run(
        self,
        weights: Mapping[str, np.ndarray],
        arguments: Arguments,
        cotangents: Sequence[np.ndarray | None] | None = None,
        *,
        dtype: str | None = None,
        mode: str = "eager",
        seed: int = 0,
        path: str = "",
        masks: int = 0,
        tables: Collection[int] = (),
    ) -> Run:
        """Run forward, and backward if there are cotangents; see `Subject.run`."""
        dtype = "float64" if mode in ("tables", "flash", "literals") else dtype
        part = self.part(path)
        cast_weights = {name: weight_in(weights[name], dtype) for name in part.names if name in weights}
        leaves = [cast(leaf, dtype) for leaf in arguments.leaves]
        rounded_cotangents = (
            None if cotangents is None else [None if one is None else cast(one, dtype) for one in cotangents]
        )
        seed_of_code = 0 if is_probe(mode) else seed
        returned = WHOLE if path else self.returned
        probe = Differentiated(self.name, self.train, part, arguments, dtype, seed_of_code, mode, None, returned)
        plan = MaskPlan() if self.train else None
        function = probe.function(plan)
        operands = (cast_weights, leaves, rounded_cotangents)
        layouts = map(_layout, operands)
        turned = tuple(sorted(returned.axes.items()))
        key = (path, dtype, mode, tuple(sorted(tables)), seed_of_code, *layouts, _static(arguments), turned)
        with self.reported(dtype, arguments), kept_wide(cast_weights, leaves):
            draws, foreign = ([], False) if plan is None else self._ask(key, plan, function, operands, dtype)
            source = Masks(masks) if draws else None
            drawn = [] if source is None else [source.draw(one.shape, one.keep, one.path, one.setting) for one in draws]
            if key not in self._programs:
                run = self._program(key, function, (*operands, drawn), dtype, mode, tables)
                self._programs[key] = _Program(counted(run, probe.replaced), probe.structure)
            program = self._programs[key]
            outcome = program.run((*operands, drawn), seed)
        outputs, of_weights, of_inputs = outcome.results
        shares = shares_of(outputs, program.structure, of_weights, self.home.shardings)
        return Run(
            [to_numpy(one) for one in outputs],
            list(program.structure),  # known only now where the first run traces
            [to_numpy(of_inputs[str(i)]) if str(i) in of_inputs else None for i in range(len(leaves))],
            {name: to_numpy(one) for name, one in of_weights.items()},
            draws,
            foreign,
            outcome.count,
            outcome.tables,
            shares,
            branches=outcome.branches,
        )

    def describe_outputs(
        self, weights: Mapping[str, np.ndarray], arguments: Arguments
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Return place, shape and dtype of every output of a call; JAX need not run for it."""
        structure: list[str] = []
        setting = Setting(train=self.train, source=MaskPlan() if self.train else None)

        def _run(weights: dict[str, ArrayLike], leaves: list[ArrayLike]) -> list[jax.Array]:
            result = self.part("").call(weights, arguments.with_leaves(leaves), setting)
            self.plain = plain_values(result)
            structure[:], outputs = outputs_of(result, self.name, self.returned)
            return outputs

        with self.reported(None, arguments), kept_wide(weights, arguments.leaves):
            try:
                shapes = jax.eval_shape(_run, dict(weights), arguments.leaves)
            except UNTRACEABLE:
                run = self.run(weights, arguments)
                described = zip(run.structure, run.outputs, strict=True)
                return [(place, one.shape, one.dtype.name) for place, one in described]
        return [(place, one.shape, one.dtype.name) for place, one in zip(structure, shapes, strict=True)]

    def dtypes(self, weights: Mapping[str, Array], arguments: Arguments, dtype: str | None = None) -> list[DtypeCall]:
        """Return the dtypes of all calls of a forward pass, which is traced alone; see `Subject.dtypes`."""
        tape, part = Tape(), self.part("")
        arrays = {name: weights[name] for name in part.names if name in weights}
        leaves = [cast(leaf, dtype) for leaf in arguments.leaves]
        setting = Setting(dtype, 0, self.train, Masks(0) if self.train else None, tape)

        def _run(weights: Mapping[str, jax.Array], leaves: Sequence[jax.Array]) -> list[jax.Array]:
            tape.clear()
            return outputs_of(part.call(weights, arguments.with_leaves(leaves), setting), self.name, self.returned)[1]

        shapes = {name: jax.ShapeDtypeStruct(array.shape, _cast_of(array, dtype)) for name, array in arrays.items()}
        with self.reported(dtype, arguments), kept_wide(arrays, leaves), recording(next(TAPES)):
            try:
                outputs = jax.eval_shape(_run, shapes, leaves)
            except UNTRACEABLE:  # it looks at values
                converted = {name: cast(array, dtype) for name, array in arrays.items()}
                outputs = _run(*jax.tree.map(jnp.asarray, (converted, leaves)))
        inputs, returned = (tuple(array.dtype.name for array in side) for side in (leaves, outputs))
        return [DtypeCall("", -1, len(tape.entries), inputs, returned), *tape.dtypes()]

    @contextlib.contextmanager
    def reported(self, dtype: str | None, arguments: Arguments) -> Iterator[None]:
        """Convert an exception of the side into a one-line error that names the side."""
        try:
            yield
        except (CannotPromoteError, ModuleFailedError):
            raise
        except Exception as error:  # whatever the side raises is told as its own
            raise failure_of(error, dtype, self._adapter.label, self._details(error, arguments)) from error

    def _details(self, error: Exception, arguments: Arguments) -> str:
        """Return details to add to JAX's message: a fault in the weights, the failing submodule, or the arguments."""
        complaint = self._adapter.complaint(arguments)
        if complaint:
            return complaint
        if not isinstance(error, (TypeError, ValueError, IndexError)):
            return ""
        culprit = self._adapter.culprit(error)
        if culprit:
            return culprit
        names = arguments.named(self.argument_names)
        inputs = [f"{name} {one.dtype.name} {one.shape}" for name, one in zip(names, arguments.leaves, strict=True)]
        return f"called with {', '.join(inputs)}" if inputs else ""

    def _ask(
        self,
        key: Hashable,
        plan: MaskPlan,
        function: Callable[..., object],
        operands: tuple[object, ...],
        dtype: str | None,
    ) -> tuple[list[Draw], bool]:
        """Trace a function for the masks that it asks for, and whether it draws other random numbers."""
        if key not in self._asked:
            try:
                with promoted() if dtype == "float64" else contextlib.nullcontext(), jax.disable_jit():
                    closed, _ = trace(function, (*operands, None))
            except UNTRACEABLE as error:
                reason = "it branches on values, so that its dropout masks can't be planned"
                raise ModuleFailedError(f"the {self._adapter.label} can't be judged in train mode: {reason}") from error
            self._asked[key] = plan.draws, _draws_more(closed)
        return self._asked[key]

    def _program(
        self,
        key: tuple[Hashable, ...],
        function: Callable[..., object],
        operands: Sequence[object],
        dtype: str | None,
        mode: str,
        tables: Collection[int],
    ) -> Callable[..., object]:
        """Return a program of a function: operands and seed -> its results, or results and number of moved values."""
        if dtype == "float64" and mode != "logsumexp":
            try:
                closed, tree = self._traced_in_float64(key, function, operands)
            except UNTRACEABLE:
                return directly(function, promote=True)
            if mode == "tables":
                return moving_tables(closed, tree, tables)
            if mode == "literals":
                return moving_literals(closed, tree)
            return noting_branches(closed, tree)
        if mode == "untraced":
            return directly(function, promote=False)
        if mode in ("jit", "quick"):
            compiled = jax.jit(function, compiler_options=quick_options() if mode == "quick" else None)
            return lambda operands, seed: compiled(*self.home.put(operands))
        try:
            # What is compiled within the module was perhaps traced before, with masks of its own.
            with jax.disable_jit() if self.train else contextlib.nullcontext(), precise(dtype):
                closed, tree = trace(function, operands)
        except UNTRACEABLE:
            return directly(function, promote=dtype == "float64")

        def _put(operands: Sequence[object]) -> list[jax.Array]:
            return jax.tree.leaves(self.home.put(operands))

        if mode == "jitter":
            double = is_double(operands)
            return lambda operands, seed: jax.tree.unflatten(
                tree, walk(closed.jaxpr, closed.consts, _put(operands), JaxprJitter(seed, double=double))
            )
        if dtype == "float64":
            return lambda operands, seed: jax.tree.unflatten(tree, evaluate(closed, *jax.tree.leaves(operands)))
        run = op_by_op(closed)
        return lambda operands, seed: jax.tree.unflatten(tree, run(*_put(operands)))

    def _traced_in_float64(
        self, key: tuple[Hashable, ...], function: Callable[..., object], operands: object
    ) -> tuple[core.ClosedJaxpr, jax.tree_util.PyTreeDef]:
        """Trace a function in float64, once for all ways to run it.

        Loops and compiled parts are traced once, as they are. Where that fails (a loop that carries a former float32
        value, masks that every part requests again) each step is traced separately.
        """
        same = (*key[:2], *key[4:])
        if same not in self._promoted:
            self._promoted[same] = self.trace_promoted(function, operands)
        return self._promoted[same]

    def trace_promoted(
        self, function: Callable[..., object], operands: object
    ) -> tuple[core.ClosedJaxpr, jax.tree_util.PyTreeDef]:
        """Trace a function in float64."""
        if not self.train:
            # Whatever goes wrong here goes right below, or is raised there.
            with contextlib.suppress(Exception), promoted():
                return trace(function, operands)
        try:
            with promoted(), jax.disable_jit():
                return trace(function, operands)
        except UNTRACEABLE:
            with promoted():  # control flow on values, perhaps below a loop that has to stay one
                return trace(function, operands)

    def part(self, path: str) -> JaxPart:
        """Return a submodule as a function of its weights."""
        if path not in self._parts:
            self._parts[path] = self._adapter.part(path)
        return self._parts[path]


def _cast_of(array: Array, dtype: str | None) -> np.dtype[np.generic]:
    return jnp.dtype(dtype) if dtype is not None and is_jax_float(array) else array.dtype


def _layout(tree: object) -> Hashable:
    return jax.tree.structure(tree), tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(tree))


def _static(arguments: Arguments) -> str:
    def is_leaf(value: object) -> bool:
        return not isinstance(value, (tuple, list, Mapping)) and not is_array(value)

    rest = [repr(leaf) for _, leaf in flatten((arguments.args, dict(arguments.kwargs)), is_leaf)]
    return repr(arguments.paths) + repr([text for text in rest if not text.startswith("array(")])
