"""A training's report and a checkpoint's values, made up, whose pages are looked at in a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attn_bridge.checkpoints.containers.base import TensorInfo
from attn_parity.rendering.html import checkpoint, training
from attn_parity.results.findings import TensorVerdict
from attn_parity.training.report import FirstDifference, TrainingReport


def training_report(steps: int = 3, *, verdict: str = "equal") -> TrainingReport:
    """Return the report of a training of three steps, of which some are taken."""
    losses = {"torch": [0.5, 0.25, 0.125][:steps], "flax": [0.5, 0.25, 0.126][:steps]}
    names = [f"update {'very.long.name.' * 6}{part}" for part in ("weight", "bias")]
    apart = {name: [1e-14, 3e-15, 2e-14][:steps] for name in names}
    tensors = [TensorVerdict(name, name, "update", (3,), "float32", verdict) for name in names]
    first = FirstDifference(2, names[0], names[0], "too far off") if verdict == "different" else None
    return TrainingReport(
        verdict=verdict,
        first_difference=first,
        tensors=tensors,
        losses=losses,
        growth={"torch and flax": [1e-8] * steps},
        synchronised={},
        settings=["lr: 0.1"],
        notes=["a note"],
        message="",
        steps=3,
        dtype="float32",
        divergence=apart,
        environment={"torch": "2"},
        torch_name="Net",
        flax_name="Net",
    )


def write_checkpoint_page(path: Path) -> None:
    """Write the page of a checkpoint of thirty tensors, one of them with a NaN."""
    random, values = np.random.default_rng(0), {}
    for i in range(30):
        array = random.normal(size=(4, 6))
        array[0, 0] = np.nan if i == 7 else 0
        name = f"model.layers.{i}.{'attention.' * 8}weight"
        values[name] = checkpoint.values_of(TensorInfo(name, "float64", array.shape, "f"), array)
    checkpoint.as_html("model", {"Container": "npz"}, values, path)


def write_pages(folder: Path) -> dict[str, Path]:
    """Write a page of each kind, and return them by name."""
    write_checkpoint_page(folder / "checkpoint.html")
    training.as_html(training_report(), folder / "trained.html")
    training.as_html(training_report(verdict="different"), folder / "apart.html")
    training.as_html(training_report(2), folder / "training.html", running=True)
    return {name: folder / f"{name}.html" for name in ("checkpoint", "trained", "apart", "training")}
