"""Which submodule is which: paired by the parameters that they hold, and what settings differ within a pair."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from ..pair import Pair
from ..sides.subject import Submodule

NOTED = ("eps", "num_heads", "num_kv_heads", "negative_slope", "momentum")
"""Settings that deserve a note even if both sides agree on all samples."""

SHOWN = tuple(name for name in NOTED if name != "momentum")
"""Those that can explain a difference of one call: a momentum changes the running statistics after it."""

Called = Mapping[Literal["first", "second"], Mapping[str, Collection[int]]]
"""Side -> path of each submodule that was called -> how many elements the arrays have that it returned."""

_KINDS = {
    "activation": r".*(gelu|silu|swish|elu|relu6?|tanh|sigmoid|softplus|mish|act|activation|act(ivation)?fn)",
    "softmax": r"(log)?softmax",
    "dropout": r"(alpha|feature)?dropout\d?d?|drop(path)?|stochasticdepth",
    "pool": r"(adaptive)?(avg|max|mean)pool(ing)?\d?d?",
    "rotary": r".*(rope|rotary).*",
    "identity": r"identity",
    "norm": r".*norm\d?d?",
}
"""Job of a class without parameters -> pattern of its name."""


def pair_modules(
    matches: Sequence[object], first: Sequence[Submodule], second: Sequence[Submodule], called: Called | None = None
) -> dict[str, str]:
    """Return first path -> second path of the submodules that contain the same parameters.

    Among nested submodules with the same parameters, called ones are paired with each other before containers are.
    Submodules without parameters are paired by name, else by their job, inside paired ones.

    Args:
        matches: the pairs of parameters, with a ``first`` and a ``second`` tensor.
        first: the submodules of the first side, a parent before its children.
        second: those of the second side.
        called: the called submodules, and the sizes of their outputs.
    """
    pairs = {"": ""}
    for mine, its in _groups(matches, first, second):
        if len(mine) == len(its):
            pairs |= dict(zip(mine, its, strict=True))
        else:
            pairs |= _paired_by_likeness(mine, its, first, second, called)
    _pair_without_parameters(pairs, matches, first, second)
    return pairs


def alternatives(
    matches: Sequence[object], first: Sequence[Submodule], second: Sequence[Submodule]
) -> dict[str, list[tuple[str, str]]]:
    """Return first path -> the pairs of which its own is one, where one side nests more modules that hold the same."""
    options: dict[str, list[tuple[str, str]]] = {}
    for mine, its in _groups(matches, first, second):
        if len(mine) != len(its):
            options |= {path: [(one, two) for one in mine for two in its] for path in mine}
    return options


def _groups(
    matches: Sequence[object], first: Sequence[Submodule], second: Sequence[Submodule]
) -> list[tuple[list[str], list[str]]]:
    """Return the paths on each side that hold the same parameters."""
    ours, theirs = _holdings(matches, "first", first), _holdings(matches, "second", second)
    back = collections.defaultdict(list)
    for path, numbers in theirs.items():
        if path:
            back[numbers].append(path)
    groups = []
    for numbers in dict.fromkeys(ours.values()):
        if numbers and back[numbers]:
            groups.append(([path for path, other in ours.items() if other == numbers and path], back[numbers]))
    return [(mine, its) for mine, its in groups if mine]


def _paired_by_likeness(
    mine: Sequence[str],
    its: Sequence[str],
    first: Sequence[Submodule],
    second: Sequence[Submodule],
    called: Called | None,
) -> dict[str, str]:
    """Pair nested modules that hold the same, as many as the side with fewer has."""
    classes = [{module.path: module.type.lower() for module in side} for side in (first, second)]

    def is_called(side: Literal["first", "second"], path: str) -> bool:
        return called is None or path in called[side]

    def returns_the_same(path: str, other_path: str) -> bool:
        return called is None or bool({*called["first"].get(path, ())} & {*called["second"].get(other_path, ())})

    def unlikeness(path: str, other_path: str) -> tuple[bool, bool, bool, bool, int]:
        return (
            not (is_called("first", path) and is_called("second", other_path)),
            not returns_the_same(path, other_path),
            classes[0][path] != classes[1][other_path],
            _last(path) != _last(other_path),
            -path.count(".") - other_path.count("."),
        )

    pairs: dict[str, str] = {}
    # In this order: both are called, outputs of one size, one class, one name; then the innermost.
    options = sorted(((one, two) for one in mine for two in its), key=lambda pair: unlikeness(*pair))
    for first_path, second_path in options:
        if first_path not in pairs and second_path not in pairs.values():
            pairs[first_path] = second_path
    return pairs


def _pair_without_parameters(
    pairs: dict[str, str], matches: Sequence[object], first: Sequence[Submodule], second: Sequence[Submodule]
) -> None:
    """Pair the submodules without parameters inside paired ones: by name, then by their job.

    The rest is paired across modules that wrap the paired ones, or are wrapped by them, with the same parameters:
    children of a wrapper and of the module that it wraps count as siblings.
    """
    ours, theirs = _holdings(matches, "first", first), _holdings(matches, "second", second)
    # The narrower evidence first: inside one module before across wrappers, and by name before by job.
    for wide, by_kind in itertools.product((False, True), repeat=2):
        paired = set(pairs.values())
        for parent, second_parent in list(pairs.items()):
            parents = _nested(parent, ours) if wide else {parent}
            second_parents = _nested(second_parent, theirs) if wide else {second_parent}
            mine = [one for one in _children(parents, first) if not ours[one.path] and one.path not in pairs]
            its = [one for one in _children(second_parents, second) if not theirs[one.path] and one.path not in paired]
            key = _kind if by_kind else (lambda module: _last(module.path))
            for label in dict.fromkeys(map(key, mine)):
                some = [one.path for one in mine if key(one) == label]
                others = [one.path for one in its if key(one) == label]
                if label and len(some) == len(others):
                    pairs |= dict(zip(some, others, strict=True))
                    paired |= set(others)


def _nested(path: str, numbers_of: Mapping[str, frozenset[int]]) -> set[str]:
    """Return the modules that hold the same as one, itself among them; of none that holds nothing, itself alone."""
    return (
        {other for other, numbers in numbers_of.items() if numbers == numbers_of[path]} if numbers_of[path] else {path}
    )


def _children(paths: Collection[str], modules: Sequence[Submodule]) -> list[Submodule]:
    return [one for one in modules if one.path and one.path.rpartition(".")[0] in paths]


def _kind(module: Submodule) -> str:
    """Return the job of a module without parameters, "" if its class does not show it."""
    name = module.type.lower()
    return next((kind for kind, pattern in _KINDS.items() if re.fullmatch(pattern, name)), "")


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _holdings(matches: Sequence[object], side: str, modules: Sequence[Submodule]) -> dict[str, frozenset[int]]:
    """Return path -> the numbers of the matches that the module holds."""
    numbers_of: dict[str, set[int]] = {module.path: set() for module in modules}
    for number, match in enumerate(matches):
        path = getattr(match, side).parameter.path
        while True:
            if path in numbers_of:
                numbers_of[path].add(number)
            if not path:
                break
            path = path.rpartition(".")[0]
    return {path: frozenset(numbers) for path, numbers in numbers_of.items()}


def differing(
    pairs: Mapping[str, str],
    first: Mapping[str, Mapping[str, object]],
    second: Mapping[str, Mapping[str, object]],
    labels: Mapping[Any, str],
    names: Mapping[str, str],
    settings: Collection[str] = NOTED,
) -> list[str]:
    """Return a message for each setting (eps, heads, slopes) that differs between paired submodules.

    Args:
        pairs: first path -> second path.
        first: settings of the first side by path.
        second: those of the second side.
        labels: names of the sides.
        names: first path -> its name in messages, if not the path.
        settings: names of the settings.
    """
    spelled_labels = {side: label.replace("flax", "Flax") for side, label in labels.items()}
    messages = []
    for path, second_path in pairs.items():
        mine, its = first.get(path, {}), second.get(second_path, {})
        for name in settings:
            if name in mine and name in its and mine[name] != its[name]:
                first_value, second_value = (
                    _written(name, options[name], label)
                    for options, label in ((mine, spelled_labels["first"]), (its, spelled_labels["second"]))
                )
                values = f"{first_value} in {spelled_labels['first']} and {second_value} in {spelled_labels['second']}"
                messages.append(f"{name} of {names.get(path, path)} is {values}")
    return messages


def _written(name: str, value: object, label: str) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    flax = f" (written {1.0 - value:g})" if name == "momentum" and label == "Flax" else ""
    return f"{value:g}{flax}"


def differing_settings(pair: Pair, names: Collection[str] = NOTED) -> list[str]:
    """Return a message for each setting that differs between paired submodules, or layers, of a whole pair.

    Args:
        pair: the pair.
        names: names of the settings.
    """
    settings = pair.first.settings(), pair.second.settings()
    pairs = pair_modules(pair.pairing.matches, pair.first.modules(), pair.second.modules())
    if any(side.kind.endswith("function") for side in (pair.first, pair.second)):
        names = [name for name in names if name != "momentum"]  # libraries write it in either sense
        pairs = _paired_layers(pair, settings)
    return differing(pairs, *settings, pair.labels, {"": pair.first.name}, names)


def _paired_layers(pair: Pair, settings: Sequence[Collection[str]]) -> dict[str, str]:
    """Return first path -> second path of the innermost layers with settings that hold paired weights."""
    pairs: dict[str, str] = {}
    for match in pair.pairing.matches:
        first, second = (
            max((path for path in paths if re.match(rf"{re.escape(path)}[./]", tensor.source)), key=len, default="")
            for paths, tensor in zip(settings, (match.first, match.second), strict=True)
        )
        if first and second:
            pairs.setdefault(first, second)
    return pairs
