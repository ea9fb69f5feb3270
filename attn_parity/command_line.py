"""The command that runs something again, from its options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def command_line(*given: str, options: Mapping[str, Any]) -> str:
    """Return the command that runs this again."""
    return shlex.join(["attn-bridge", *given, *words(options)])


def words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line; those that are None, False or empty are left out."""
    found: list[str] = []
    for option, value in options.items():
        if value is True:
            found.append(option)
        elif value is not None and value is not False:
            for one in value if isinstance(value, list) else [value]:
                found += [option, str(one)]
    return found
