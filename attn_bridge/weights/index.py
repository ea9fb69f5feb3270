"""Templates of names as a tree, so that a name is compared with few of them, however many exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from .rows import Row
from .templates import PLACEHOLDER, expanded

Thing = TypeVar("Thing")

_TOKEN = re.compile(r"[0-9]+|\.|[^.0-9]+")

_DIGITS = re.compile(r"[0-9]+")

_spelled: set[str] = set()
"""Digits that templates spell out, such as that of ``w1``: names that differ in others fall under the same ones."""

NUMBER = None
"""Token of a template for digits: a placeholder of an integer, together with adjacent digits."""


class _Node:
    """Templates that begin alike.

    Attributes:
        following: next token -> the templates that have it.
        whole: numbers of those that end.
        begun: numbers of those of which no more is known.
    """

    __slots__ = ("begun", "following", "whole")

    def __init__(self) -> None:
        self.following: dict[str | None, _Node] = {}
        self.whole: list[int] = []
        self.begun: list[int] = []

    def add(self, tokens: Sequence[str | None], number: int, is_whole: bool) -> None:
        node = self
        for token in tokens:
            if token not in node.following:
                node.following[token] = _Node()
            node = node.following[token]
        (node.whole if is_whole else node.begun).append(number)

    def find(self, tokens: Sequence[str]) -> list[int]:
        """Return the numbers of the templates that a name of these tokens may fall under, unordered."""
        numbers: list[int] = []
        nodes = [self]
        for token in tokens:
            keys = (token, NUMBER) if _is_number(token) else (token,)
            following = []
            for node in nodes:
                numbers += node.begun
                following += [node.following[key] for key in keys if key in node.following]
            if not following:
                return numbers
            nodes = following
        for node in nodes:
            numbers += node.begun
            numbers += node.whole
        return numbers


class Index(Generic[Thing]):
    """Things indexed by templates of the names that they cover.

    Args:
        named: templates, each with its thing; a thing may have several.
        integers: placeholders of integers; None: all.
    """

    def __init__(self, named: Iterable[tuple[str, Thing]], integers: frozenset[str] | None = frozenset("ij")):
        self._named = list(named)
        self._integers = integers
        _spelled.update(_DIGITS.findall("\n".join(short for short, _ in self._named)))  # now: `kinds_of` depends on it

    @functools.cached_property
    def _trees(self) -> tuple[list[Thing], _Node, _Node]:
        """Things, and the trees of their templates from the front and from the back: most indexes are never asked."""
        things: list[Thing] = []
        forward, backward = _Node(), _Node()
        numbers: dict[int, int] = {}
        for template, thing in ((whole, thing) for short, thing in self._named for whole in expanded(short)):
            number = numbers.setdefault(id(thing), len(things))
            if number == len(things):
                things.append(thing)
            first, is_whole = _beginning(template, self._integers)
            last = () if is_whole else _end(template, self._integers)
            if len(first) > len(last) or is_whole:
                forward.add(first, number, is_whole)
            else:
                backward.add(last, number, False)
        return things, forward, backward

    def find(self, name: str) -> list[Thing]:
        """Return the things that may cover a name, in the given order."""
        tokens, reverse = _tokens_of(name)
        things, forward, backward = self._trees
        numbers = forward.find(tokens)
        if backward.following or backward.begun:
            numbers += backward.find(reverse)
        return [things[n] for n in sorted({*numbers})]


@functools.lru_cache(maxsize=1 << 12)
def _tokens_of(name: str) -> tuple[list[str], list[str]]:
    """Return the tokens of a name, and their reverse: a name is looked up in the index of every layout."""
    tokens = _TOKEN.findall(name)
    return tokens, tokens[::-1]


def kinds_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kind of each name: `Index.find` returns the same for all names of a kind, in every index.

    A checkpoint has few kinds, and is compared with all layouts.
    """
    return _kinds_of(names, len(_spelled))


@functools.lru_cache(maxsize=16)
def _kinds_of(names: tuple[str, ...], spelled: int) -> tuple[str, ...]:
    def shortened(run: re.Match[str]) -> str:
        return run[0] if run[0] in _spelled else "\0"

    return tuple(name if "\0" in name else _DIGITS.sub(shortened, name) for name in names)


def _pieces(template: str, integers: frozenset[str] | None) -> list[str | None]:
    """Return texts and placeholders in turn; those of integers are `NUMBER`."""
    pieces: list[str | None] = [*PLACEHOLDER.split(template)]
    for number in range(1, len(pieces), 2):
        name = pieces[number]
        pieces[number] = NUMBER if integers is None or name in integers else f"{{{name}}}"
    return pieces


@functools.lru_cache(maxsize=1 << 13)
def _beginning(template: str, integers: frozenset[str] | None) -> tuple[tuple[str | None, ...], bool]:
    """Return the tokens in front of the first non-integer placeholder, and whether no such placeholder exists.

    Layouts share most templates, so that few of them are taken apart.
    """
    tokens: list[str | None] = []
    is_whole = True
    for number, piece in enumerate(_pieces(template, integers)):
        if piece is not NUMBER and number % 2:
            is_whole = False
            break
        for token in [NUMBER] if piece is NUMBER else _TOKEN.findall(piece):
            if tokens and _is_number(token) and _is_number(tokens[-1]):
                tokens[-1] = NUMBER
            else:
                tokens.append(token)
    if not is_whole and tokens and tokens[-1] != ".":
        tokens.pop()  # the placeholder may go on with it
    return tuple(tokens), is_whole


def _end(template: str, integers: frozenset[str] | None) -> tuple[str | None, ...]:
    """Return the tokens after the last non-integer placeholder, in reverse."""
    pieces = _pieces(template, integers)
    at = max(number for number, piece in enumerate(pieces) if number % 2 and piece is not NUMBER)
    rest = "".join("{i}" if piece is NUMBER else piece for piece in pieces[at + 1 :])
    tokens = _beginning(rest, frozenset("i"))[0]
    is_after_dot = pieces[at] == "{path}" and (pieces[:at] == [""] or str(pieces[at - 1]).endswith("."))
    if tokens and tokens[0] != "." and not is_after_dot:
        tokens = tokens[1:]  # the placeholder may match the beginning of that token as well
    return tokens[::-1]


def _is_number(token: str | None) -> bool:
    return token is NUMBER or token[0] in "0123456789"


def stems_of(row: Row) -> tuple[str, str]:
    """Return the text before a block's number in the file's name and before an expert's number in ours, "" without one.

    A file's name may put the number of an expert after the parts of an expert, so our name is used for that.
    """
    blocks, experts = expanded(row.theirs)[-1].partition("{i}"), (*row.ours, row.theirs)[0].partition("{j}")
    return blocks[0] if blocks[1] else "", experts[0] if "{j}" in row.theirs else ""
