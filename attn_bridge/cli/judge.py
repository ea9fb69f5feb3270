"""The modules of the judge, loaded by name, since its package is in a layer above this one."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Annotated

import typer

from ..parity import FAULT_LAB, require_fault_lab


def load_judge(module: str) -> ModuleType:
    """Import a module of the judge."""
    return importlib.import_module(f"attn_parity.{module}")


def add_mutate(app: typer.Typer) -> None:
    """Add ``mutate``; without the package that plants faults, the command reports its location."""
    try:
        require_fault_lab()
    except ImportError:
        app.command("mutate", context_settings={"ignore_unknown_options": True})(_absent)
    else:
        app.command("mutate")(importlib.import_module(f"{FAULT_LAB}.command").mutate)


def _absent(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Measure the judge with planted faults: in a clone of the repository alone."""
    require_fault_lab()
