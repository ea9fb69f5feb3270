"""The application: its commands, and how errors become one line and an exit status."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from .. import __version__
from .judge import add_mutate, load_judge
from .processes import Process

COMMANDS = {
    "demo": "attn_bridge.cli.demo",
    "check": "attn_parity.commands.check",
    "compare": "attn_parity.commands.compare",
    "laws": "attn_parity.commands.laws",
    "dump": "attn_parity.commands.dump",
    "compare-dumps": "attn_parity.commands.dump",
    "review": "attn_parity.commands.review",
    "attest": "attn_parity.commands.attest",
    "verify-attestation": "attn_parity.commands.attest",
    "mcp": "attn_parity.commands.mcp",
    "logprobs": "attn_parity.commands.logprobs",
    "doctor": "attn_parity.commands.doctor",
    "mutate": "fault_lab.command",
    "convert": "attn_bridge.cli.checkpoints.commands",
    "plan": "attn_bridge.cli.checkpoints.tasks",
    "inspect": "attn_bridge.cli.checkpoints.commands",
    "verify": "attn_bridge.cli.checkpoints.commands",
    "digest": "attn_bridge.cli.checkpoints.digest",
    "derive": "attn_bridge.cli.derive",
}
"""Command -> the module of its function, in the order of the help. A run imports one of them."""

BROKEN_PIPE = 141
"""Exit status if the reader of stdout is gone: that of a shell for a command ended by SIGPIPE."""

ELSEWHERE = {
    "record": "Inputs of a run are recorded by attn-bridge compare --record COMMAND",
    "train": "Training is compared in Python, by attn_bridge.parity.train (docs/training.md)",
    "transfer": "Weights of modules are copied in Python, by attn_bridge.transfer (docs/backends.md)",
}
"""Words that users try as commands -> where their function is."""


class _InterruptedError(Exception):
    """Ctrl-C, under a name that typer does not turn into a silent exit."""


class _Group(TyperGroup):
    """The commands."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command.

        Raises:
            OSError: the working folder was deleted. Relative paths lead nowhere then, and libraries that ask for the
                folder as they are loaded fail in words about other things.
        """
        try:
            os.getcwd()  # noqa: PTH109 - the call itself is what is tested
        except OSError as error:
            raise OSError(f"the working folder does not exist any more ({error.strerror}): change to another") from None
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _InterruptedError from error


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attn-bridge {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Options of the application as a whole."""


def application(commands: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the application with some of its commands, or all. Only their modules are imported."""
    app = typer.Typer(
        name="attn-bridge",
        cls=_Group,
        help="The same attention in PyTorch and in Flax, weights that cross between them, and a check that proves it.",
        no_args_is_help=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in commands:
        if name == "mutate":
            add_mutate(app)
        else:
            app.command(name)(getattr(importlib.import_module(COMMANDS[name]), name.replace("-", "_")))
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status; without `arguments` the process is the command's own."""
    if arguments is not None:
        sys.exit(run(list(arguments), is_own=False))
    try:
        status = _run_own(sys.argv[1:])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if "attn_parity.commands.isolation.user_code" in sys.modules:
        load_judge("commands.isolation.user_code").end(status)
    load_judge("commands.isolation.supervision").finish(status)
    raise SystemExit(status)


def _run_own(arguments: list[str]) -> int:
    """Run the command line with this process's own streams; a status other than 0 may mean lost output."""
    from . import streams

    stdout = streams.protect()
    try:
        status = run(arguments, is_own=True)
    except SystemExit:  # rich's way to end where a pipe has no reader
        if not isinstance(stdout.lost, BrokenPipeError):
            raise
        status = BROKEN_PIPE
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    report = stdout.report() if status in (0, 1) else ""
    return _fail(report, arguments) if report else status


def run(arguments: list[str], *, is_own: bool = False) -> int:
    """Run the command line and return its exit status; expected errors become one line on stderr.

    Args:
        arguments: the words behind the name of the command.
        is_own: whether nothing but the command runs in this process, so that it may start others like it.
    """
    process = Process(is_own)
    try:
        app = application(arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS)
        status = get_command(app).main(complete(arguments), prog_name="attn-bridge", standalone_mode=False, obj=process)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed our output: discard the rest, also when Python closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, TypeError, OSError, ImportError) as error:
        return _fail(_text_of(error), arguments, error)
    except MemoryError as error:
        return _fail(f"not enough memory: {error}" if str(error) else "not enough memory", arguments, error)
    except _InterruptedError as error:
        _fail("interrupted", arguments, error.__cause__)
        # What shells report of a process that SIGINT, number 2, has ended.
        return 130
    except Exception as error:
        # Usage errors of typer's own command-line parser, whose classes have no public name.
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        return _fail(_advised(usage()), arguments)
    return int(status or 0)


def complete(arguments: list[str]) -> list[str]:
    """Insert the default values of options whose value may be omitted.

    ``--json``: "-" (stdout) unless a file follows, a word with a dot or a slash, and no factory. ``--html``:
    ``report.html`` where the line ends or an option follows. ``--ray``: "" unless an address follows, ``HOST:PORT``,
    ``ray://HOST:PORT``, ``auto`` or ``local``.
    """
    completed = []
    for position, argument in enumerate(arguments):
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        is_file = following == "-" or (not following.startswith("-") and any(mark in following for mark in "./\\"))
        is_file = is_file and not re.search(r":[^\W\d][\w.]*$", following)
        is_address = re.fullmatch(r"ray://\S+|auto|local|[\w.-]+:[0-9]+", following)
        argument = "--json=-" if argument == "--json" and not is_file else argument
        argument = "--html=report.html" if argument == "--html" and following[:2] in ("", "--") else argument
        completed.append("--ray=" if argument == "--ray" and not is_address else argument)
    return completed


def _text_of(error: Exception) -> str:
    """Return the message of an error; that of the system is the file and the reason, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _advised(usage: str) -> str:
    """Return a usage error, with the way to the commands where one is missing or unknown."""
    unknown = re.fullmatch(r"No such command '(.*)'\.", usage, re.DOTALL)
    if unknown and unknown[1] in ELSEWHERE:
        return f"{usage} {ELSEWHERE[unknown[1]]}"
    return f"{usage} See attn-bridge --help" if unknown or usage == "Missing command." else usage


def _fail(message: str, arguments: Sequence[str], error: BaseException | None = None) -> int:
    """Print one line, including the notes on the error, and return the exit status."""
    from .errors import one_line

    message = "; ".join([message, *getattr(error, "__notes__", ())])
    print(f"error: {one_line(message, arguments)}", file=sys.stderr)
    return 2
