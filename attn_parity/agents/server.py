"""The Model Context Protocol server: tools and reports, over stdin and stdout.

Source: https://modelcontextprotocol.io, and its Python SDK, `mcp`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import ValidationError

import attn_bridge
from attn_bridge.backends import usable_cores
from attn_bridge.printable import printable

from .calls import CallError, Calls

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

INSTRUCTIONS = (
    "Judge whether a port computes the same as its original, by outputs and every gradient. Call compare first; when "
    "it differs, call explain on the submodule that it names, mend the code, and compare again. Every answer ends with "
    "the next step. The full report is the resource parity://reports/NAME."
)

SIDE = "file.py:factory or module:factory, below the root: a function without arguments that returns a module"


class _Server(MCPServer):
    """A server that refuses arguments in one line, also those that a tool does not have."""

    async def call_tool(self, name: str, arguments: dict[str, object], context: object = None) -> object:
        """Call a tool; see `MCPServer.call_tool`."""
        schemas = {tool.name: tool.input_schema["properties"] for tool in await self.list_tools()}
        unknown = sorted(set(arguments) - set(schemas.get(name, arguments)))
        if unknown:
            raise ToolError(f"{name} has no argument {printable(unknown[0])}; it has {', '.join(schemas[name])}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            raise ToolError(f"{name}: {'; '.join(map(_misfit, error.__cause__.errors()))}") from None


def _misfit(error: ErrorDetails) -> str:
    """Return the name, the value and the rule of an argument that pydantic refuses."""
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{where} is missing"
    rule = str(error["msg"]).removeprefix("Input ")
    return f"{printable(where)} ({printable(repr(error['input']))}) {rule}"


def serve(calls: Calls) -> MCPServer:
    """Return the server of a session."""
    server = _Server("attn-bridge", instructions=INSTRUCTIONS, version=attn_bridge.__version__, log_level="ERROR")
    run = _Runs().run

    async def explain(report: str, path: str) -> str:
        return await anyio.to_thread.run_sync(_answered, functools.partial(calls.explain, report, path))

    def report(name: str) -> str:
        return calls.full(name)

    described = [
        (_tool(calls.compare, run), COMPARE),
        (explain, EXPLAIN),
        (_tool(calls.laws, run), LAWS),
        (_tool(calls.convert_plan, run), CONVERT_PLAN),
    ]
    for function, description in described:
        server.add_tool(function, description=description, structured_output=False)
    server.resource("parity://reports/{name}", mime_type="application/json", description="A report, whole.")(report)
    return server


def _tool(call: Callable[..., str], run: Callable[[Callable[..., str]], Awaitable[str]]) -> Callable[..., object]:
    """Return a tool that runs a call in a thread: with its name and its arguments, but for `stop`."""

    async def tool(**arguments: object) -> str:
        return await run(functools.partial(call, **arguments))

    own = inspect.signature(call, eval_str=True)
    parameters = [one for name, one in own.parameters.items() if name != "stop"]
    tool.__name__, tool.__dict__["__signature__"] = call.__name__, own.replace(parameters=parameters)
    return tool


COMPARE = (
    f"Judge whether two sides compute the same outputs and gradients. first, second: {SIDE}. Inputs: shapes, such as "
    '["2,7,16"], one per positional input, of floats; or inputs, an .npz file; else example_inputs() beside a factory. '
    "dtypes: float64, float32, bfloat16, float16. rules: a TOML file of names. "
    "allow: path -> reason of a known difference."
)
EXPLAIN = (
    "Show one tensor or one submodule of a report of compare: a witness (input and both numbers), candidates for the "
    "cause, and what agrees around it."
)
LAWS = (
    f"Try laws that one side must obey alone: batch and padding invariance, causality, caches, gradients. side: {SIDE}."
    " only: names of laws."
)
CONVERT_PLAN = (
    "Plan the conversion of a checkpoint from its headers; nothing is written. source, target: paths below the root; "
    "from_layout, to_layout: names of layouts, such as hf-llama, flax, torch."
)


class _Runs:
    """Limits the calls that run at once to the number of cores; the event loop answers meanwhile."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(usable_cores())

    async def run(self, call: Callable[..., str]) -> str:
        """Run a call in a thread, and end its process if the client cancels it."""
        stop = threading.Event()
        work = functools.partial(_answered, functools.partial(call, stop=stop))
        try:
            return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        finally:
            stop.set()


def _answered(call: Callable[[], str]) -> str:
    """Return the answer of a call; a refusal becomes an error of its tool."""
    try:
        return call()
    except CallError as error:
        raise ToolError(str(error)) from None
