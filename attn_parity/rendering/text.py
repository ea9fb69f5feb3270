"""How names and numbers are written, the same in every rendering."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

from attn_bridge.printable import visible

NONE = "-"


def one_line(text: object) -> str:
    """Return a text without line breaks and repeated spaces."""
    return " ".join(visible(text).split())


def folded(names: Iterable[str]) -> list[str]:
    """Return the names with those that differ by a number alone as one: ``h.{i}.bias (12)``."""
    names = list(names)
    counts = Counter(_numberless(name) for name in names)
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(_numberless(name), name)
    return [first[key] if count == 1 else f"{key} ({count})" for key, count in counts.items()]


def _numberless(name: str) -> str:
    return re.sub(r"(?<![^.\[])\d+(?![^.\]])", "{i}", name)


def relative(value: float | None) -> str:
    """Write a relative difference: ``1.2e-15``."""
    if value is None:
        return NONE
    return f"{value:.1e}" if value and math.isfinite(value) else f"{value:g}"


def share(value: float | None) -> str:
    """Write a share of an allowance: ``35%``, or ``120x`` from ten times the allowance on."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return f"{value:g}"
    if 0 < value < 0.01:
        return "<1%"
    return f"{value:.0%}" if value < 10 else f"{value:.3g}x"


def times(value: float | None) -> str:
    """Write a share of what is allowed with the words for it: ``35% of the allowed error``."""
    if value is None:
        return NONE
    if value < 1 or not math.isfinite(value):
        return f"{share(value)} of the allowed error"
    return f"{value:.2g} x the allowed error" if value < 100 else f"{value:.3g} x the allowed error"


def shortened(value: str, room: int) -> str:
    """Return a name in at most `room` characters, the middle of a longer one left out."""
    if len(value) <= room:
        return value
    head = max(room - 1, 1) // 3
    return f"{value[:head]}…{value[len(value) - max(room - 1 - head, 0) :]}"[: max(room, 1)]


def ulps(value: float | None) -> str:
    """Write an error in units of the last place: ``0.31``, ``5210``."""
    if value is None:
        return NONE
    return f"{value:.2g}" if value < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def growth(value: float | None) -> str:
    """Write how much larger a difference became: ``x1.3``."""
    return NONE if value is None else f"x{value:.2g}" if value < 100 else f"x{value:.0e}"


def number(value: float | None, digits: int = 9) -> str:
    """Write a value, by default with all digits that float32 has."""
    return NONE if value is None else f"{value:.{digits}g}"


def index(value: tuple[int, ...]) -> str:
    """Write the index of an element: ``(0, 3, 12)``."""
    return str(tuple(int(one) for one in value))


def shape(value: tuple[int, ...]) -> str:
    """Write a shape: ``2 x 14 x 48``."""
    return " x ".join(str(int(one)) for one in value) or "scalar"


def count(number_of: int, what: str) -> str:
    """Write how many there are of something: ``1 seed``, ``1,200 tensors``."""
    return f"{number_of:,} {what}{'' if number_of == 1 else 's'}"


def memory(size: int) -> str:
    """Write a number of bytes: ``1.3 GB``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def cut(value: str, room: int) -> str:
    """Return a text in at most `room` characters: of a longer one its first words, and an ellipsis."""
    if len(value) <= room:
        return value
    at = value.rfind(" ", room // 2, room - 1)
    return f"{value[: at if at >= 0 else max(room - 2, 0)].rstrip(' ,;:(')} …"
