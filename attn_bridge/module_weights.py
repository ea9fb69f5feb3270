"""The weights of modules: copied from one framework's module into the other's, by rules of the modules' own configs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from . import backends
from .printable import printable
from .specs.stock_attention import PACKED
from .weights import LazyArray, Region, Rule, Rules, Side, WeightsMismatchError, as_rules, everything, joint, slices

_WITHOUT_MEANING = ("dropout", "drop_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "context_length")
"""Fields of configs that the same weights may differ in: what training drops, and the longest sequence."""


@dataclasses.dataclass(frozen=True)
class TransferReport:
    """What `transfer` copied: direction, and per tensor ``(source name, target name, target shape, dtype)``.

    `redtyped` lists the target names whose dtype was changed to the source's, so that no bit is lost.
    """

    direction: str
    tensors: tuple[tuple[str, str, tuple[int, ...], str], ...]
    redtyped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tensors)

    def __str__(self) -> str:
        lines = [f"{self.direction}: {len(self)} tensors copied bit for bit"]
        for source, target, shape, dtype in self.tensors:
            note = ", dtype taken from the source" if target in self.redtyped else ""
            lines.append(f"  {source} -> {target} {shape} {dtype}{note}")
        return "\n".join(lines)


def transfer(source: Any, target: Any, rules: Rules | Iterable[Rule] | None = None) -> TransferReport:
    """Copy all weights of a torch module into its Flax twin, or back; the direction follows from the types.

    The copy is exact to the last bit: where the two differ in dtype, the target takes the source's. It is strict and
    all or nothing: whatever is wrong, the target is left as it was.

    Args:
        source: a ``torch.nn.Module`` or ``flax.nnx.Module``.
        target: a module of the other framework, with the same parameters.
        rules: the rule set; by default that of the modules' own config (or of our modules inside a larger one, at the
            same path on both sides), and of `torch.nn.MultiheadAttention` and `flax.nnx.MultiHeadAttention` at the same
            path, stock layers or our drop-ins. A tensor of the target that a rule drops keeps its numbers.

    Returns:
        A report of every tensor copied; print it.

    Raises:
        TypeError: not one module of each framework, or a dtype that the target's framework would narrow.
        WeightsMismatchError: (a ValueError) lists every missing, unexpected and misshapen name.
        ValueError: the two configs differ in what the weights mean, such as ``num_heads``; or no rules are known.
    """
    side, other = _sides(source, target)
    reader, writer = backends.load(side), backends.load(other)
    rule_set = _default_rules((reader, writer), (source, target), side) if rules is None else as_rules(rules)
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
            raise WeightsMismatchError(missing, unexpected, misshapen)
        check_same_meaning(reader.find_configs(source), writer.find_configs(target))
        write = writer.prepare_weights(target, converted)
    write()
    redtyped = tuple(name for name, array in converted.items() if array.dtype.name != wanted[name][1])
    rows = ((names[name], name, array.shape, array.dtype.name) for name, array in converted.items())
    return TransferReport(f"{side} -> {other}", tuple(rows), redtyped)


_COPIES: Mapping[Side, str] = {
    "torch": "target.load_state_dict(source.state_dict())",
    "flax": "nnx.update(target, nnx.state(source, nnx.Param))",
}
"""The call that copies weights within a framework."""


def _sides(source: Any, target: Any) -> tuple[Side, Side]:
    """Return the frameworks of two modules, one of each."""
    side, other = backends.framework_of(source), backends.framework_of(target)
    if side is None or other is None or side == other:
        advice = f", both of {side}; use {_COPIES[side]}" if side is not None and side == other else ""
        raise TypeError(
            "transfer takes a torch.nn.Module and a flax.nnx.Module, in either order, "
            f"got {type(source).__name__} and {type(target).__name__}{advice}"
        )
    return side, other


def _default_rules(backends_of: tuple[ModuleType, ModuleType], modules: tuple[Any, Any], side: Side) -> Rules:
    """Return the rules of the source's configs, and of the stock attention layers that both modules have."""
    found = [backend.find_stock_attention(module) for backend, module in zip(backends_of, modules, strict=True)]
    check_same_meaning(*found)
    first = 0 if side == "torch" else 1
    names = backends_of[first].describe_weights(modules[first]) if found[0] else {}
    rules = [
        rule
        for path in found[0].keys() & found[1].keys()
        for rule in found[0][path].rules(is_packed=f"{path}.{PACKED}".lstrip(".") in names).prefixed(path, path)
    ]
    if not rules or backends_of[0].find_configs(modules[0]):
        rules += own_rules(backends_of[0], modules[0])
    return Rules(rules)


def _converted(
    pairs: Mapping[str, tuple[Rule, str]], arrays: Mapping[str, LazyArray], side: Side
) -> tuple[dict[str, LazyArray], list[str]]:
    """Return the other side's arrays, which are read when they are written, and list what does not fit."""
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


def _joint_arrays(plan: joint.Plan, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Return the arrays that joint rules make, which are read when they are written.

    The sources of the last array stay in memory: the parts of a tensor are written one after the other.
    """
    kept: dict[str, np.ndarray[Any, Any]] = {}

    def read(made: joint.Made, region: Region) -> np.ndarray[Any, Any]:
        if kept.keys() != made.placements.keys():
            kept.clear()
            kept.update({name: arrays[name].read(everything(arrays[name].shape)) for name in made.placements})
        return np.array(made.build(kept)[slices(region)], order="C")

    return {name: LazyArray(made.shape, made.dtype, functools.partial(read, made)) for name, made in plan.made.items()}


def _read(array: LazyArray, rule: Rule, side: Side, region: Region) -> np.ndarray[Any, Any]:
    """Return a region of what a rule makes of an array; where it only moves axes, no more of that is read."""
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


def check_same_meaning(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse twins whose configs give the same weights another meaning (heads split otherwise, another eps)."""
    for path in ours.keys() & theirs.keys():
        a, b = ours[path], theirs[path]
        if type(a) is not type(b):
            raise ValueError(f"configs differ: {type(a).__name__} in the source, {type(b).__name__} in the target")
        for field in dataclasses.fields(a):
            one, two = getattr(a, field.name), getattr(b, field.name)
            if one != two and field.name not in _WITHOUT_MEANING:
                raise ValueError(f"configs differ: {field.name} is {one} in the source and {two} in the target")
