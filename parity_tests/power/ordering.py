"""Sorts test files by how many imports away a changed file is.

As a script, ``python ordering.py FILE ...`` in the root of a checkout prints, as JSON, file -> test files, so that
another checkout can be asked without importing it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = ("attn_bridge", "attn_kernels", "attn_parity", "fault_lab", "torch_attn", "jax_attn", "parity_tests")

LOADED = {
    "attn_bridge.backends": ("torch_attn", "jax_attn"),
    "attn_bridge.cli.app": ("attn_bridge.cli", "attn_parity.commands", "fault_lab.command"),
    "attn_bridge.parity": ("attn_parity", "fault_lab.driver", "fault_lab.mesh.driver"),
    "attn_parity.sides.subject": ("attn_parity.frameworks",),
    "fault_lab.adapters": ("fault_lab.frameworks",),
}
"""Module -> packages whose modules it imports by a name that it is given."""

Edges = Mapping[str, set[str]]


def ordered_tests(changed_file: str, root: Path | None = None) -> list[str]:
    """Return the test files that a changed file can break, nearest first, as paths relative to the root.

    Distance counts imports, also those by a name in a string, and one less where the names of the files share a word.
    Of files that are equally far, one whose path shares more words with the changed file's comes first, then one that
    needs no framework.
    """
    root = root or Path(__file__).parents[2]
    return by_distance(changed_file, importers(root), root)


def by_distance(changed_file: str, edges: Edges, root: Path) -> list[str]:
    """Return the test files below the root that can reach a changed file, by these edges."""
    start = module_of(changed_file)
    queue = [start]
    if changed_file.endswith("/__init__.py"):
        queue += sorted(module for module in edges if module.startswith(f"{start}."))  # whose import runs it
    distances = {module: min(number, 1) for number, module in enumerate(queue)}
    for module in queue:
        for importer in sorted(edges[module]):
            if importer not in distances:
                distances[importer] = distances[module] + 1
                queue.append(importer)
    words = _words(changed_file)
    tests = [
        (
            distance - bool(words & _words(Path(path).name)),
            -len(words & _words(path)),
            not path.startswith("parity_tests/neutral/"),
            path,
        )
        for path, distance in ((f"{module.replace('.', '/')}.py", d) for module, d in distances.items())
        if Path(path).name.startswith("test_") and (root / path).is_file()
    ]
    return [path for *_, path in sorted(tests)]


def importers(root: Path) -> Edges:
    """Return module -> modules that import it, in the checkout that comes first on Python's path."""
    import grimp  # `drawing` and `planting` go without

    graph = grimp.build_graph(PACKAGES[0], *PACKAGES[1:], cache_dir=None)
    edges = {module: set(graph.find_modules_that_directly_import(module)) for module in graph.modules}
    for module in graph.modules:
        path = root / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        imported = set(_named_modules(text, graph.modules))
        if 'import_module(f"{__name__}.' in text:
            imported |= graph.find_children(module)
        if re.search(r'import_module\(f"\.{\w+}", __name__\)', text):
            imported |= graph.find_descendants(module)
        for package in LOADED.get(module, ()):
            imported |= graph.find_descendants(package) | {package}
        for name in imported:
            edges[name].add(module)
        if module.endswith(".conftest"):
            edges[module] |= graph.find_descendants(module.removesuffix(".conftest"))
    return edges


def _named_modules(text: str, modules: set[str]) -> Iterator[str]:
    """Yield the modules that a text names in strings, such as ``"attn_bridge.viz.drawing.draw"``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            while "." in name and name not in modules:
                name = name.rpartition(".")[0]
            if "." in name:
                yield name


def module_of(path: str) -> str:
    """Return the name of the module in a file."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _words(path: str) -> set[str]:
    """Return the words of a path, in the singular."""
    return {word.rstrip("s") for word in re.split(r"[/_.]", path)} - {"", "py", "test", "parity", "attn"}


if __name__ == "__main__":
    checkout = Path.cwd()
    sys.path.insert(0, str(checkout))
    edges_of_checkout = importers(checkout)
    print(json.dumps({path: by_distance(path, edges_of_checkout, checkout) for path in sys.argv[1:]}))
