"""``python -m benchmarks.agents``: run the forty ports and print docs/agents.md."""

from __future__ import annotations

import argparse
import sys

from .catalogue import PORTS
from .page import as_markdown
from .trials import run


def main() -> None:
    """Run the ports whose kind or fault holds a word, by default all, and print the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="part of a kind or of a fault")
    options = parser.parse_args()
    ports = [port for port in PORTS if options.word in f"{port.kind}: {port.fault}"]
    if not ports:
        sys.exit(f"error: no port's kind or fault contains {options.word!r}")
    sys.stdout.write(as_markdown([run(port) for port in ports]))


if __name__ == "__main__":
    main()
