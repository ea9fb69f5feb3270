"""``attn-bridge logprobs``: how much of the gap between two whole models rounding explains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from attn_bridge.cli import collector
from attn_bridge.cli.output import check_writable, write_json

from ..sides.libraries import Value
from .compare import BuildSeed, Json, Timeout, check_timeout

FILES = (".npz", ".jsonl", ".json")


def logprobs(
    first: Annotated[str, typer.Argument(metavar="A", help="FILE.npz, FILE.jsonl, or file.py:factory of a model.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz", help="Token ids (an array `tokens`) for a model; else those of the other side."
        ),
    ] = None,
    noise: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Log-probabilities of A's model as bfloat16 gives them (may be repeated)."),
    ] = None,
    build_seed: BuildSeed = 0,
    timeout: Timeout = None,
    json_file: Json = None,
) -> int:
    """Measure how much of the gap between log-probabilities rounding in bfloat16 explains; name tokens beyond it.

    A file holds `logprobs` and `tokens`: arrays of one shape (sequences, tokens), or JSON, a line per sequence. A model
    returns logits for token ids; its runs in bfloat16 measure the noise. For two files, --noise gives it.

    Example: attn-bridge logprobs trainer.py:model sampler.jsonl --json gap.json

    Exit status: 0 = rounding explains every token, 1 = some are beyond it, 2 = bad usage, or inconclusive.
    """
    from ..logprobs.judge import logprobs as judge
    from ..logprobs.sequences import read, read_tokens
    from .isolation.user_code import running, watched

    check_timeout(timeout)
    if json_file is not None:
        check_writable(json_file)
    sides: list[Value] = [Path(one) if one.endswith(FILES) else one for one in (first, second)]
    ids = None if tokens is None else read_tokens(tokens)
    draws = [read(Path(one)) for one in noise or ()]
    if any(isinstance(one, str) for one in sides):
        with watched(timeout), running("scoring tokens"):
            built = [_built(one, what, build_seed) for one, what in zip(sides, ("A", "B"), strict=True)]
            report = judge(*built, tokens=ids, noise=draws or None)
    else:
        collector.resume()
        report = judge(*sides, tokens=ids, noise=draws or None)
    if json_file is not None:
        write_json(report.to_json(), json_file)
    if report.verdict == "inconclusive":
        raise ValueError(f"inconclusive: {report.message}")
    if json_file != "-":
        sys.stdout.write(f"{report}\n")
    return 0 if report.verdict == "equal" else 1


def _built(side: Value, what: str, seed: int) -> Value:
    """Return a file as it is, and the model that a factory builds."""
    from .. import factories

    if isinstance(side, Path):
        return side
    with factories.seeded(seed):
        factory = factories.load(side, what)
    collector.resume()
    return factory.build(seed)
