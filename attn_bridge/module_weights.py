"""The weights of modules: copied from one framework's module into the other's, by rules of the modules' own configs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from . import backends
from .printable import printable
from .specs.stock_attention import PACKED
from .specs.stock_layers import StockLayer
from .weights import LazyArray, Region, Rule, Rules, Side, WeightsMismatchError, everything, joint, slices
from .weights.advice import suggest_rules
from .weights.user_rules import RulesOrPairs, Shapes, added, rules_between

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WITHOUT_MEANING = ("dropout", "drop_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "context_length")
"""Fields of configs that the same weights may differ in: what training drops, and the longest sequence."""


@dataclasses.dataclass(frozen=True)
class TransferReport:
    """Report of `transfer`: direction, and per tensor ``(source name, target name, target shape, dtype)``.

    `redtyped` lists the target names whose dtype was changed to the source's, so that no bit is lost. `notes` lists
    settings in which stock layers differ, so that the same weights give different results.
    """

    direction: str
    tensors: tuple[tuple[str, str, tuple[int, ...], str], ...]
    redtyped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tensors)

    def __str__(self) -> str:
        lines = [f"{self.direction}: {len(self)} tensors copied bit for bit"]
        for source, target, shape, dtype in self.tensors:
            note = ", dtype taken from the source" if target in self.redtyped else ""
            lines.append(f"  {source} -> {target} {shape} {dtype}{note}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def transfer(source: object, target: object, rules: RulesOrPairs | None = None) -> TransferReport:
    """Copy all weights of a torch module into its Flax twin, or back; the direction follows from the types.

    The copy is exact to the last bit: where the two differ in dtype, the target takes the source's. It is strict and
    all or nothing: on any error, the target is unchanged.

    Args:
        source: a ``torch.nn.Module`` or ``flax.nnx.Module``.
        target: a module of the other framework, with the same parameters.
        rules: rules for tensors that the built-in rules miss or pair otherwise: `Rule` objects, tables, a TOML file's
            path, or the ``report.pairing`` of a comparison. Built-in rules cover our modules (by their config),
            `torch.nn.MultiheadAttention` with `flax.nnx.MultiHeadAttention` (and our drop-ins), and stock layers of one
            type: linear, embedding, convolutions, and norms; always at the same path on both sides. A tensor of the
            target that a rule drops keeps its numbers.

    Returns:
        A report of every tensor copied; print it.

    Raises:
        TypeError: not one module of each framework, or a dtype that the target's framework would narrow.
        WeightsMismatchError: (a ValueError) lists every missing, unexpected and misshapen name, and rules for them.
        ValueError: the two configs differ in the meaning of weights, such as ``num_heads``; or a rule is malformed.
    """
    side, other = _sides(source, target)
    reader, writer = backends.load(side), backends.load(other)
    rule_set, notes = _rules((reader, writer), (source, target), side, rules)
    with reader.together(source), writer.together(target):
        arrays: dict[str, LazyArray] = reader.lazy_weights(source)
        wanted: dict[str, tuple[tuple[int, ...], str]] = writer.describe_weights(target)
        plan = rule_set.plan_joint(arrays, side)
        pairs, missing, unexpected = rule_set.plain.pair([name for name in arrays if name not in plan.used], side)
        converted, misshapen = _converted(pairs, arrays, side)
        converted |= _joint_arrays(plan, arrays)
        names = {other: name for name, (_, other) in pairs.items()}
        names |= {name: ", ".join(made.placements) for name, made in plan.made.items()}
        missing += [*plan.missing, *(wanted.keys() - names.keys() - {*joint.dropped(rule_set, wanted, other)})]
        unexpected += [name for name in names if name not in wanted]
        misshapen += plan.misshapen
        for name, array in converted.items():
            if name in wanted and array.shape != wanted[name][0]:
                misshapen.append(f"{printable(name)}: expected {wanted[name][0]}, got {array.shape}")
        if missing or unexpected or misshapen:
            shapes = (
                {name: array.shape for name, array in arrays.items()},
                {name: one[0] for name, one in wanted.items()},
            )
            advice = _advice((reader, writer), (source, target), side, (set(unexpected), set(missing)), shapes)
            raise WeightsMismatchError(missing, unexpected, misshapen, advice)
        check_same_meaning(reader.find_configs(source), writer.find_configs(target))
        write = writer.prepare_weights(target, converted)
    write()
    redtyped = tuple(name for name, array in converted.items() if array.dtype.name != wanted[name][1])
    rows = ((names[name], name, array.shape, array.dtype.name) for name, array in converted.items())
    return TransferReport(f"{side} -> {other}", tuple(rows), redtyped, notes)


_COPIES: Mapping[Side, str] = {
    "torch": "target.load_state_dict(source.state_dict())",
    "flax": "nnx.update(target, nnx.state(source, nnx.Param))",
}
"""The call that copies weights within a framework."""


def _sides(source: object, target: object) -> tuple[Side, Side]:
    """Return the frameworks of two modules, one of each."""
    side, other = backends.framework_of(source), backends.framework_of(target)
    if side is None or other is None or side == other:
        advice = f", both of {side}; use {_COPIES[side]}" if side is not None and side == other else ""
        raise TypeError(
            "transfer takes a torch.nn.Module and a flax.nnx.Module, in either order, "
            f"got {type(source).__name__} and {type(target).__name__}{advice}"
        )
    return side, other


def _rules(
    backends_of: tuple[ModuleType, ModuleType], modules: tuple[object, object], side: Side, rules: RulesOrPairs | None
) -> tuple[Rules, tuple[str, ...]]:
    """Return the caller's rules and the built-in ones for all other tensors, and notes on settings that differ."""
    pair = list(zip(backends_of, modules, strict=True))
    if side == "flax":
        pair.reverse()
    torch, flax = ({name: row[0] for name, row in one.describe_weights(module).items()} for one, module in pair)
    own = Rules() if rules is None else rules_between(rules, torch, flax)
    attention = [backend.find_stock_attention(module) for backend, module in zip(backends_of, modules, strict=True)]
    configs = backends_of[0].find_configs(modules[0])
    shared_paths = attention[0].keys() & attention[1].keys()
    described = [backend.find_stock_layers(module) for backend, module in zip(backends_of, modules, strict=True)]
    layers = [
        {path: one for path, one in some.items() if not _is_inside(path, {*shared_paths, *configs})}
        for some in described
    ]
    if rules is None:
        check_same_meaning(*attention)
    _check_groups(*layers)
    built_in = [
        rule
        for path in sorted(shared_paths)
        for rule in attention[0][path].rules(is_packed=_below(path, PACKED) in torch).prefixed(path, path)
    ]
    shared = [path for path in layers[0].keys() & layers[1].keys() if layers[0][path].kind == layers[1][path].kind]
    built_in += [rule for path in sorted(shared) for rule in layers[0][path].rules(path, torch, flax)]
    built_in += own_rules(backends_of[0], modules[0]) if configs else ()
    notes = [
        f"{_below(path, 'eps')} is {layers[0][path].eps} in the source and {layers[1][path].eps} in the target"
        for path in sorted(shared)
        if None not in (layers[0][path].eps, layers[1][path].eps) and layers[0][path].eps != layers[1][path].eps
    ]
    return added(own, built_in), tuple(notes)


def _is_inside(path: str, outer: Iterable[str]) -> bool:
    """Whether a path equals one of several or is below it."""
    return any(path == one or not one or path.startswith(f"{one}.") for one in outer)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _check_groups(ours: Mapping[str, StockLayer], theirs: Mapping[str, StockLayer]) -> None:
    """Refuse group norms with different groups: their weights have the same shapes and another meaning."""
    for path in sorted(ours.keys() & theirs.keys()):
        if ours[path].kind == theirs[path].kind and ours[path].groups != theirs[path].groups:
            numbers = f"{ours[path].groups} in the source and {theirs[path].groups} in the target"
            raise ValueError(f"configs differ: {_below(path, 'num_groups')} is {numbers}")


def _advice(
    backends_of: tuple[ModuleType, ModuleType],
    modules: tuple[object, object],
    side: Side,
    names: tuple[set[str], set[str]],
    shapes: tuple[Shapes, Shapes],
) -> str:
    """Return rules for the uncovered names of source and target."""
    ours = {
        path for one, module in zip(backends_of, modules, strict=True) for path in one.find_configs(module)
    }  # the names inside our modules follow from their configs, and no rule settles them
    rest = [sorted(name for name in some if not _is_inside(name, ours)) for some in names]
    free = [{name: shape[name] for name in some if name in shape} for some, shape in zip(rest, shapes, strict=True)]
    classes = [one.module_classes(module) for one, module in zip(backends_of, modules, strict=True)]
    parents = sorted({name.rpartition(".")[0] for name in free[0]} & {name.rpartition(".")[0] for name in free[1]})
    differing = [
        f"{path or 'the module'} is a {classes[0][path]} in the source and a {classes[1][path]} in the target"
        for path in parents
        if path in classes[0] and path in classes[1] and classes[0][path] != classes[1][path]
    ]
    torch, flax = free if side == "torch" else free[::-1]
    return "; ".join([*differing[:2], *filter(None, [suggest_rules(torch, flax)])])


def _converted(
    pairs: Mapping[str, tuple[Rule, str]], arrays: Mapping[str, LazyArray], side: Side
) -> tuple[dict[str, LazyArray], list[str]]:
    """Return the other side's arrays, which are read when they are written, and lines on shapes that do not fit."""
    converted: dict[str, LazyArray] = {}
    misshapen: list[str] = []
    for name, (rule, other) in pairs.items():
        try:
            shape = rule.convert_shape(arrays[name].shape, side)
        except ValueError as error:
            misshapen.append(f"{printable(name)}: {error}")
            continue
        converted[other] = LazyArray(shape, arrays[name].dtype, functools.partial(_read, arrays[name], rule, side))
    return converted, misshapen


def _joint_arrays(plan: joint.JointPlan, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Return the arrays that joint rules make, which are read when they are written.

    The sources of the last array stay in memory: the parts of a tensor are written one after the other.
    """
    kept: dict[str, np.ndarray] = {}

    def read(made: joint.Made, region: Region) -> np.ndarray:
        if kept.keys() != made.placements.keys():
            kept.clear()
            kept.update({name: arrays[name].read(everything(arrays[name].shape)) for name in made.placements})
        return np.array(made.build(kept)[slices(region)], order="C")

    return {name: LazyArray(made.shape, made.dtype, functools.partial(read, made)) for name, made in plan.made.items()}


def _read(array: LazyArray, rule: Rule, side: Side, region: Region) -> np.ndarray:
    """Return a region of a converted array; if the rule only moves axes, only that region of the source is read."""
    own = rule.region(region, side)
    if own is None:
        return np.array(rule.convert(array.read(everything(array.shape)), side)[slices(region)], order="C")
    return np.ascontiguousarray(rule.convert(array.read(own), side)).reshape([stop - start for start, stop in region])


def own_rules(backend: Any, module: Any) -> Rules:
    """Return the rules of the configs found in a module, each below its path."""
    rules: list[Rule] = []
    configs = backend.find_configs(module)
    if not configs:
        raise ValueError(f"{type(module).__name__} has no config to take rules from; give rules=Rules([...])")
    for path, config in configs.items():
        rules.extend(config.rules().prefixed(path, path))
    return Rules(rules)


def check_same_meaning(ours: Mapping[str, DataclassInstance], theirs: Mapping[str, DataclassInstance]) -> None:
    """Refuse twins whose configs give the same weights another meaning: another split of heads, or another eps."""
    for path in ours.keys() & theirs.keys():
        a, b = ours[path], theirs[path]
        if type(a) is not type(b):
            raise ValueError(f"configs differ: {type(a).__name__} in the source, {type(b).__name__} in the target")
        for field in dataclasses.fields(a):
            our_value, their_value = getattr(a, field.name), getattr(b, field.name)
            if our_value != their_value and field.name not in _WITHOUT_MEANING:
                raise ValueError(
                    f"configs differ: {field.name} is {our_value} in the source and {their_value} in the target"
                )
