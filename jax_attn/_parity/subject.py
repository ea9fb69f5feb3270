"""Runs any NNX module for the parity judge, as it is, in float64, or submodule by submodule, and leaves it unchanged.

The module is split, and every run merges a new one around other weights, so the
module keeps its own variables, modes and random state.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from attn_bridge.parity.compare.dropout_masks import Draw, Masks, Plan
from attn_bridge.parity.compare.subject import (
    Arguments,
    Arrays,
    Call,
    CannotLiftError,
    ModuleFailedError,
    Parameter,
    Run,
    Submodule,
    flatten,
    is_array,
    replace,
)

from ..backend import WEIGHTS, to_numpy
from .drawing import _draws_more, _prepare, drawing
from .numpy_interpreter import evaluate, inline, last_uses
from .promotion import lifted
from .rounding import Jitter

_MOVES = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "concatenate", "iota", "copy")
"""Operations that round nothing, so that it does not matter what they are fused with."""

_UNTRACEABLE = (jax.errors.TracerBoolConversionError, jax.errors.ConcretizationTypeError)


SETTINGS = {
    "eps": "eps",
    "epsilon": "eps",
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "negative_slope": "negative_slope",
}
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

    framework = "flax"

    def __init__(self, module: nnx.Module, device: str | None = None, *, train: bool = False):
        self.module = module
        self.train = train
        self.device = _device(module, device)
        self._weights = nnx.state(module, WEIGHTS)
        self._parts: dict[str, _Part] = {}
        self._programs: dict[Any, tuple[Callable[..., Any], list[str]]] = {}
        self._asked: dict[Any, tuple[list[Draw], bool]] = {}

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
        owners = {_name(path): child for path, child in nnx.iter_modules(self.module)}
        found = {}
        for path, variable in nnx.to_flat_state(self._weights):
            name = _name(path)
            parent, _, _ = name.rpartition(".")
            owner = _stock_name(owners[parent]) if parent in owners else ""
            role = "statistic" if isinstance(variable, nnx.BatchStat) else "parameter"
            value = variable.get_value()
            found[name] = Parameter(tuple(value.shape), value.dtype.name, owner, parent, role)
        return found

    def weights(self) -> Arrays:
        """Return copies of the weights that the module holds."""
        flat = nnx.to_flat_state(self._weights)
        return {_name(path): np.array(to_numpy(variable.get_value()), copy=True) for path, variable in flat}

    def few_threads(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for small work; JAX needs none."""
        return contextlib.nullcontext()

    def modules(self) -> list[Submodule]:
        """Return the submodules, the module itself first."""
        found = [Submodule(_name(path), type(child).__name__) for path, child in nnx.iter_modules(self.module)]
        return sorted(found, key=lambda one: one.path.count(".") + bool(one.path))

    def settings(self) -> dict[str, dict[str, float]]:
        """Return path -> the numbers that a submodule's meaning depends on and its weights don't show."""
        found = {}
        for path, child in nnx.iter_modules(self.module):
            known = {name: getattr(child, own) for own, name in SETTINGS.items() if hasattr(child, own)}
            found[_name(path)] = {name: value for name, value in known.items() if _is_number(value)}
        return found

    def unreached(self, arguments: Arguments) -> list[str]:
        """Describe the branches that a call does not reach."""
        found = []
        for path, child in nnx.iter_modules(self.module):
            rate = next((getattr(child, name) for name in ("rate", "dropout_rate") if _is_rate(child, name)), 0.0)
            if rate and not self.train:
                found.append(f"dropout of {_name(path) or type(child).__name__} ({rate:g}): off in eval mode")
            if getattr(child, "decode", None) is False:
                found.append(f"cache of {_name(path) or type(child).__name__}: decode is off")
        names = _signature(self.module)
        given = {*list(names)[: len(arguments.args)], *arguments.kwargs}
        missing = [name for name in names if name not in given]
        return found + [f"argument {name} of the Flax module: not given" for name in missing]

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
            mode: ``eager``, ``jit`` (jax.jit of the whole) or ``jitter`` (every operation rounds at random).
            seed: of the random numbers that the module may draw.
            path: the submodule to run instead of the whole.
            masks: which dropout masks, in train mode.

        Raises:
            ModuleFailedError: the module raised, or returned no array.
            CannotLiftError: it can't be run in float64.
        """
        part = self._part(path)
        weights = {name: _as(weights[name], dtype) for name in part.names.values() if name in weights}
        leaves = [_as(leaf, dtype) for leaf in arguments.leaves]
        given = None if cotangents is None else [None if one is None else _as(one, dtype) for one in cotangents]
        structure: list[str] = []
        kinds: list[bool] = []
        plan = Plan()

        def _differentiate_all(weights: dict[str, Any], leaves: list[Any], cotangents: Any, masks: Any) -> Any:
            plan.start(masks)
            mine, others = _divide(weights, part.trainable)
            floats = {str(i): leaf for i, leaf in enumerate(leaves) if _is_float(leaf)}

            def _forward_of(mine: dict[str, Any], floats: dict[str, Any]) -> Any:
                call = arguments.with_leaves([floats.get(str(i), leaf) for i, leaf in enumerate(leaves)])
                module = self._merged(part, {**others, **mine}, dtype, seed)
                with self._drawing(plan, module):
                    structure[:], outputs = _outputs(module(*call.args, **call.kwargs), self.name)
                kinds[:] = map(_is_float, outputs)
                return _split(outputs)

            if cotangents is None:
                return _joined(*_forward_of(mine, floats), kinds), {}, {}
            outputs, pull, rest = jax.vjp(_forward_of, mine, floats, has_aux=True)
            return _joined(outputs, rest, kinds), *pull(_cotangents(cotangents, outputs, kinds))

        key = (
            path,
            dtype,
            mode,
            self.train,
            0 if mode == "jitter" else seed,
            _layout(weights),
            _layout(leaves),
            _layout(given),
            _static(arguments),
        )
        operands = (weights, leaves, given)
        draws, foreign = self._ask(key, plan, _differentiate_all, operands, dtype) if self.train else ([], False)
        source = Masks(masks)
        drawn = [source.draw(one.shape, one.keep, one.path, one.setting) for one in draws]
        outputs, of_weights, of_inputs = self._execute(
            key, _differentiate_all, (*operands, drawn), dtype, mode, structure, seed
        )
        gradients = [of_inputs.get(str(i)) for i in range(len(leaves))]
        return Run(outputs, list(structure), gradients, dict(of_weights), draws, foreign)

    def describe_outputs(
        self, weights: Mapping[str, np.ndarray[Any, Any]], arguments: Arguments
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Return place, shape and dtype of every output of a call; JAX need not run for it."""
        structure: list[str] = []

        def _run(weights: dict[str, Any], leaves: list[Any]) -> list[Any]:
            call = arguments.with_leaves(leaves)
            module = self._merged(self._part(""), weights, None, 0)
            with self._drawing(Plan(), module):
                result = module(*call.args, **call.kwargs)
            structure[:], outputs = _outputs(result, self.name)
            return outputs

        try:
            shapes = jax.eval_shape(_run, dict(weights), arguments.leaves)
        except _UNTRACEABLE:
            run = self.run(weights, arguments)
            return [(place, one.shape, one.dtype.name) for place, one in zip(run.structure, run.outputs, strict=True)]
        except ModuleFailedError:
            raise
        except Exception as error:
            raise _failure(error, None, f"Flax module {self.name}") from error
        return [(place, one.shape, one.dtype.name) for place, one in zip(structure, shapes, strict=True)]

    def record(
        self,
        weights: Mapping[str, np.ndarray[Any, Any]],
        arguments: Arguments,
        cotangents: Sequence[np.ndarray[Any, Any]],
    ) -> list[Call]:
        """Run in float64 and return every call of every submodule with its inputs, outputs and cotangents."""
        weights = {name: _as(array, "float64") for name, array in weights.items()}
        leaves = [_as(leaf, "float64") for leaf in arguments.leaves]
        frozen: list[tuple[int, str, int, Any]] = []
        kinds: list[bool] = []

        def _run(weights: dict[str, Any], leaves: list[Any], shifts: Any) -> Any:
            frozen.clear()
            records: list[Any] = []
            module = self._merged(self._part(""), weights, "float64", 0)
            call = arguments.with_leaves(leaves)
            with self._drawing(Masks(0), module), _tapped(module, shifts, frozen, records):
                result = module(*call.args, **call.kwargs)
            _, outputs = _outputs(result, self.name)
            kinds[:] = map(_is_float, outputs)
            return _split(outputs)[0], records

        def _shapes(weights: dict[str, Any], leaves: list[Any]) -> Any:
            return _run(weights, leaves, None)[1]

        def _differentiate(weights: Any, leaves: Any, shifts: Any, cotangents: Any) -> Any:
            def _forward(shifts: Any) -> Any:
                return _run(weights, leaves, shifts)

            outputs, pull, records = jax.vjp(_forward, shifts, has_aux=True)
            return records, *pull(_cotangents(cotangents, outputs, kinds))

        def _evaluated(shapes: Any, *, trace: bool) -> Any:
            shifts = [[np.zeros(one.shape) for one in results if _is_float(one)] for _, results in shapes]
            operands = (weights, leaves, shifts, [_as(one, "float64") for one in cotangents])
            if not trace:
                return _differentiate(*jax.tree.map(jnp.asarray, operands))
            closed, tree = _trace(_differentiate, operands)
            return jax.tree.unflatten(tree, evaluate(closed, *jax.tree.leaves(operands)))

        try:
            with lifted(), jax.disable_jit():
                try:
                    records, gradients = _evaluated(jax.eval_shape(_shapes, weights, leaves), trace=True)
                except _UNTRACEABLE:  # it looks at values
                    shapes = _shapes(*jax.tree.map(jnp.asarray, (weights, leaves)))
                    records, gradients = _evaluated(shapes, trace=False)
        except (CannotLiftError, ModuleFailedError):
            raise
        except Exception as error:
            raise _failure(error, None, f"Flax module {self.name}") from error
        calls = []
        for (order, path, number, skeleton), (inputs, outputs), gradient in zip(
            frozen, records, gradients, strict=True
        ):
            rest = iter(gradient)
            cotangent = [np.asarray(next(rest)) if _is_float(output) else None for output in outputs]
            call = Arguments(*replace(skeleton, _is_slot, [np.asarray(one) for one in inputs]))
            calls.append(Call(path, number, order, call, [np.asarray(one) for one in outputs], cotangent))
        return sorted(calls, key=lambda call: call.order)

    def _merged(self, part: _Part, weights: Mapping[str, Any], dtype: str | None, seed: int) -> nnx.Module:
        module = part.merged(weights, dtype, seed)
        if self.train:
            _prepare(module)
        return module

    def _drawing(self, source: Masks | Plan, module: nnx.Module) -> contextlib.AbstractContextManager[None]:
        return drawing(source, module) if self.train else contextlib.nullcontext()

    def _ask(
        self, key: Any, plan: Plan, function: Callable[..., Any], operands: Any, dtype: str | None
    ) -> tuple[list[Draw], bool]:
        """Trace a function for the masks that it asks for, and whether it draws other random numbers."""
        if key not in self._asked:
            try:
                with lifted() if dtype == "float64" else contextlib.nullcontext(), jax.disable_jit():
                    closed, _ = _trace(function, (*operands, None))
            except _UNTRACEABLE as error:
                reason = "it branches on values, so that its dropout masks can't be planned"
                raise ModuleFailedError(
                    f"the Flax module {self.name} can't be judged in train mode: {reason}"
                ) from error
            except (CannotLiftError, ModuleFailedError):
                raise
            except Exception as error:
                raise _failure(error, dtype, f"Flax module {self.name}") from error
            self._asked[key] = plan.draws, _draws_more(closed)
        return self._asked[key]

    def _execute(
        self,
        key: Any,
        function: Callable[..., Any],
        operands: Any,
        dtype: str | None,
        mode: str,
        structure: list[str],
        seed: int,
    ) -> tuple[list[np.ndarray[Any, Any]], Arrays, Arrays]:
        """Run a traced function; what was traced for the same shapes is used again."""
        if key not in self._programs:
            try:
                self._programs[key] = (self._program(function, operands, dtype, mode), structure)
            except (CannotLiftError, ModuleFailedError):
                raise
            except Exception as error:
                raise _failure(error, dtype, f"Flax module {self.name}") from error
        program, known = self._programs[key]
        try:
            outputs, of_weights, of_inputs = program(operands, seed) if mode == "jitter" else program(operands)
            structure[:] = known  # known only now where the first run traces
        except (CannotLiftError, ModuleFailedError):
            raise
        except Exception as error:
            raise _failure(error, dtype, f"Flax module {self.name}") from error
        return (
            [to_numpy(one) for one in outputs],
            {name: to_numpy(one) for name, one in of_weights.items()},
            {name: to_numpy(one) for name, one in of_inputs.items()},
        )

    def _program(self, function: Callable[..., Any], operands: Any, dtype: str | None, mode: str) -> Callable[..., Any]:
        if dtype == "float64":
            try:
                closed, tree = self._trace_lifted(function, operands)
            except _UNTRACEABLE:
                return self._directly(function, lift=True)
            return lambda operands: jax.tree.unflatten(tree, evaluate(closed, *jax.tree.leaves(operands)))
        if mode == "jit":
            compiled = jax.jit(function)
            return lambda operands: compiled(*jax.device_put(operands, self.device))
        try:
            # What is compiled within the module was perhaps traced before, with masks of its own.
            with jax.disable_jit() if self.train else contextlib.nullcontext():
                closed, tree = _trace(function, operands)
        except _UNTRACEABLE:
            return self._directly(function, lift=False)
        if mode == "jitter":
            return lambda operands, seed: jax.tree.unflatten(
                tree,
                _walk(
                    closed.jaxpr, closed.consts, jax.device_put(jax.tree.leaves(operands), self.device), Jitter(seed)
                ),
            )
        run = _op_by_op(closed)
        return lambda operands: jax.tree.unflatten(tree, run(*jax.device_put(jax.tree.leaves(operands), self.device)))

    def _trace_lifted(self, function: Callable[..., Any], operands: Any) -> tuple[Any, Any]:
        """Trace a function in float64.

        Loops and compiled parts are traced once, as they are. A loop that carries what was float32 before it can't be,
        and masks are asked for anew in every part; there each step is traced by itself.
        """
        if not self.train:
            # Whatever goes wrong here goes right below, or is raised there.
            with contextlib.suppress(Exception), lifted():
                return _trace(function, operands)
        try:
            with lifted(), jax.disable_jit():
                return _trace(function, operands)
        except _UNTRACEABLE:
            with lifted():  # control flow on values, perhaps below a loop that has to stay one
                return _trace(function, operands)

    def _directly(self, function: Callable[..., Any], *, lift: bool) -> Callable[[Any], Any]:
        """Run a function that can't be traced, because it looks at values."""

        def run(operands: Any, seed: int = 0) -> Any:
            with lifted() if lift else contextlib.nullcontext():
                result = function(*jax.tree.map(jnp.asarray, operands))
                return jax.tree.map(np.asarray, result)

        return run

    def _part(self, path: str) -> _Part:
        if path not in self._parts:
            self._parts[path] = _Part(self.module, path)
        return self._parts[path]


class _Part:
    """A submodule taken apart, to be merged around other weights."""

    def __init__(self, module: nnx.Module, path: str):
        whole = nnx.to_flat_state(nnx.state(module, WEIGHTS))
        owners = {id(variable.get_value()): _name(where) for where, variable in whole}
        known = {_name(where) for where, _ in whole}
        self._graphdef, weights, rest = nnx.split(_at(module, path), WEIGHTS, ...)
        self._weights, self._rest = nnx.to_flat_state(weights), nnx.to_flat_state(rest)
        self.names: dict[Any, str] = {}
        for where, variable in self._weights:
            name = ".".join(filter(None, (path, _name(where))))
            # A variable that is tied to one elsewhere has its name there.
            self.names[where] = name if name in known else owners[id(variable.get_value())]
        self.trainable = {
            self.names[where]
            for where, variable in self._weights
            if isinstance(variable, nnx.Param) and jnp.issubdtype(variable.get_value().dtype, jnp.floating)
        }

    def merged(self, weights: Mapping[str, Any], dtype: str | None, seed: int) -> nnx.Module:
        """Return the submodule, in eval mode, around other weights."""
        flat = [
            (where, variable.replace(jnp.asarray(weights.get(self.names[where], variable.get_value()))))
            for where, variable in self._weights
        ]
        rest = [(where, _constant(leaf, dtype, seed)) for where, leaf in self._rest]
        module: nnx.Module = nnx.merge(self._graphdef, nnx.from_flat_state(flat), nnx.from_flat_state(rest))
        module.eval()
        return module


@contextlib.contextmanager
def _tapped(module: nnx.Module, shifts: Any, frozen: list[Any], records: list[Any]) -> Iterator[None]:
    """Record the inputs and outputs of every submodule's call, and shift its outputs by zeros to differentiate by."""
    paths = {id(child): _name(path) for path, child in nnx.iter_modules(module) if path}
    classes = {type(child) for path, child in nnx.iter_modules(module) if path}
    owners = {kind: next(base for base in kind.__mro__ if "__call__" in vars(base)) for kind in classes if _calls(kind)}
    originals = {base: vars(base)["__call__"] for base in owners.values()}
    numbers: dict[str, int] = {}
    depth: list[int] = []
    order = iter(range(10**9))

    def tap(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self))
            if path is None or id(self) in depth:
                return original(self, *args, **kwargs)
            position, number = next(order), numbers.get(path, 0)
            numbers[path] = number + 1
            inputs = [leaf for _, leaf in flatten((args, kwargs), _is_jax_array)]
            skeleton = replace((args, kwargs), _is_jax_array, [_SLOT] * len(inputs))
            depth.append(id(self))
            try:
                result = original(self, *args, **kwargs)
            finally:
                depth.pop()
            outputs = [leaf for _, leaf in flatten(result, _is_jax_array)]
            if shifts is not None:
                zeros = iter(shifts[len(records)])
                outputs = [one + next(zeros) if _is_float(one) else one for one in outputs]
                result = replace(result, _is_jax_array, outputs)
            frozen.append((position, path, number, skeleton))
            records.append((inputs, outputs))
            return result

        return call

    for base, original in originals.items():
        base.__call__ = tap(original)
    try:
        yield
    finally:
        for base, original in originals.items():
            base.__call__ = original


class _Slot:
    """Stands for an array in the arguments of a recorded call."""


_SLOT = _Slot()


def _trace(function: Callable[..., Any], operands: Any) -> tuple[Any, Any]:
    """Return the jaxpr of a function and the structure of its result."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*operands)
    return closed, jax.tree.structure(shape)


def _op_by_op(closed: Any) -> Callable[..., list[Any]]:
    """Return a function that runs each operation by itself, unfused.

    Compiling one program per operation costs 50 ms each, compiling all of them as one, with barriers in between,
    4 ms each: whichever is less.
    """
    equations, distinct = _count(closed.jaxpr)

    def run(*args: Any) -> list[Any]:
        return _walk(closed.jaxpr, closed.consts, args)

    def barred(*args: Any) -> list[Any]:
        return _walk(closed.jaxpr, closed.consts, args, _Barrier())

    return run if 50 * len(distinct) < 200 + 4 * equations else jax.jit(barred)


class _Barrier:
    """Keeps the compiler from fusing one operation with the next."""

    def moved(self, name: str, results: Sequence[Any]) -> list[Any]:
        """Return the results of the operation `name`, as they are."""
        if name in _MOVES or not all(isinstance(one, Array) for one in results):
            return list(results)
        return list(jax.lax.optimization_barrier(tuple(results)))


def _walk(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], after: _Barrier | Jitter | None = None) -> list[Any]:
    """Run a jaxpr operation by operation; `after` gets what each returns."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    last = last_uses(jaxpr)
    for position, equation in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in equation.invars]
        called = inline(equation)
        if called is not None:
            results = _walk(called.jaxpr, called.consts, operands, after)
        else:
            result = equation.primitive.bind(*operands, **equation.params)
            results = list(result) if equation.primitive.multiple_results else [result]
            if after is not None:
                results = after.moved(equation.primitive.name, results)
        values.update(zip(equation.outvars, results, strict=True))
        for variable in last.get(position, ()):
            values.pop(variable, None)
    return [read(atom) for atom in jaxpr.outvars]


def _count(jaxpr: Any) -> tuple[int, set[Any]]:
    """Return how many operations there are, and the distinct ones."""
    total, distinct = 0, set()
    for equation in jaxpr.eqns:
        called = inline(equation)
        if called is None:
            total += 1
            distinct.add((equation.primitive.name, str(equation.params), str([one.aval for one in equation.invars])))
        else:
            more, found = _count(called.jaxpr)
            total += more
            distinct |= found
    return total, distinct


def _stock_name(module: Any) -> str:
    """Return the class of a module, or the framework's own class that it is derived from."""
    own = [kind for kind in type(module).__mro__ if kind.__module__.startswith("flax.nnx.")]
    return next((kind.__name__ for kind in own if kind.__name__ != "Module"), type(module).__name__)


def _device(module: nnx.Module, wanted: str | None) -> Any:
    if wanted is None:
        leaf = next((one for one in jax.tree.leaves(nnx.state(module, WEIGHTS)) if isinstance(one, Array)), None)
        return jax.devices()[0] if leaf is None else next(iter(leaf.devices()))
    try:
        return jax.devices(wanted)[0]
    except RuntimeError:
        raise ModuleFailedError(f"device {wanted}: JAX finds none on this machine") from None


def _at(module: nnx.Module, path: str) -> Any:
    found: Any = module
    for key in path.split(".") if path else ():
        found = found[int(key)] if key.isdigit() and not hasattr(found, key) else _item(found, key)
    return found


def _item(node: Any, key: str) -> Any:
    return node[key] if isinstance(node, Mapping) else getattr(node, key)


def _signature(module: nnx.Module) -> dict[str, bool]:
    """Return argument name -> whether it can be given by position."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(module).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return {}
    return {
        one.name: one.kind in positional for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }


def _outputs(result: Any, name: str) -> tuple[list[str], list[Any]]:
    found = flatten(result, _is_jax_array)
    if not found:
        raise ModuleFailedError(f"the Flax module {name} returned {type(result).__name__}, which holds no array")
    return [path for path, _ in found], [jnp.asarray(array) for _, array in found]


def _split(outputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the outputs that can be differentiated, and the others."""
    return [one for one in outputs if _is_float(one)], [one for one in outputs if not _is_float(one)]


def _joined(outputs: list[Any], rest: list[Any], kinds: list[bool]) -> list[Any]:
    first, second = iter(outputs), iter(rest)
    return [next(first) if kind else next(second) for kind in kinds]


def _cotangents(given: Sequence[Any], outputs: list[Any], kinds: list[bool]) -> list[Any]:
    wanted = [one for one, kind in zip(given, kinds, strict=True) if kind]
    return [
        jnp.zeros_like(output) if one is None else jnp.asarray(one, output.dtype)
        for one, output in zip(wanted, outputs, strict=True)
    ]


def _divide(weights: Mapping[str, Any], names: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {name: array for name, array in weights.items() if name in names},
        {name: array for name, array in weights.items() if name not in names},
    )


def _as(array: np.ndarray[Any, Any], dtype: str | None) -> np.ndarray[Any, Any]:
    return array.astype(jnp.dtype(dtype), copy=False) if dtype is not None and _is_float(array) else array


def _constant(leaf: Any, dtype: str | None, seed: int) -> Any:
    """Return a variable that is no weight, with its floats in `dtype` and its random keys folded with the seed."""
    value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    kind = getattr(value, "dtype", None)
    if kind is None:
        return leaf
    if jnp.issubdtype(kind, jax.dtypes.prng_key):
        changed = jax.random.fold_in(value, seed) if seed and value.ndim == 0 else value
    elif dtype is not None and jnp.issubdtype(kind, jnp.floating):
        changed = jnp.asarray(np.asarray(value).astype(jnp.dtype(dtype)))
    else:
        changed = value
    return leaf.replace(changed) if isinstance(leaf, nnx.Variable) else changed


def _failure(error: Exception, dtype: str | None, what: str) -> Exception:
    text = " ".join(str(error).split()) or "no message"
    message = f"{what} raised {type(error).__name__}: {text if len(text) <= 300 else text[:300] + ' ...'}"
    return CannotLiftError(message) if dtype == "float64" else ModuleFailedError(message)


def _layout(tree: Any) -> Any:
    return jax.tree.structure(tree), tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(tree))


def _static(arguments: Arguments) -> str:
    rest = [repr(leaf) for _, leaf in flatten((arguments.args, dict(arguments.kwargs)), lambda one: not _is_tree(one))]
    return repr(arguments.paths) + repr([text for text in rest if not text.startswith("array(")])


def _is_tree(value: Any) -> bool:
    return isinstance(value, (tuple, list, Mapping)) or is_array(value)


def _is_rate(child: Any, name: str) -> bool:
    value = getattr(child, name, None)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value <= 1.0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_jax_array(value: Any) -> bool:
    if isinstance(value, nnx.Variable):
        return False
    return isinstance(value, (Array, np.ndarray)) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)


def _is_slot(value: Any) -> bool:
    return value is _SLOT


def _is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _calls(kind: type) -> bool:
    return any("__call__" in vars(base) for base in kind.__mro__)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
