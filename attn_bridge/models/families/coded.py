"""Families whose configs code reads: TOML files of `attn_bridge.models.handwritten` have their data and name the code.

In: the files. Out: a `Family` each. ``[code]`` has an argument of `Family` -> the function of `attn_bridge.models` that
it is, whose file is imported when the family is used.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any

from ..family import Family
from ..tables import MODELS, named


def load() -> Iterator[Family]:
    """Yield the families of all files."""
    for file in sorted(resources.files(f"{MODELS}.handwritten").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            document = tomllib.loads(file.read_text(encoding="utf-8"))
            code: dict[str, Any] = {role: named(path) for role, path in document.pop("code").items()}
            aliases = {key: tuple(names) for key, names in document.pop("aliases", {}).items()}
            yield Family((document.pop("model_type"),), aliases=aliases, **document, **code)


FAMILIES = tuple(load())
