"""Count what makes the code hard to read, per room, and refuse more of it than docs/prose.json allows: ``make lint``.

A room is a package's folder. ``python docs/prose.py`` prints the counts of the whole tree, ``--check`` compares every
room with its limits, ``--update`` lowers the limits to the counts, and ``--list COUNT [FOLDER]`` prints the lines.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMITS = ROOT / "docs" / "prose.json"
LIBRARY = ("attn_bridge", "attn_kernels", "attn_parity", "jax_attn", "torch_attn")
PACKAGES = (*LIBRARY, "fault_lab", "benchmarks")

PHRASES = {
    "a relative clause for a noun": r"\b[Ww]hat (?:a|an|the|is|are|it|its|they|has|have|was|were|of|to|does|can|no)\b",
    "begins with What": r"\AWhat\b",
    "a negation for a statement": r"(?<!there )\b(?:is|are|be|was) (?:no|none|nothing|nobody)\b",
    "a place that stands or lies": r"\b(?:stands?|lies|goes|stood) (?:in|for|beside|at|on|below|above|before)\b",
    "telling and saying": r"\b(?:told|tells?|said|says?)\b",
    "an unnamed person": r"\b(?:nobody|somebody|whoever|anybody|everybody)\b",
    "existence as a clause": r"\b(?:if there (?:is|are) (?:none|any|one|some)|that there (?:is|are)|is there)\b",
    "an idiom": (
        r"\b(?:so many|of (?:its|their) own|by (?:itself|themselves)|anew|at hand|beside|in (?:the )?place of)\b"
    ),
}
"""Phrases on which a native reader stumbles, as patterns."""

PRONOUNS = frozenset(
    {"one", "found", "held", "told", "place", "given", "known", "said", "here", "there", "taken", "both", "shown"}
)
"""Names that say nothing of what they are bound to; in a comprehension they are free."""

COUNTS = ("docstrings", "stumbling", "bindings", "pronouns", "any", "ignored", "lines", "comments")
LIMITED = ("stumbling", "pronouns", "any", "ignored")
"""Counts that have limits; the others are what they are shares of."""


@dataclass(frozen=True)
class Occurrence:
    """One thing that is counted: where it is, and its text."""

    count: str
    path: Path
    line: int
    text: str


def main() -> int:
    """Print the counts, or compare them with their limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="fail where a room has more than its limit")
    choice.add_argument("--update", action="store_true", help="lower the limits to the counts")
    choice.add_argument("--list", metavar="COUNT", choices=(*COUNTS, "homes"), help="print the lines of one count")
    parser.add_argument("folder", nargs="?", default="", help="only below this folder, such as attn_parity/verdict")
    arguments = parser.parse_args()
    if arguments.list == "homes":
        print(*(f"{name}: {', '.join(homes)}" for name, homes in classes_with_two_homes().items()), sep="\n")
        return 0
    paths = [path for path in sources() if str(path.relative_to(ROOT)).startswith(arguments.folder)]
    occurrences = [occurrence for path in paths for occurrence in occurrences_in(path)]
    if arguments.list:
        for each in occurrences:
            if each.count == arguments.list:
                print(f"{each.path.relative_to(ROOT)}:{each.line}: {each.text}")
        return 0
    rooms = counts_per_room(occurrences)
    homes = len(classes_with_two_homes())
    if arguments.check:
        return check(rooms, homes)
    if arguments.update:
        update(rooms, homes)
        return 0
    show(rooms, homes)
    return 0


def sources() -> Iterator[Path]:
    """Yield the files of the packages."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def occurrences_in(path: Path) -> Iterator[Occurrence]:
    """Yield all that is counted in a file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Occurrence("lines", path, number, "")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            kind = "ignored" if re.match(r"#\s*type: ignore", token.string) else "comments"
            yield Occurrence(kind, path, token.start[0], token.string)
    for line, docstring in docstrings_of(tree):
        yield Occurrence("docstrings", path, line, "")
        phrases = [name for name, pattern in PHRASES.items() if re.search(pattern, docstring)]
        if phrases:
            yield Occurrence("stumbling", path, line, f"{', '.join(phrases)}: {' '.join(docstring.split())[:160]}")
    for line, name in bindings_of(tree):
        yield Occurrence("bindings", path, line, name)
        if name in PRONOUNS:
            yield Occurrence("pronouns", path, line, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "Any":
            yield Occurrence("any", path, node.lineno, "Any")


def docstrings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of modules, classes and functions, and those below a constant or field."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def bindings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of what assignments, arguments, loops and with statements bind, comprehensions aside."""
    inside = {id(node) for each in ast.walk(tree) if isinstance(each, ast.comprehension) for node in ast.walk(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inside:
            yield node.lineno, node.id


def counts_per_room(occurrences: list[Occurrence]) -> dict[str, collections.Counter[str]]:
    """Return the counts of every folder that has any."""
    rooms: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in occurrences:
        rooms[str(each.path.parent.relative_to(ROOT))][each.count] += 1
    return dict(sorted(rooms.items()))


def classes_with_two_homes() -> dict[str, list[str]]:
    """Return the modules of each public class name that more than one module of the library defines, twins aside."""
    homes: dict[str, list[str]] = collections.defaultdict(list)
    for path in sources():
        relative = path.relative_to(ROOT)
        if relative.parts[0] not in LIBRARY:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(relative))
    twin = re.compile("^(torch_attn|jax_attn|attn_parity/frameworks/(torch|jax))/")
    neutral = {name: {twin.sub("", path) for path in paths} for name, paths in homes.items()}
    return {name: homes[name] for name, paths in sorted(neutral.items()) if len(paths) > 1}


def check(rooms: dict[str, collections.Counter[str]], homes: int) -> int:
    """Print every room that has more than its limit; return the exit status."""
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    errors = [
        f"{room}: {counts[name]} of {name}, at most {limits['rooms'].get(room, {}).get(name, 0)}; "
        f"python docs/prose.py --list {name} {room}"
        for room, counts in rooms.items()
        for name in LIMITED
        if counts[name] > limits["rooms"].get(room, {}).get(name, 0)
    ]
    if homes > limits["homes"]:
        errors.append(
            f"{homes} names of classes have two homes, at most {limits['homes']}; python docs/prose.py --list homes"
        )
    print(*errors, sep="\n", end="\n" if errors else "")
    return bool(errors)


def update(rooms: dict[str, collections.Counter[str]], homes: int) -> None:
    """Write the counts as limits, where they are below those of the file; a room that is new gets its counts."""
    before = json.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else {"rooms": {}, "homes": homes}
    limits = {
        room: {
            name: min(counts[name], before["rooms"].get(room, {}).get(name, counts[name]))
            for name in LIMITED
            if counts[name]
        }
        for room, counts in rooms.items()
    }
    whole = {"homes": min(homes, before["homes"]), "rooms": {room: each for room, each in limits.items() if each}}
    LIMITS.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def show(rooms: dict[str, collections.Counter[str]], homes: int) -> None:
    """Print a table of the packages and the whole."""
    packages: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for room, counts in rooms.items():
        packages[Path(room).parts[0]].update(counts)
        packages["all"].update(counts)
    print("".join([f"{'':14}", *(f"{name:>12}" for name in COUNTS)]))
    for package, counts in packages.items():
        if package != "all":
            print("".join([f"{package:14}", *(f"{counts[name]:12,}" for name in COUNTS)]))
    print("".join([f"{'all':14}", *(f"{packages['all'][name]:12,}" for name in COUNTS)]))
    print(f"{homes} names of classes with two homes")


if __name__ == "__main__":
    sys.exit(main())
