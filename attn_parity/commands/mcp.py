"""``attn-bridge mcp``: the judge as tools for agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .compare import check_timeout


def mcp(
    root: Annotated[Path, typer.Option(metavar="FOLDER", help="Paths of calls must be below it.")] = Path(),
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest that a call may take.")] = 600.0,
    memory: Annotated[float, typer.Option(metavar="GIB", min=0.1, help="Memory that a call may take.")] = 16.0,
) -> int:
    """Serve the judge to agents by the Model Context Protocol, on stdin and stdout.

    The tools are compare, explain, laws and convert_plan; answers are under 2 kB, end with the next step, and name the
    full report, a resource. Each call runs in a confined process, which can't write to the root.

    Example: attn-bridge mcp --root .

    Exit status: 0 = the client has ended, 2 = bad usage, or the package mcp is not installed.
    """
    check_timeout(timeout)
    if not root.is_dir():
        raise ValueError(f"--root {root} is not a folder")
    try:
        from ..agents import server
    except ImportError as error:
        raise ImportError(f"mcp is not installed ({error}): pip install 'attn-bridge[mcp]'") from None
    from ..agents.calls import Calls

    server.serve(Calls(root, timeout, int(memory * (1 << 30)))).run("stdio")
    return 0
