"""All causal language models of the installed `transformers`, each derived in a process with limits.

In: names, limits and a folder. Out: an `Outcome` each; the folder holds the TOML files of the proven families, and
``survey.json`` with all outcomes, which the page of families is made from.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from attn_bridge.models.derived import known
from attn_bridge.models.derived.description import Description, Value, dumps
from attn_bridge.printable import printable

Kind = Literal["proven", "refused", "stopped"]
PROVEN: Kind = "proven"
REFUSED: Kind = "refused"
STOPPED: Kind = "stopped"

FILE = "survey.json"
"""Name of the file with all outcomes."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of the derivation of a family.

    Attributes:
        model_type: its name.
        kind: ``proven``, ``refused``, or ``stopped``: beyond the limits, or a process that ended without a result.
        detail: the first part that is not understood, or why it was stopped; "" where it is proven.
        seconds: how long it took.
        proof: the counts of the proof; empty where there is none.
    """

    model_type: str
    kind: Kind
    detail: str
    seconds: float
    proof: Mapping[str, Value] = dataclasses.field(default_factory=dict)


def names() -> tuple[str, ...]:
    """Return the ``model_type`` of every causal language model of the installed `transformers`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def survey(
    model_types: Iterable[str],
    folder: Path,
    *,
    seconds: float,
    memory: int,
    flax: bool = False,
    reuse: bool = False,
) -> Iterator[Outcome]:
    """Derive families one by one, and yield the outcome of each; their output is left out.

    Args:
        model_types: their names.
        folder: folder for the files of proven families, which exists, and for `FILE`, which is written after each.
        seconds: limit of a family.
        memory: limit of the address space of its process, in bytes, where the system has such a limit.
        flax: whether the proofs run the Flax models as well.
        reuse: whether packaged families that were proven with the installed `transformers` are taken as they are.
    """
    import transformers

    packaged = {
        one.model_type: one for one in known.DESCRIPTIONS if one.proof.get("transformers") == transformers.__version__
    }

    context = multiprocessing.get_context("forkserver")
    # The import of torch and transformers is shared; without, it would cost more than most derivations.
    context.set_forkserver_preload(["attn_parity.frameworks.torch.derivation", "transformers"])
    outcomes: dict[str, Outcome] = {}
    for model_type in model_types:
        begin = time.monotonic()
        description = packaged.get(model_type) if reuse else None
        if description is not None:
            _write(description, folder)
            outcomes[model_type] = Outcome(model_type, PROVEN, "", 0.0, dict(description.proof))
            _record(outcomes, transformers.__version__, folder)
            yield outcomes[model_type]
            continue
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_derive, args=(model_type, str(folder), memory, flax, sender))
        process.start()
        sender.close()
        message: tuple[Kind, str, Mapping[str, Value]] = (STOPPED, f"more than {seconds:g} seconds", {})
        try:
            if receiver.poll(seconds):
                message = receiver.recv()
        except EOFError:
            process.join(5)
            message = (STOPPED, f"its process ended with {process.exitcode}, out of memory or by a signal", {})
        finally:
            process.kill()
            process.join()
        kind, detail, proof = message
        outcomes[model_type] = Outcome(model_type, kind, detail, round(time.monotonic() - begin, 1), proof)
        _record(outcomes, transformers.__version__, folder)
        yield outcomes[model_type]


def _record(outcomes: Mapping[str, Outcome], version: str, folder: Path) -> None:
    document = {
        "transformers": version,
        "families": {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()},
    }
    (folder / FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _write(description: Description, folder: Path) -> None:
    name = description.model_type.replace("/", "-")
    (folder / f"{name}.toml").write_text(dumps(description), encoding="utf-8")


def _derive(model_type: str, folder: str, memory: int, flax: bool, sender: Connection) -> None:
    """Derive a family in this process, write its file, and send kind, detail and proof."""
    import contextlib
    import os

    import torch

    from . import DerivationError, derive

    _limit(memory)
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        try:
            description = derive(model_type, flax=flax)
        except DerivationError as error:
            sender.send((REFUSED, str(error), {}))
        except MemoryError:
            sender.send((STOPPED, "out of memory", {}))
        except Exception as error:  # a class of a kind that was never seen may fail anywhere
            line = printable(str(error).partition("\n")[0], 200)
            sender.send((REFUSED, f"{type(error).__name__}: {line}", {}))
        else:
            _write(description, Path(folder))
            sender.send((PROVEN, "", dict(description.proof)))


def _limit(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory if most < 0 else min(memory, most), most))
