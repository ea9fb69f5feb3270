"""A table of uses: each is a function per backend, which works, refuses in one line, or has no meaning there."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

Use = Callable[[], str | None]

ABSENT = "has no such thing"
"""Why a side has not a use that another has."""

FAILS = "**fails**"
"""Beginning of the cell of a use that goes wrong."""


class Uses(dict[str, Use | str]):
    """Uses of a backend by what they are called; a text is the reason why one has no meaning there."""

    def add(self, name: str, *, needs: tuple[str, ...] = ()) -> Callable[[Use], Use]:
        """Decorate a function that tries a use: it raises if that goes wrong, and returns the line of a refusal.

        Args:
            name: what the table calls it.
            needs: packages without which it is not tried.
        """

        def add(use: Use) -> Use:
            missing = [package for package in needs if importlib.util.find_spec(package) is None]
            self[name] = f"not tried: {missing[0]} is not installed" if missing else use
            return use

        return add


def refusal(call: Callable[[], object], *errors: type[Exception]) -> str:
    """Return the line that a call is refused with.

    Raises:
        AssertionError: it is not refused, or in more than one line.
    """
    try:
        call()
    except errors as error:
        line = str(error)
        assert line, "it has no line"
        assert "\n" not in line, line
        return line
    raise AssertionError("it was not refused")


def outcome(use: Use | str) -> str:
    """Return the cell of a use."""
    if isinstance(use, str):
        return f"n.a.: {use}" if not use.startswith("not tried") else use
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            line = use()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return f"{FAILS}: {type(error).__name__}: {first[:100]}"
    return "works" if line is None else f"refused: {line}"


def as_markdown(table: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown, and how many uses have which outcome."""
    cells = [cell for row in table for cell in row[1:]]
    counts = {kind: sum(cell.startswith(kind) for cell in cells) for kind in ("works", "refused", "n.a.", "not tried")}
    failed = sum(cell.startswith(FAILS) for cell in cells)
    lines = [
        f"{len(table)} uses: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + f", {failed} fail."
    ]
    lines += ["", "| use | torch | Flax |", "| --- | --- | --- |"]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table)])
