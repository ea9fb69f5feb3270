"""Which submodule is which: paired by the parameters that they hold, and what settings differ within a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .report import Side
from .subject import Submodule

if TYPE_CHECKING:
    from .pair import Comparison


def pair_modules(matches: Sequence[Any], torch: Sequence[Submodule], flax: Sequence[Submodule]) -> dict[str, str]:
    """Return torch path -> Flax path of the submodules that hold the same parameters.

    Submodules without parameters are paired by name inside paired ones.
    """
    ours, theirs = _holdings(matches, "torch", torch), _holdings(matches, "flax", flax)
    classes = [{module.path: module.type.lower() for module in side} for side in (torch, flax)]
    pairs = {"": ""}
    for held in dict.fromkeys(ours.values()):
        if not held:
            continue
        mine = [path for path, other in ours.items() if other == held and path]
        its = [path for path, other in theirs.items() if other == held and path]
        if len(mine) == len(its):
            pairs |= dict(zip(mine, its, strict=True))
            continue
        left = dict.fromkeys(its)
        for alike in (_same_class_and_name, _same_class, _same_name):
            for path in mine:
                same = next((one for one in left if alike(path, one, classes)), None) if path not in pairs else None
                if same is not None:
                    pairs[path] = same
                    del left[same]
        rest = [path for path in mine if path not in pairs]
        pairs |= dict(zip(reversed(rest), reversed(list(left)), strict=False))
    taken = set(pairs.values())
    names = {module.path for module in flax}
    for module in torch:
        parent, _, name = module.path.rpartition(".")
        if module.path in pairs or ours[module.path] or parent not in pairs:
            continue
        other = f"{pairs[parent]}.{name}" if pairs[parent] else name
        if other in names and other not in taken and not theirs.get(other):
            pairs[module.path] = other
            taken.add(other)
    return pairs


Classes = Sequence[Mapping[str, str]]


def _same_class(one: str, two: str, classes: Classes) -> bool:
    return classes[0][one] == classes[1][two]


def _same_name(one: str, two: str, classes: Classes) -> bool:
    return one.rpartition(".")[2] == two.rpartition(".")[2]


def _same_class_and_name(one: str, two: str, classes: Classes) -> bool:
    return _same_class(one, two, classes) and _same_name(one, two, classes)


def _holdings(matches: Sequence[Any], side: Side, modules: Sequence[Submodule]) -> dict[str, frozenset[int]]:
    """Return path -> the numbers of the matches that the module holds."""
    held: dict[str, set[int]] = {module.path: set() for module in modules}
    for number, match in enumerate(matches):
        path = (match.torch if side == "torch" else match.flax).parameter.path
        while True:
            if path in held:
                held[path].add(number)
            if not path:
                break
            path = path.rpartition(".")[0]
    return {path: frozenset(numbers) for path, numbers in held.items()}


def differing_settings(comparison: Comparison) -> list[str]:
    """Say which settings (eps, heads, slopes) of paired submodules are not the same on both sides."""
    found = []
    pairs = pair_modules(comparison.pairing.matches, comparison.torch.modules(), comparison.flax.modules())
    ours, theirs = comparison.torch.settings(), comparison.flax.settings()
    for path, other in pairs.items():
        mine, its = ours.get(path, {}), theirs.get(other, {})
        for name in mine.keys() & its.keys():
            if mine[name] != its[name]:
                where = path or comparison.torch.name
                found.append(f"{name} of {where} is {mine[name]:g} in torch and {its[name]:g} in Flax")
    return found
