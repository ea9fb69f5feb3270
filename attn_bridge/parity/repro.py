"""A folder that holds all it takes to run a comparison again: weights, inputs, rules, code, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import backends, checkpoints
from ..weights import Rule, Rules
from .compare.report import SCHEMA, Pair, Report
from .compare.subject import Array, Arrays
from .dumps import folders
from .factories import Factory, load

HOW = "its README.md says how to run it again"

_SIDE = '''"""The {side} module of this comparison, with the weights that it held."""

from pathlib import Path

from attn_bridge.parity import repro


def make():
    """Return it."""
    return repro.rebuild(Path(__file__).parent, "{side}")
'''

_EXAMPLE = '''

def example_inputs():
    """Return the inputs, as the original code makes them."""
    return repro.example_inputs(Path(__file__).parent)
'''

_README = """# {verdict}: {torch} (torch) and {flax} (Flax)

{summary}

Run it again, in this folder:

    {again}

Weights, inputs and the Python files that both factories were made of are copied; other files that they read are not.
It was found by: `{command}`
"""


@dataclasses.dataclass(frozen=True)
class _Half:
    factory: str
    weights: Arrays
    sources: dict[str, Path]


class Bundle:
    """What a comparison was run on, collected while its modules are loaded.

    Args:
        found: the factories of the torch and the Flax side.
        modules: the two modules.
        inputs: the torch side's call.
        flax_inputs: the Flax side's call, None for the same.
        rules: the rules file that was given.
        options: the options of the command line, by name.
    """

    def __init__(
        self,
        found: tuple[Factory, Factory],
        modules: tuple[Any, Any],
        inputs: Any,
        flax_inputs: Any,
        rules: Path | None,
        options: Mapping[str, Any],
    ):
        from .compare.inputs import as_arguments

        sides: tuple[backends.Framework, backends.Framework] = ("torch", "flax")
        self.halves: dict[backends.Framework, _Half] = {}
        for side, factory, module in zip(sides, found, modules, strict=True):
            weights = {name: array.copy() for name, array in backends.load(side).get_weights(module).items()}
            self.halves[side] = _Half(_moved(factory, side), weights, factory.sources())
        self.calls = {"inputs.npz": as_arguments(inputs)}
        if flax_inputs is not None:
            self.calls["flax_inputs.npz"] = as_arguments(flax_inputs)
        self.rules = None if rules is None else rules.read_text(encoding="utf-8")
        self.options = dict(options)

    def write(self, path: Path, report: Report) -> None:
        """Write the folder, which must be new or empty.

        Raises:
            ValueError: it can't be written.
        """
        from safetensors.numpy import save_file

        from ..cli.inputs import write_npz

        with folders.new(path, "--save-repro") as folder:
            try:
                for side, half in self.halves.items():
                    save_file(half.weights, folder / f"{side}.safetensors")
                    for name, file in half.sources.items():
                        copy = folder / "sources" / side / name
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(file, copy)
                written = [name for name, call in self.calls.items() if write_npz(folder / name, call)]
            except OSError as error:
                raise ValueError(f"--save-repro {path} cannot be written: {error}") from error
            rules = self.rules or _rules_text(report.pairing, *(half.weights for half in self.halves.values()))
            if rules is not None:
                (folder / "rules.toml").write_text(rules, encoding="utf-8")
            again = self._command(report, written, rules is not None)
            for side in self.halves:
                text = _SIDE + ("" if "inputs.npz" in written else _EXAMPLE)
                (folder / f"{side}_side.py").write_text(text.replace("{side}", side), encoding="utf-8")
            (folder / "repro.json").write_text(json.dumps(self._record(report, again), indent=1), encoding="utf-8")
            text = _README.format(
                verdict=report.verdict,
                torch=report.first_name,
                flax=report.second_name,
                summary=str(report.first_divergence or report.message or next(iter(report.failures), "")),
                again=again,
                command=report.command,
            )
            (folder / "README.md").write_text(text, encoding="utf-8")

    def _command(self, report: Report, written: Sequence[str], with_rules: bool) -> str:
        """Return the command for what failed: of several precisions and modes the ones of the worst tensor."""
        options = self.options | {
            "--inputs": "inputs.npz" if "inputs.npz" in written else None,
            "--flax-inputs": "flax_inputs.npz" if "flax_inputs.npz" in written else None,
            "--shape": None,
            "--rules": "rules.toml" if with_rules else None,
        }
        worst = next((one for one in report.failures if one.verdict != "inconclusive" and one.kind != "weight"), None)
        for option, value in (("--dtype", worst and worst.dtype), ("--mode", worst and worst.mode)):
            if value and len(options[option] or ()) > 1:
                options[option] = [value]
        from ..cli.compare import command_line

        return command_line("compare", "torch_side.py:make", "flax_side.py:make", options=options)

    def _record(self, report: Report, again: str) -> dict[str, Any]:
        data = report.to_json()
        names = ("verdict", "message", "first_divergence", "seeds", "samples", "environment", "notes", "pairing")
        return {
            "schema": SCHEMA,
            "command": report.command,
            "again": again,
            **{name: data[name] for name in names},
            "failures": [str(one) for one in report.failures],
            "factories": {side: half.factory for side, half in self.halves.items()},
        }


def rebuild(folder: Path, side: backends.Framework) -> Any:
    """Return the module of one side of a written bundle, with its weights.

    Raises:
        ValueError: the bundle is not whole.
    """
    module = _factory(folder, side).build(side)
    backends.load(side).set_weights(module, checkpoints.read(folder / f"{side}.safetensors"))
    return module


def example_inputs(folder: Path) -> Any:
    """Return the inputs that the original code of a bundle makes."""
    found = (_factory(folder, side).example_inputs() for side in ("torch", "flax"))
    return next((one for one in found if one is not None), None)


def _factory(folder: Path, side: Any) -> Factory:
    try:
        name = json.loads((folder / "repro.json").read_text(encoding="utf-8"))["factories"][side]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / 'repro.json'} is not that of a bundle: {error}") from error
    root = folder / "sources" / side
    if root.is_dir():
        sys.path.insert(0, str(root))
    return load(str(folder / name) if str(name).startswith("sources/") else str(name))


def _moved(factory: Factory, side: backends.Framework) -> str:
    """Return the name of a factory inside the bundle: that of the copied file, or of the installed module."""
    file = getattr(factory.module, "__file__", None)
    if factory.root is None or file is None:
        return factory.name
    attribute = factory.name.rpartition(":")[2]
    return f"sources/{side}/{Path(file).relative_to(factory.root).as_posix()}:{attribute}"


def _rules_text(pairing: Sequence[Pair], torch: Mapping[str, Array], flax: Mapping[str, Array]) -> str | None:
    """Return the rules file that says a pairing; None where rules can't, as for parts of a fused tensor."""
    rules = []
    try:
        for pair in pairing:
            sizes = _sizes(pair.pattern, torch[pair.first].shape, flax[pair.second].shape)
            rules.append(Rule(pair.first, pair.second, pair.pattern, **sizes))
        Rules(rules)
    except (KeyError, ValueError, TypeError):
        return None
    tables = []
    for rule in rules:
        names = (("torch", rule.torch), ("flax", rule.flax), ("pattern", rule.pattern))
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in names]
        lines += [f"{axis} = {size}" for axis, size in rule.sizes.items()]
        tables.append("\n".join(["[[rule]]", *lines]))
    return "\n\n".join(tables) + "\n"


def _sizes(pattern: str, torch: tuple[int, ...], flax: tuple[int, ...]) -> dict[str, int]:
    """Return the sizes of the axes that stand in a group on one side and alone on the other."""
    alone: dict[str, int] = {}
    grouped: set[str] = set()
    for text, shape in zip(pattern.split("->"), (torch, flax), strict=True):
        parts = re.findall(r"\(([^()]*)\)|(\S+)", text)
        if any("..." in part for part in (one for pair in parts for one in pair)):
            continue
        for (group, axis), size in zip(parts, shape, strict=True):
            if axis:
                alone[axis] = size
            else:
                grouped |= set(group.split())
    return {axis: alone[axis] for axis in sorted(grouped)}
