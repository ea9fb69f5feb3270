"""Type checkers know what a call returns: by overloads, whose arguments are those of the method that runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from .test_house import is_private, public_names

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch_attn", "jax_attn")


def classes(package: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a package's signatures."""
    files = (ROOT / package / "signatures").glob("*.py")
    return {node.name: node for path in files for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def typed(package: str) -> dict[str, tuple[ast.FunctionDef, str]]:
    """Return what ``@typed_as`` decorates by file, and the name of its signature."""
    return {
        path.relative_to(ROOT / package).as_posix(): (node, ast.unparse(decorator.args[0]))
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "typed_as"
    }


def arguments(function: ast.FunctionDef, options: dict[str, ast.ClassDef]) -> set[tuple[str, bool]]:
    """Return the arguments of a function, and whether each may be left out; those of ``Unpack`` may."""
    given = function.args
    positional = [argument.arg for argument in given.args if argument.arg != "self"]
    required = positional[: len(positional) - len(given.defaults)]
    named = dict(zip((argument.arg for argument in given.kwonlyargs), map(bool, given.kw_defaults), strict=True))
    found = {(name, name not in required) for name in positional} | set(named.items())
    return found | {(name, True) for name in _unpacked(given.kwarg, options)}


def _unpacked(keywords: ast.arg | None, options: dict[str, ast.ClassDef]) -> list[str]:
    names, kind = [], None if keywords is None else options[keywords.annotation.slice.id]
    while kind is not None:
        names += [row.target.id for row in kind.body if isinstance(row, ast.AnnAssign)]
        kind = options.get(kind.bases[0].id)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_overloads_take_the_arguments_of_the_method(package):
    signatures, methods = classes(package), typed(package)
    assert len(methods) == 17
    for file, (method, name) in methods.items():
        *_, general = [node for node in signatures[name].body if isinstance(node, ast.FunctionDef)]
        assert arguments(general, signatures) == arguments(method, signatures), file


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_class_takes_or_returns_any(package):
    names = public_names(ROOT / package)
    trees = {path.name: parsed(path) for path in (ROOT / package).rglob("*.py") if "parallel" not in path.parts}
    found = [
        f"{file}: {method.name}"
        for file, tree in trees.items()
        for variant in tree.body
        if isinstance(variant, ast.ClassDef) and variant.name in names
        for method in variant.body
        if isinstance(method, ast.FunctionDef) and not is_private(method.name)
        for kind in [method.returns, *(row.annotation for row in (*method.args.args, *method.args.kwonlyargs))]
        if kind is not None and "Any" in ast.unparse(kind)
    ]
    assert found == []


@pytest.mark.full
def test_mypy_gives_calls_of_users_their_types():
    folder = ROOT / "parity_tests" / "typed_calls"
    command = [sys.executable, "-m", "mypy", "--config-file", str(folder / "mypy.ini"), "--no-incremental"]
    done = subprocess.run(
        [*command, *map(str, sorted(folder.glob("*_calls.py")))], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
