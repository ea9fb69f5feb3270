"""Uses with every outcome, which the tests of the table run; they need no framework."""

from __future__ import annotations

import os
import time

from .table import Uses, refusal

USES = Uses()


@USES.add("right")
def right() -> None:
    """Work."""


@USES.add("refused")
def refused() -> str:
    """Be refused in a line."""
    return refusal(lambda: int("x"), ValueError)[:7]


@USES.add("wrong")
def wrong() -> None:
    """Raise."""
    raise ArithmeticError("off by one\nat 3")


@USES.add("without end")
def endless() -> None:
    """Run past any limit."""
    time.sleep(3600)


@USES.add("crashed")
def crashed() -> None:
    """End the process without a result."""
    os._exit(3)


@USES.add("elsewhere", needs=("no_such_package",))
def elsewhere() -> None:
    """Need a package that nobody has."""
