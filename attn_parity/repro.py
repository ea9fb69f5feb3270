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

from attn_bridge import backends
from attn_bridge import whole_folders as folders
from attn_bridge.weights import Rule, Rules
from attn_bridge.whole_files import JsonObject, read_text

from .factories import Factory, holds_tree, labels, load
from .results.findings import SCHEMA, PairedParameter
from .results.report import Report
from .sides.subject import Array, Arrays
from .sides.trees import flatten, replace

HOW = "its README.md says how to run it again"

_SIDE = '''"""The {side} side of this comparison, with the weights that it held."""

from pathlib import Path

from attn_parity import repro


def make():
    """Return it."""
    return repro.rebuild(Path(__file__).parent, "{side}")
'''

_EXAMPLE = '''

def example_inputs():
    """Return the inputs, as the original code makes them."""
    return repro.example_inputs(Path(__file__).parent)
'''

_README = """# {verdict}: {sides}

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
    """The ingredients of a comparison, collected while its sides are loaded.

    Args:
        found: the factories of the first and the second side.
        sides: the sides that they made.
        inputs: the first side's call.
        second_inputs: the second side's call, None for the same.
        rules: the given rules file.
        options: the options of the command line, by name.
    """

    def __init__(
        self,
        factories: tuple[Factory, Factory],
        sides: tuple[object, object],
        inputs: object,
        second_inputs: object,
        rules: Path | None,
        options: Mapping[str, Any],
    ):
        from .samples.calls import as_arguments

        self.halves: dict[str, _Half] = {}
        for label, factory, side in zip(labels(sides).values(), factories, sides, strict=True):
            weights = {name: array.copy() for name, array in weights_of(side).items()}
            self.halves[label] = _Half(_moved(factory, label), weights, factory.sources())
        self.calls = {"inputs.npz": as_arguments(inputs)}
        if second_inputs is not None:
            self.calls["second_inputs.npz"] = as_arguments(second_inputs)
        self.rules = None if rules is None else read_text(rules)
        self.options = dict(options)

    def write(self, path: Path, report: Report) -> None:
        """Write the folder, which must be new or empty.

        Raises:
            ValueError: it can't be written.
        """
        from safetensors.numpy import save_file

        from .input_files import write_npz

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
            first, second = (half.weights for half in self.halves.values())
            rules = self.rules or _rules_text(report.pairing, first, second)
            if rules is not None:
                (folder / "rules.toml").write_text(rules, encoding="utf-8")
            again = self._command(report, written, rules is not None)
            for side in self.halves:
                text = _SIDE + ("" if "inputs.npz" in written else _EXAMPLE)
                (folder / f"{side}_side.py").write_text(text.replace("{side}", side), encoding="utf-8")
            (folder / "repro.json").write_text(json.dumps(self._record(report, again), indent=1), encoding="utf-8")
            text = _README.format(
                verdict=report.verdict,
                sides=report.sides,
                summary=str(report.first_divergence or report.message or next(iter(report.failures), "")),
                again=again,
                command=report.command,
            )
            (folder / "README.md").write_text(text, encoding="utf-8")

    def _command(self, report: Report, written: Sequence[str], with_rules: bool) -> str:
        """Return the command for the failure: of several precisions and modes the ones of the worst tensor."""
        options = self.options | {
            "--inputs": "inputs.npz" if "inputs.npz" in written else None,
            "--second-inputs": "second_inputs.npz" if "second_inputs.npz" in written else None,
            "--shape": None,
            "--baseline": None,
            "--build-seed": None,
            "--rules": "rules.toml" if with_rules else None,
        }
        worst = next((one for one in report.failures if one.verdict != "inconclusive" and one.kind != "weight"), None)
        for option, value in (("--dtype", worst and worst.dtype), ("--mode", worst and worst.mode)):
            if value and len(options[option] or ()) > 1:
                options[option] = [value]
        from .command_line import command_line

        return command_line("compare", *(f"{label}_side.py:make" for label in self.halves), options=options)

    def _record(self, report: Report, again: str) -> JsonObject:
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


def rebuild(folder: Path, side: str) -> Any:
    """Return one side of a written bundle, with its weights.

    Raises:
        ValueError: the bundle is not whole.
    """
    from attn_bridge import checkpoints  # with every family of models: only a bundle needs it

    return _with_weights(_factory(folder, side).build(), checkpoints.read(folder / f"{side}.safetensors"))


def example_inputs(folder: Path) -> Any:
    """Return the inputs that the original code of a bundle makes."""
    examples = (_factory(folder, side).example_inputs() for side in _record(folder)["factories"])
    return next((one for one in examples if one is not None), None)


def weights_of(side: object) -> Arrays:
    """Return the arrays of a side by name; of a Linen module's variables and of a tree of weights, by position."""
    framework = backends.framework_of(side)
    assert framework is not None, "it was built"
    backend = backends.load(framework)
    if not holds_tree(side):
        weights: Arrays = backend.get_weights(side)
        return weights
    return {str(place): backend.to_numpy(leaf) for place, (_, leaf) in enumerate(flatten(_tree(side), _is_leaf))}


def _with_weights(side: Any, arrays: Mapping[str, Array]) -> object:
    framework = backends.framework_of(side)
    assert framework is not None, "it was built"
    backend = backends.load(framework)
    if not holds_tree(side):
        backend.set_weights(side, arrays)
        return side
    leaves = [backend.from_numpy(arrays[str(place)]) for place in range(len(arrays))]
    tree = replace(_tree(side), _is_leaf, leaves)
    return (side[0], tree) if isinstance(side, tuple) else dataclasses.replace(side, weights=tree)


def _tree(side: Any) -> object:
    return side[1] if isinstance(side, tuple) else side.weights


def _is_leaf(value: object) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _record(folder: Path) -> JsonObject:
    try:
        data = json.loads((folder / "repro.json").read_text(encoding="utf-8"))
        return {"factories": {str(side): str(name) for side, name in data["factories"].items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / 'repro.json'} is not that of a bundle: {error}") from error


def _factory(folder: Path, side: str) -> Factory:
    factories = _record(folder)["factories"]
    if side not in factories:
        raise ValueError(f"{folder / 'repro.json'} has no {side} side")
    name = factories[side]
    root = folder / "sources" / side
    if root.is_dir():
        sys.path.insert(0, str(root))
    return load(str(folder / name) if name.startswith("sources/") else name)


def _moved(factory: Factory, side: str) -> str:
    """Return the name of a factory inside the bundle: that of the copied file, or of the installed module."""
    file = getattr(factory.module, "__file__", None)
    if factory.root is None or file is None:
        return factory.name
    attribute = factory.name.rpartition(":")[2]
    return f"sources/{side}/{Path(file).relative_to(factory.root).as_posix()}:{attribute}"


def _rules_text(
    pairing: Sequence[PairedParameter], first: Mapping[str, Array], second: Mapping[str, Array]
) -> str | None:
    """Return a pairing as the text of a rules file; None if rules cannot express it, as for parts of a fused tensor."""
    rules = []
    try:
        for pair in pairing:
            sizes = _sizes(pair.pattern, first[pair.first].shape, second[pair.second].shape)
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


def _sizes(pattern: str, first: tuple[int, ...], second: tuple[int, ...]) -> dict[str, int]:
    """Return the sizes of the axes that are in a group on one side and alone on the other."""
    alone: dict[str, int] = {}
    grouped: set[str] = set()
    for text, shape in zip(pattern.split("->"), (first, second), strict=True):
        parts = re.findall(r"\(([^()]*)\)|(\S+)", text)
        if any("..." in part for part in (one for pair in parts for one in pair)):
            continue
        for (group, axis), size in zip(parts, shape, strict=True):
            if axis:
                alone[axis] = size
            else:
                grouped |= set(group.split())
    return {axis: alone[axis] for axis in sorted(grouped)}
