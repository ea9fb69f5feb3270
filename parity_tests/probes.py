"""Record which blocks of the project's code run, by probes that an import hook puts into the blocks.

A block is the body of a function or a loop, a branch of ``if``, ``match`` or ``except``, an operand of ``and``, ``or``
after the first, an arm of a conditional expression, the element of a comprehension. A probe adds a number to a set;
code of other packages runs as fast as ever.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

PACKAGES = ("attn_bridge", "attn_kernels", "attn_parity", "fault_lab", "torch_attn", "jax_attn")

PROBE = "__probe__"
"""Name of the builtin function that the probes call."""


class Blocks:
    """The blocks of instrumented modules and the numbers of those that ran."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ran: set[int] = set()

    def number(self, name: str) -> int:
        """Return a new number for the block of this name."""
        self.names.append(name)
        return len(self.names) - 1

    def take(self) -> list[int]:
        """Return the numbers of the blocks that ran since the last call."""
        taken = sorted(self.ran)
        self.ran.clear()
        return taken


class _Instrumenter(ast.NodeTransformer):
    """Puts probes into the functions of a module; what runs on import has none."""

    def __init__(self, path: str, blocks: Blocks):
        self.path, self.blocks = path, blocks
        self.depth = 0

    def _call(self, node: ast.AST, kind: str) -> ast.Call:
        name = f"{self.path}:{getattr(node, 'lineno', 0)}:{getattr(node, 'col_offset', 0)}:{kind}"
        return ast.Call(ast.Name(PROBE, ast.Load()), [ast.Constant(self.blocks.number(name))], [])

    def _in_block(self, body: Sequence[ast.stmt], kind: str, owner: ast.AST) -> list[ast.stmt]:
        changed = [self.visit(statement) for statement in body]
        if not self.depth:
            return changed
        probe = ast.Expr(self._call(body[0] if body else owner, kind))
        is_text = bool(body) and kind == "function" and ast.get_docstring(owner) is not None  # type: ignore[arg-type]
        return [*changed[:is_text], probe, *changed[is_text:]]

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.depth += 1
        node.body = self._in_block(node.body, "function", node)
        self.depth -= 1
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.depth += 1
        node.body = self._expression(self.visit(node.body), "lambda")
        self.depth -= 1
        return node

    def _expression(self, node: ast.expr, kind: str) -> ast.expr:
        return ast.BoolOp(ast.Or(), [self._call(node, kind), node]) if self.depth else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.body, node.orelse = self._expression(node.body, "then"), self._expression(node.orelse, "else")
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        node.values[1:] = [self._expression(value, "operand") for value in node.values[1:]]
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        node.test = self.visit(node.test)
        node.body = self._in_block(node.body, "then", node)
        node.orelse = self._in_block(node.orelse, "else", node)
        return node

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> ast.AST:
        body, node.body = node.body, []
        self.generic_visit(node)
        node.body = self._in_block(body, "loop", node)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._loop(node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        return self._loop(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._loop(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.body = self._in_block(node.body, "except", node)
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.body = self._in_block(node.body, "case", node.body[0])
        return node

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> ast.AST:
        self.generic_visit(node)
        node.elt = self._expression(node.elt, "element")
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        node.key = self._expression(node.key, "element")
        return node


def instrument(text: str, path: str, blocks: Blocks) -> ast.Module:
    """Return the module with probes; positions in tracebacks stay those of the text."""
    module: ast.Module = _Instrumenter(path, blocks).visit(ast.parse(text))
    return ast.fix_missing_locations(module)


class _Loader(importlib.machinery.SourceFileLoader):
    blocks: Blocks
    root: Path

    def get_code(self, fullname: str) -> CodeType:
        """Compile the instrumented text; bytecode that is stored has no probes."""
        path = Path(self.get_filename(fullname))
        module = instrument(path.read_text(encoding="utf-8"), path.relative_to(self.root).as_posix(), self.blocks)
        return compile(module, str(path), "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, blocks: Blocks, root: Path):
        self.blocks, self.root = blocks, root

    def find_spec(
        self, fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, None if path is None else list(path), target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        loader = _Loader(spec.loader.name, spec.loader.path)
        loader.blocks, loader.root = self.blocks, self.root
        spec.loader = loader
        return spec


def are_installed() -> bool:
    """Return whether this process runs instrumented code."""
    return hasattr(builtins, PROBE)


def install(root: Path) -> Blocks:
    """Instrument the packages that this process imports from now on, and return their blocks.

    Raises:
        RuntimeError: a package is imported already.
    """
    if loaded := [name for name in PACKAGES if name in sys.modules]:
        raise RuntimeError(f"{loaded[0]} must be imported after the probes are installed")
    blocks = Blocks()
    setattr(builtins, PROBE, blocks.ran.add)
    sys.meta_path.insert(0, _Finder(blocks, root))
    return blocks
