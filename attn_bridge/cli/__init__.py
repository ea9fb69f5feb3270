"""The console command ``attn-bridge``: thin commands over public functions.

Exit status: 0 = holds, 1 = a check failed, 2 = bad usage or bad input, with one line ``error: ...`` on stderr.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status.

    Without `arguments` the process is the command's own: those that run user code do so in a child of it, and commands
    that can share their work among processes do. With `arguments` everything runs in this process unless they ask for
    more.
    """
    if arguments is None:
        importlib.import_module(f"{__name__}.collector").pause(sys.argv[1:])
        importlib.import_module("attn_parity.commands.isolation.supervision").begin(sys.argv[1:])
    from . import app

    app.main(arguments)
