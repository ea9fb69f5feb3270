"""The page of ``attn-bridge inspect --html``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..judge import load_judge
from .options import check_report

if TYPE_CHECKING:
    from ...checkpoints import Checkpoint, Inspection


def check_page(page: str, path: Path, json_file: str | None) -> None:
    """Check before the work that the page can be written, and would not overwrite anything else.

    Raises:
        ValueError: it can't, or would.
    """
    if page == "-":
        raise ValueError("--html - cannot be written: only --json goes to stdout")
    check_report(page, path, option="--html")
    if json_file not in (None, "-") and Path(page).absolute() == Path(str(json_file)).absolute():
        raise ValueError("--html and --json must be different files")


def write_page(
    path: Path,
    checkpoint: Checkpoint,
    inspection: Inspection,
    page: str,
    advance: Callable[[int, int, str], None] | None,
) -> None:
    """Read every tensor, one at a time, and write a page on their values."""
    rendering = load_judge("rendering.html.checkpoint")
    done, values = 0, {}
    for name, info in checkpoint.tensors.items():
        values[name] = rendering.values_of(info, checkpoint[name])
        done += info.nbytes
        if advance is not None:
            advance(done, inspection.nbytes, name)
    facts = {
        "Container": inspection.format,
        "Layout": inspection.layout or f"none that is known ({inspection.why})",
        "Numbers": ", ".join(f"{count:,} {dtype}" for dtype, count in inspection.dtypes.items()),
        "Digests": "beside it" if inspection.has_manifest else "none beside it",
        **{f"Metadata: {key}": str(value) for key, value in inspection.metadata.items()},
    }
    rendering.as_html(str(path), facts, values, page)
