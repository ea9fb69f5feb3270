"""Names of other programs' tensors, which no layout takes: the program, and how its weights get names that one does."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...printable import printable
from ...weights.toml import packaged

_FILE = packaged(__package__, "names.toml")


def why_computed(names: Iterable[str]) -> str:
    """Return why a weight is not in the file but made of others in each call, and the remedy; "" if none is."""
    names = set(names)
    for name in sorted(names):
        for own in ("weight", "bias"):
            for kind in _FILE["computed"]:
                front = name.removesuffix(kind["ending"].format(own))
                if front != name and front + kind.get("beside", kind["ending"]).format(own) in names:
                    remedy = kind["text"].format(printable(f"{front}.{own}"), own)
                    return f"{printable(name)}: {remedy} makes it a plain tensor again; save the state_dict after that"
    return ""


def why(names: Iterable[str]) -> str:
    """Return the program that names are of and a remedy, with the first such name; "" if it is not known."""
    names = list(names)
    for kind in _FILE["programs"]:
        match = re.compile(rf"(?:.*\.)?(?:{kind['pattern']})").fullmatch
        name = next(filter(match, names), "")
        if name:
            return f"{printable(name)} is of {kind['program']}"
    return ""
