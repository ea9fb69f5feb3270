"""Text from outside (names in files, of types) as one harmless, bounded line of a message."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

# Characters that XML forbids, that steer a terminal, or that turn the direction of what follows.
_HIDDEN = re.compile("[^\t\n\x20-\x7e\xa0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: object, most: int = 120) -> str:
    """Return a name from outside as it may be printed: escaped, and cut where it is long."""
    try:
        characters = str(text)
    except ValueError:  # Python converts no integers of more than 4300 digits
        characters = "a number of thousands of digits"
    characters = characters if len(characters) <= most else f"{characters[:most]}... ({len(characters)} characters)"
    if characters.isprintable():  # as nearly all are: one character at a time takes ten times as long
        return characters
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in characters)


def listed(names: Sequence[str], most: int = 6, separator: str = ", ") -> str:
    """Return names in a row; of more than `most` the first ones, and how many more there are."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")


def shell_word(text: object) -> str:
    """Return a name as one word of a command for the shell, on one line."""
    word = str(text)
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(
        one if one.isprintable() else "".join(f"\\x{byte:02x}" for byte in one.encode("utf-8", "surrogateescape"))
        for one in escaped
    ) + "'"  # fmt: skip


def visible(text: object) -> str:
    r"""Return `text` with control characters written out, such as ``\x1b``; line breaks and tabs stay."""
    return _HIDDEN.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), str(text))
