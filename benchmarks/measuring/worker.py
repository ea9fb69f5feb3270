"""A process that holds one framework: it reads requests as JSON lines on stdin and answers each with one on stdout.

``python -m benchmarks.measuring.worker torch``
"""

from __future__ import annotations

import json
import os
import sys

from attn_bridge.backends import MissingBackendError


def main() -> None:
    """Answer until stdin ends. Whatever a library prints goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        from .bench import Bench

        try:
            bench = Bench(sys.argv[1])
        except MissingBackendError as error:
            answers.write(json.dumps({"missing": str(error)}) + "\n")
            return
        answers.write(json.dumps({}) + "\n")
        answers.flush()
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(bench, request.pop("do"))(**request)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
