"""Refuses names that a conversion would keep although no model has them: wrappers, and several models in one tree.

Layouts of attention match our names below any prefix, so that a user's own model can be converted around them.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Sequence

from ...printable import printable, shell_word
from ...weights.placements import LayoutError
from ..layout import Layout
from .beginnings import MODULE, WRAPPERS, below, common, is_average, is_moment, patterns_of, suspects

_TABLE = re.compile(r"(?:decoder\.)?tok_emb\.(?:weight|embedding)(?:\.value)?")
"""Embedding table of a whole model of ours, by its own name."""

SHOWN = 4
"""Maximum prefixes that a line names."""


def check(names: Collection[str], layout: Layout, is_said: bool, prefix: str) -> None:
    """Refuse names that a conversion would keep although no model has them.

    Args:
        names: of all tensors.
        layout: theirs, which is not that of a whole model.
        is_said: whether the user named the layout, so that ambiguous parts count as parts of a model.
        prefix: prefix that was removed from them.

    Raises:
        LayoutError: wrappers, or an optimizer's state or several models; the message has the options to use.
    """
    own = layout.match(names)[0]
    bare, prefix = [name.removeprefix(own) for name in names], prefix + own
    _check_wrappers(bare, prefix)
    _check_models(bare, layout, prefix, is_said)
    front = common(bare)
    if front and not is_said and any(_TABLE.fullmatch(name[len(front) :]) for name in bare):
        raise LayoutError(
            f"all names begin with {printable(front)}, which would stay in front of those of a whole model; "
            f"--strip {shell_word(prefix + front)} takes it away, --from {layout.name} keeps it"
        )


def _check_wrappers(names: Sequence[str], prefix: str) -> None:
    fronts = dict.fromkeys(front for name in names if (front := _wrapped(name)))
    if not fronts:
        return
    first = next(iter(fronts))
    wrapper = first.rstrip(".").rpartition(".")[2]
    is_all = all(name.startswith(tuple(fronts)) for name in names)
    if is_all and len(fronts) <= SHOWN and not any(part.isdigit() for front in fronts for part in front.split(".")):
        ways = " or ".join(f"--strip {shell_word(prefix + front)}" for front in fronts)
        raise LayoutError(
            f"names begin with {' or '.join(map(printable, fronts))}, which a wrapper has put there and which would "
            f"stay in all names; {ways} takes it away"
        )
    name = next(name for name in names if name.startswith(first))
    raise LayoutError(
        f"{printable(name)}: a wrapper has put {wrapper} into names, where it would stay, and --strip takes beginnings "
        f'alone; take it out before saving: {{name.replace("{wrapper}.", ""): tensor for name, tensor in ...}}'
    )


def _wrapped(name: str) -> str:
    """Return a name's prefix up to its last wrapper; "" without a wrapper."""
    parts = name.split(".")[:-1]
    marks = [at for at, part in enumerate(parts) if part in WRAPPERS or (part == MODULE and not _is_inside(parts, at))]
    return "".join(f"{part}." for part in parts[: max(marks) + 1]) if marks else ""


def _is_inside(parts: Sequence[str], at: int) -> bool:
    """Return whether a part is below parts other than wrappers: a model may have a module of that name."""
    return any(part not in WRAPPERS and part != MODULE for part in parts[:at])


def _check_models(names: Sequence[str], layout: Layout, prefix: str, is_said: bool) -> None:
    begins = dict(sorted(below(names).items(), key=lambda pair: pair[0].count(".")))
    alike: dict[frozenset[str], list[str]] = collections.defaultdict(list)
    for begin, some in begins.items():
        alike[frozenset(some)].append(begin)
    unclear = suspects(begins)
    moments = [
        begin for begin, some in begins.items()
        if is_moment(begin) or (not is_said and begin in unclear and not unclear >= {*alike[frozenset(some)]})
    ]  # fmt: skip
    moments = [begin for begin in moments if not begin.startswith(tuple(one for one in moments if one != begin))]
    groups = [[one for one in some if not one.startswith(tuple(moments))] for some in alike.values()]
    models = next((some for some in groups if len(some) > 1 and _is_several(some, names)), [])
    if not moments and (is_said or not models):
        return
    models = models or _counterpart(names, begins, moments)
    kinds = [f"{len(models)} models ({', '.join(models[:SHOWN])})" if len(models) > 1 else "a model"]
    kinds += [f"an optimizer's state ({', '.join(moments[:SHOWN])})"] if moments else []
    raise LayoutError(
        f"the tensors are those of {' and '.join(map(printable, kinds))}, and would be written as one model; "
        + _ways(names, models, moments, prefix)
        + ("" if moments else f"; --from {layout.name} takes all of them as they are")
    )


def _is_several(begins: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether prefixes separate models or their averages, instead of layers of one model."""
    first = begins[0]
    return any(map(is_average, begins)) or any(
        name.startswith(first) and _TABLE.fullmatch(name[len(first) :]) for name in names
    )


def _counterpart(names: Sequence[str], begins: Iterable[str], moments: Sequence[str]) -> list[str]:
    """Return the first prefix that covers all names except an optimizer's state, as a list; [] if none does."""
    inside = tuple(moments)
    for begin in begins:
        is_apart = not begin.startswith(inside) and not any(one.startswith(begin) for one in inside)
        if is_apart and all(name.startswith((begin, *inside)) for name in names):
            return [begin]
    return []


def _ways(names: Sequence[str], models: Sequence[str], moments: Sequence[str], prefix: str) -> str:
    """Return options that select one of the models, or leave the others out."""
    if models:
        first, *others = sorted(models, key=is_average)
        more = "".join(f", or --strip {shell_word(prefix + one)}" for one in others[: SHOWN - 1])
        return f"--strip {shell_word(prefix + first)} takes {'one' if len(models) > 1 else 'the model'}{more}"
    parameters = [name for name in names if not name.startswith(tuple(moments))]
    if not parameters:
        return "save the parameters"
    patterns = patterns_of([name for name in names if name not in parameters], parameters) or [
        f"{one}*" for one in moments
    ]
    return " ".join(f"--drop {shell_word(prefix + one)}" for one in patterns) + " leaves that out"
