"""How many processes a command shares its work among."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

AUTO = "auto"

FRAMEWORKS = ("torch", "jax")

Jobs = Annotated[
    str, typer.Option(metavar="N|auto", help="Processes; auto: as many as there are cores and work for, at most 4.")
]


@dataclasses.dataclass(frozen=True)
class Process:
    """The process that a command runs in.

    Attributes:
        is_own: whether nothing but the command runs in it. Python code that calls a command may have changed something
            before (a test that plants a fault), which processes that the command starts would not know of.
    """

    is_own: bool = False

    @classmethod
    def of(cls, context: typer.Context) -> Process:
        """Return the process that a command was given."""
        return context.obj if isinstance(context.obj, cls) else cls()

    def may_have_helpers(self) -> bool:
        """Return whether helpers would compute the same: this process runs the command alone, without a framework."""
        return self.is_own and not any(name in sys.modules for name in FRAMEWORKS)


def parse_jobs(jobs: str) -> int | None:
    """Return the number of processes, None for ``auto``.

    Raises:
        ValueError: it is neither ``auto`` nor a whole number.
    """
    if jobs == AUTO:
        return None
    try:
        return int(jobs)
    except ValueError:
        raise ValueError(f"--jobs takes auto or a whole number, got {jobs}") from None
