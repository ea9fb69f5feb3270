"""Work out the golden values of the norms in decimal arithmetic: ``python -m parity_tests.goldens.make_norms``."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

DECIMALS = 6

# The input of section 4.2 of the book, `torch.randn(2, 5)` after the seed 123, as it is printed.
ROWS = [[-0.1115, 0.1204, -0.3696, -0.2404, -1.1969], [0.2093, -0.9724, -0.7550, 0.3239, -0.1085]]
SCALE, SHIFT = [1.5, -0.75, 2.0, 0.5, -1.25], [0.1, -0.2, 0.3, 0.0, 0.5]

CALLS: list[tuple[str, dict[str, Any], dict[str, list[float]]]] = [
    ("LayerNorm", {"emb_dim": 5}, {}),
    ("LayerNorm", {"emb_dim": 5, "eps": 0.25}, {"scale": SCALE, "shift": SHIFT}),
    ("LayerNorm", {"emb_dim": 5, "affine": False}, {}),
    ("RMSNorm", {"emb_dim": 5}, {}),
    ("RMSNorm", {"emb_dim": 5, "eps": 0.25}, {"scale": SCALE}),
    ("RMSNorm", {"emb_dim": 5, "eps": 0.25, "unit_offset": True}, {"scale": SCALE}),
]


def normalised(variant: str, constructor: dict[str, Any], parameters: dict[str, list[float]]) -> list[list[float]]:
    """Return the rows after the norm, rounded."""
    width = Decimal(len(ROWS[0]))
    eps = Decimal(str(constructor.get("eps", 1e-5 if variant == "LayerNorm" else 1e-6)))
    offset = Decimal(1 if constructor.get("unit_offset") else 0)
    scale = [Decimal(str(number)) + offset for number in parameters.get("scale", [1 - int(offset)] * len(ROWS[0]))]
    shift = [Decimal(str(number)) for number in parameters.get("shift", [0] * len(ROWS[0]))]
    rows = []
    for row in ROWS:
        numbers = [Decimal(str(number)) for number in row]
        mean = sum(numbers) / width if variant == "LayerNorm" else Decimal(0)
        root = (sum((number - mean) ** 2 for number in numbers) / width + eps).sqrt()
        parts = zip(numbers, scale, shift, strict=True)
        rows.append([round(float((number - mean) / root * a + b), DECIMALS) for number, a, b in parts])
    return rows


def document() -> dict[str, Any]:
    """Return the content of ``norms.json``."""
    entries = [
        {
            "id": f"{variant}({', '.join(f'{name}={value}' for name, value in constructor.items())})",
            "variant": variant,
            "constructor": constructor,
            "parameters": parameters,
            "input": ROWS,
            "value": normalised(variant, constructor, parameters),
            "decimals": DECIMALS,
            "printed": "fixed",
        }
        for variant, constructor, parameters in CALLS
    ]
    return {"title": "Norms, worked out in decimal arithmetic", "entries": entries}


if __name__ == "__main__":
    text = json.dumps(document(), indent=1)
    text = re.sub(
        r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()).replace("[ ", "[").replace(" ]", "]"), text
    )
    Path(__file__).with_name("norms.json").write_text(text + "\n", encoding="utf-8")
