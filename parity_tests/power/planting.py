"""Finds expressions of a source text that a fault can change, and changes the text of one of them and nothing else."""

from __future__ import annotations

import ast
import bisect
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Literal

Kind = Literal["operator", "constant", "branch"]

KINDS: tuple[Kind, ...] = ("operator", "constant", "branch")

# Replacements of the same precedence where there is one, so that the rest of the expression keeps its meaning.
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}

SILENT = {"warn", "warning", "debug", "info", "log", "exception"}
"""Methods whose arguments are messages."""


@dataclasses.dataclass(frozen=True)
class Site:
    """A span of a source text and its replacement.

    Attributes:
        kind: operator, constant or branch.
        start: index of the first character.
        end: index after the last character.
        line: line number, from 1.
        before: the text of the span.
        after: the text that replaces it.
    """

    kind: Kind
    start: int
    end: int
    line: int
    before: str
    after: str

    def plant(self, text: str) -> str:
        """Return the text with the span replaced.

        Raises:
            ValueError: the text has something else in the span.
        """
        if text[self.start : self.end] != self.before:
            raise ValueError(f"text at {self.start} must be {self.before!r}, got {text[self.start : self.end]!r}")
        return text[: self.start] + self.after + text[self.end :]


def plant_exit(text: str, site: Site) -> str:
    """Return the text with the expression around a site replaced by the end of the program.

    A test that passes with it never evaluates the expression, and so can't catch a fault there.
    """
    finder = _Finder(text)
    spans = [finder.span(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr)]
    start, end = min(
        (span for span in spans if span[0] <= site.start and site.end <= span[1]), key=lambda span: span[1] - span[0]
    )
    return f"{text[:start]}exit('reached'){text[end:]}"


def sites(text: str) -> list[Site]:
    """Return the sites of a Python source text, from top to bottom.

    Docstrings, other strings, annotations, type aliases, ``__all__``, the arguments of ``raise`` and of logging, blocks
    for type checkers, assertions and ``strict=True`` of ``zip`` have none: a fault there changes no result.
    """
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    return sorted(finder.sites, key=lambda site: (site.start, site.end, site.after))


class _Finder(ast.NodeVisitor):
    def __init__(self, text: str):
        self.text = text
        self.sites: list[Site] = []
        # `ast` counts columns in bytes of UTF-8.
        self.lines = text.encode().splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line.decode()))

    # ---- positions

    def index(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1][:column].decode())

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.index(node.lineno, node.col_offset), self.index(node.end_lineno, node.end_col_offset)

    def add(self, kind: Kind, start: int, end: int, after: str) -> None:
        line = bisect.bisect_right(self.starts, start)
        self.sites.append(Site(kind, start, end, line, self.text[start:end], after))

    def between(self, left: ast.expr, operator: ast.AST, right: ast.expr) -> None:
        """Add a site for the operator between two operands."""
        before, after = OPERATORS[type(operator)]
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), self.text[start:end])
        word = r"\s+".join(re.escape(part) for part in before.split())
        position = re.search(word, gap)
        if position is not None:
            self.add("operator", start + position.start(), start + position.end(), after)

    # ---- places without faults

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name in SILENT or name in ("cast", "TypeVar", "Literal"):
            return
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if (name, keyword.arg) != ("zip", "strict"):
                self.visit(keyword.value)

    # ---- places with faults

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if type(node.op) in OPERATORS and not (_is_text(node) or _is_type(node)):
            self.between(node.left, node.op, node.right)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, node.op, right)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self.between(left, operator, right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not | ast.USub):
            start, end = self.span(node)[0], self.span(node.operand)[0]
            bracket = self.text.find("(", start, end)  # of the operand, whose own span starts after it
            self.add("operator", start, end if bracket < 0 else bracket, "")

    def visit_Constant(self, node: ast.Constant) -> None:
        changes: dict[type, Callable[[], list[str]]] = {
            bool: lambda: [str(not node.value)],
            int: lambda: [str(node.value + 1)],
            float: lambda: [repr(float(f"{node.value * 1.01 or 0.01:.6g}"))] if math.isfinite(node.value) else [],
        }
        for after in changes.get(type(node.value), list)():
            self.add("constant", *self.span(node), after)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test) and "__name__" not in ast.unparse(node.test):
            self.branch(node.test)
            for part in (node.test, *node.body, *node.orelse):
                self.visit(part)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.branch(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self.add("branch", *self.span(node.test), "False")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.branch(test)
        self.generic_visit(node)

    def branch(self, test: ast.expr) -> None:
        for after in ("True", "False"):
            self.add("branch", *self.span(test), after)


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operand is a string that is written out: a message that is put together."""
    return any(
        isinstance(operand, ast.JoinedStr) or (isinstance(operand, ast.Constant) and isinstance(operand.value, str))
        for operand in (node.left, node.right)
    )


def _is_type(node: ast.BinOp) -> bool:
    """Whether it is a union of types, ``int | None``."""
    return isinstance(node.op, ast.BitOr) and any(_names_type(operand) for operand in _operands(node))


def _operands(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp):
        yield from _operands(node.left)
        yield from _operands(node.right)
    else:
        yield node


def _names_type(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, str)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in {"bool", "int", "float", "str", "bytes", "list", "tuple", "dict", "set"} or name[:1].isupper()
