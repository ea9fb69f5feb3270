"""Error messages of commands: one line, with long texts from users cut."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..printable import printable, visible

MAX_ECHO = 400
"""Maximum characters of an argument that is echoed whole; more would not help to identify it."""

MAX_PATH = 4096
"""Characters of a path (Linux's PATH_MAX), which is echoed whole: advice on the next command contains it."""

MAX_LINE = 10_000
"""Characters of a line: it lists at most 100 findings of at most 100 characters or so."""


def one_line(message: str, arguments: Iterable[str]) -> str:
    """Return a message as one line.

    Args:
        message: of an error.
        arguments: the command's; long ones, and their values, are cut in the message.
    """
    for argument in arguments:
        for text in (argument, argument.partition("=")[2]):
            is_path = "/" in text and len(text) <= MAX_PATH
            if len(text) > MAX_ECHO and not is_path:
                message = message.replace(text, printable(text)).replace(repr(text)[1:-1], printable(text))
    message = re.sub(rf"\S{{{MAX_PATH + 1},}}", lambda word: _cut(word[0]), message)
    line = " ".join(visible(message).split())
    if len(line) <= MAX_LINE:
        return line
    return f"{line[: MAX_LINE // 2]} ... ({len(line)} characters) ... {line[-MAX_LINE // 4 :]}"


def _cut(word: str) -> str:
    """Return a long word cut, with the punctuation behind it."""
    core = word.rstrip(";,:.")
    return printable(core) + word[len(core) :]
