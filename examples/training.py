"""Train the torch and the Flax GPT on the same fables with dropout, and say whether they train alike.

Both start from the same weights, see the same batches and drop the same elements. Needs both frameworks.
The fables are Aesop's, retold for this repository, and in the public domain.

python examples/training.py                     train and print the report
python examples/training.py docs/training.svg   and draw both loss curves
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import parity

TEXT = Path(__file__).with_name("fables.txt")
CONFIG = {"context_length": 32, "emb_dim": 48, "n_heads": 4, "n_layers": 3, "drop_rate": 0.1, "qkv_bias": False}
STEPS, BATCH, SEED = 120, 8, 123

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 360, 56, 40, 24
COLOURS = {"torch": ("#e4572e", "6"), "flax": ("#1f4e79", "2")}
"""Side -> colour and width of its curve: the second is drawn on the first."""


def main(plot: str = "", steps: int = STEPS) -> None:
    """Print the report; exit with status 1 unless both train alike."""
    text = TEXT.read_text()
    letters = sorted(set(text))
    config = {"vocab_size": len(letters), **CONFIG}
    torch.manual_seed(SEED)
    pair = torch_attn.GPTModel(config), jax_attn.GPTModel(config, rngs=nnx.Rngs(SEED))
    report = parity.train(
        *pair,
        batches(np.array([letters.index(letter) for letter in text])),
        steps=steps,
        optimizer="adamw",
        loss="cross_entropy",
        lr=3e-3,
    )
    print(report.explain())
    apart = max(abs(one - two) for one, two in zip(report.losses["torch"], report.losses["flax"], strict=True))
    print(f"the losses are at most {apart:.1g} apart")
    if plot:
        Path(plot).write_text(curves({side: report.losses[side] for side in COLOURS}))
    raise SystemExit(0 if report.passed else 1)


def batches(tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return pairs of tokens and the tokens that follow them, each ``(BATCH, context_length)``."""
    length = CONFIG["context_length"]
    starts = range(0, len(tokens) - length, length)
    rows = [(tokens[start : start + length], tokens[start + 1 : start + length + 1]) for start in starts]
    found = [rows[i : i + BATCH] for i in range(0, len(rows) - BATCH + 1, BATCH)]
    return [(np.stack([x for x, _ in some]), np.stack([y for _, y in some])) for some in found]


def curves(losses: dict[str, list[float]]) -> str:
    """Return a picture of loss curves as SVG."""
    steps = max(map(len, losses.values()))
    top = max(map(max, losses.values())) * 1.02
    bottom = min(map(min, losses.values())) * 0.95

    def place(step: int, loss: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 16) * step / max(steps - 1, 1)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (top - loss) / (top - bottom)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        "<title>Loss of the torch and the Flax GPT over the steps of one training</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in np.linspace(bottom, top, 5):
        _, y = place(0, float(value))
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 16}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for step in np.linspace(0, steps - 1, 5).astype(int):
        x, _ = place(int(step), bottom)
        lines.append(f'<text x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{step + 1}</text>')
    lines.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    for i, (side, values) in enumerate(losses.items()):
        colour, width = COLOURS[side]
        points = " ".join("{:.1f},{:.1f}".format(*place(step, loss)) for step, loss in enumerate(values))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        y = TOP + 16 + 20 * i
        lines.append(f'<path d="M{WIDTH - 150} {y}h28" stroke="{colour}" stroke-width="{width}"/>')
        lines.append(f'<text x="{WIDTH - 114}" y="{y + 4}">{side}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main(*sys.argv[1:2])
