"""Print the table of uses of both backends, in Markdown, and progress on stderr; exit 1 if one fails."""

from __future__ import annotations

import argparse
import sys

from .processes import rows
from .table import FAILS, as_markdown

SIDES = ("parity_tests.uses.torch_uses", "parity_tests.uses.jax_uses")
SECONDS = 300.0
"""Limit of time of a use; the longest takes half a minute on two cores."""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.uses", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of time of a use (default %(default)g)")
    table = rows(SIDES, parser.parse_args().seconds, lambda line: print(line, file=sys.stderr, flush=True))
    print(as_markdown(table))
    return int(any(cell.startswith(FAILS) for row in table for cell in row[1:]))


if __name__ == "__main__":
    sys.exit(main())
