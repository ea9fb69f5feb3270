"""The commands of the judge, loaded by name, since its package is in a layer above this one."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Annotated

import typer

from ..parity import FAULT_LAB, require_fault_lab


def load_judge(module: str) -> ModuleType:
    """Import a module of the judge."""
    return importlib.import_module(f"attn_parity.{module}")


def add_judge(app: typer.Typer) -> None:
    """Add the commands of the judge; without the package that plants faults, ``mutate`` reports its location."""
    app.command("check")(load_judge("commands.check").check)
    app.command("compare")(load_judge("commands.compare").compare)
    app.command("laws")(load_judge("commands.laws").laws)
    app.command("dump")(load_judge("commands.dump").dump)
    app.command("compare-dumps")(load_judge("commands.dump").compare_dumps)
    app.command("review")(load_judge("commands.review").review)
    app.command("attest")(load_judge("commands.attest").attest)
    app.command("verify-attestation")(load_judge("commands.attest").verify_attestation)
    app.command("mcp")(load_judge("commands.mcp").mcp)
    app.command("logprobs")(load_judge("commands.logprobs").logprobs)
    app.command("doctor")(load_judge("commands.doctor").doctor)
    try:
        require_fault_lab()
    except ImportError:
        app.command("mutate", context_settings={"ignore_unknown_options": True})(_absent)
    else:
        app.command("mutate")(importlib.import_module(f"{FAULT_LAB}.command").mutate)


def _absent(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Measure the judge with planted faults: in a clone of the repository alone."""
    require_fault_lab()
