"""Text from outside (names in files, of types) as one harmless, bounded line of a message."""

from __future__ import annotations

import shlex


def printable(text: object, most: int = 120) -> str:
    """Return a name from outside as it may be printed: escaped, and cut where it is long."""
    shown = str(text)
    shown = shown if len(shown) <= most else f"{shown[:most]}... ({len(shown)} characters)"
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in shown)


def shell_word(text: object) -> str:
    """Return a name as one word of a command for the shell, on one line."""
    shown = str(text)
    if shown.isprintable():
        return shlex.quote(shown)
    escaped = shown.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(
        one if one.isprintable() else "".join(f"\\x{byte:02x}" for byte in one.encode("utf-8", "surrogateescape"))
        for one in escaped
    ) + "'"  # fmt: skip
