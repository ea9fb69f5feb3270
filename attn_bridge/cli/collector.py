"""The cyclic garbage collector of a command's own process, which waits until modules and tables are made.

They stay alive, so that collections among them free nothing: about a fifth of the start of a conversion or comparison.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

COMMANDS = ("compare", "convert", "dump", "inspect", "laws", "logprobs", "plan", "verify")
"""Commands that import much, and call `resume` before they begin with their work."""

_waits = False


def pause(arguments: Sequence[str]) -> None:
    """Stop the collector for one of `COMMANDS`."""
    global _waits
    if arguments and arguments[0] in COMMANDS:
        _waits = True
        gc.disable()


def resume() -> None:
    """Start the collector again, without the objects that exist now; nothing where `pause` did not stop it."""
    global _waits
    if _waits:
        _waits = False
        gc.freeze()
        gc.enable()
