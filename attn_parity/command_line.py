"""The command that runs something again, from its options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def command_line(*arguments: str, options: Mapping[str, object]) -> str:
    """Return the command that runs this again."""
    return shlex.join(["attn-bridge", *arguments, *words(options)])


def words(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line; those that are None, False or empty are left out."""
    words_of_options: list[str] = []
    for option, value in options.items():
        if value is True:
            words_of_options.append(option)
        elif value is not None and value is not False:
            for element in value if isinstance(value, list) else [value]:
                words_of_options += [option, str(element)]
    return words_of_options
