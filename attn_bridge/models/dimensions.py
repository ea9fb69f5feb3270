"""Symbols of sizes that axes of our tensors share: the width, the vocabulary, the heads.

Every layout maps to our names, so a single table of our names checks all of them (`dimensions.toml`). In: shapes under
our names. Out: the axis symbols of each tensor. `fitting` compares the sizes.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..weights.placements import Shape
from ..weights.toml import packaged


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A size that several axes share.

    Attributes:
        scope: path of the module or model that has it.
        kind: a key of `WORDS`.
    """

    scope: str
    kind: str


Axes = tuple[Symbol | int | None, ...]
"""Per axis its symbol, its size if fixed, or None for any size."""

Table = dict[str, tuple[str, ...]]
"""Name of a tensor below its module -> the kinds of its axes."""


def _tables(entries: Mapping[str, list[dict[str, Any]]]) -> dict[str, Table]:
    """Return the tables of a file; an entry lists linear layers, matrices and tensors with the same axes."""
    tables: dict[str, Table] = {}
    for name, of_table in entries.items():
        table = tables[name] = {}
        for entry in of_table:
            axes, linear = tuple(entry.get("axes", ())), entry.get("linear", ())
            table |= tables[entry["like"]] if "like" in entry else {}
            table |= {f"{layer}.weight": axes for layer in (*linear, *entry.get("weights", ()))}
            table |= {f"{layer}.bias": axes[:1] for layer in linear}
            table |= dict.fromkeys(entry.get("tensors", ()), axes)
    return tables


_FILE = packaged(__package__, "dimensions.toml")
_ATTENTIONS, _OTHERS = _tables(_FILE["attention"]), _tables(_FILE["others"])
_MARKS: Mapping[str, str] = _FILE["marks"]
WORDS: Mapping[str, str] = _FILE["words"]
"""Kind of a symbol -> its name in messages."""
TOGETHER: list[list[str]] = _FILE["together"]
"""Endings that a module has all of, or none."""

_OWN_NORM = "norm.scale"
"""Norm of attention's own, which other modules have as well."""

_STEM = r"(?P<stem>(?:.+\.)?)"


def _leaves(names: Iterable[str]) -> str:
    """Return the pattern of one of the names of tensors below their modules."""
    return rf"(?P<leaf>{'|'.join(map(re.escape, names))})"


_ATTENTION = re.compile(_STEM + _leaves({leaf for table in _ATTENTIONS.values() for leaf in table} - {_OWN_NORM}))
_FEED = re.compile(
    rf"(?P<stem>(?:.+\.)?(?:ff|dense)\.)(?P<part>experts\.[0-9]+\.|shared\.|){_leaves(_OTHERS['feed_forward'])}"
)
_END = re.compile(_STEM + _leaves(_OTHERS["ends"] | _OTHERS["encoder"]))
_OF_BLOCK = re.compile(rf"{_STEM}trf_blocks\.[0-9]+\.{_leaves(_OTHERS['block'])}")
_STREAM = re.compile(rf"{_STEM}{_leaves(_OTHERS['streams'])}\.[0-9]+\.weight")
_ENDS = _OTHERS["ends"] | _OTHERS["encoder"] | _OTHERS["block"] | _OTHERS["streams"]
_VARIED = (".scalar", ".altup.corrected_scale")
"""Endings of those that blocks of models have whose layers are of several sizes (Gemma 3n and 4)."""
_NORM = re.compile(_STEM + _leaves(("scale", "shift")))
_BLOCK = re.compile(
    r"(?P<root>(?:.+?\.)??)(?:trf_blocks|layers)\.(?P<number>[0-9]+)\."
    r"(?P<part>att|cross_att|linear_att|ff|dense|norm[123]|post_norm[12]|(?:dense|experts|input|laurel)_norm|altup)\."
)
_OUTER_NORM = re.compile(r"(?P<root>(?:.+\.)?)(?:emb|final)_norm\.")


def names() -> Table:
    """Return our names below any path, except those of norms, and the kinds of their axes."""
    feed_forward, indexer = _OTHERS["feed_forward"], "indexer."
    every = {leaf.removeprefix(indexer): axes for table in _ATTENTIONS.values() for leaf, axes in table.items()}
    every |= {f"ff.{leaf}": axes for leaf, axes in feed_forward.items()}
    every |= {
        f"{module}.{leaf}": axes
        for module in ("ff.experts.{j}", "ff.shared", "dense")
        for leaf, axes in feed_forward.items()
        if leaf.startswith("fc")
    }
    every |= _OTHERS["ends"] | _OTHERS["block"] | {f"encoder.{leaf}": axes for leaf, axes in _OTHERS["encoder"].items()}
    every |= {f"{leaf}.{{i}}.{own}": axes for leaf, axes in _OTHERS["streams"].items() for own in ("weight", "bias")}
    return {name: axes for name, axes in every.items() if not name.endswith((".scale", ".shift"))}


def axes_of(shapes: Mapping[str, Shape], *, is_whole: bool) -> dict[str, Axes]:
    """Return the symbols of our tensors' axes; names of no module of ours are left out.

    Args:
        shapes: our name -> shape.
        is_whole: whether the tensors are one model with one config, whose layers have the same sizes.
    """
    symbols = _Symbols(shapes, is_whole)
    return {name: axes for name in shapes if (axes := symbols.axes(name)) is not None}


def blocks_of(names: Iterable[str]) -> dict[str, int]:
    """Return the path of each stack of blocks ("" for a decoder's) -> the number of its blocks."""
    counts: dict[str, int] = {}
    for name in names:
        block = _BLOCK.match(name)
        if block is not None:
            counts[block["root"]] = max(counts.get(block["root"], 0), int(block["number"]) + 1)
    return counts


class _Symbols:
    """Reads the symbols of names: modules are collected first, as their kind depends on the tensors that they have."""

    def __init__(self, shapes: Mapping[str, Shape], is_whole: bool):
        self.shapes, self.is_whole = shapes, is_whole
        self.attentions: dict[str, dict[str, str]] = collections.defaultdict(dict)
        self.feeds: dict[str, set[str]] = collections.defaultdict(set)
        self.varied: set[str] = set()
        roots = set()
        for name in shapes:
            attention, feed = _ATTENTION.fullmatch(name), _FEED.fullmatch(name)
            if attention is not None:
                self.attentions[attention["stem"]][attention["leaf"]] = name
            elif feed is not None:
                self.feeds[feed["stem"] + feed["part"]].add(feed["leaf"])
            elif name.endswith("tok_emb.weight"):
                roots.add(name.removesuffix("tok_emb.weight"))
            elif name.endswith(_VARIED) and (own := _OF_BLOCK.fullmatch(name)) is not None:
                self.varied.add(own["stem"])
        self.roots = roots | {root + side for root in roots for side in ("encoder.", "decoder.")}
        self.pairs = {
            root.removesuffix("decoder.")
            for root in map(self._root_of, self.attentions)
            if root is not None and root.endswith("decoder.")
        }
        self.equal = self._equal_symbols()

    def axes(self, name: str) -> Axes | None:
        """Return the symbols of a tensor's axes; None for a name of no module of ours."""
        for pattern, read in (
            (_ATTENTION, self._attention),
            (_FEED, self._feed),
            (_END, self._end),
            (_OF_BLOCK, self._end),
            (_STREAM, self._end),
            (_NORM, self._norm),
        ):
            hit = pattern.fullmatch(name)
            if hit is not None:
                return read(hit)
        return None

    # ---- where a module is

    def _root_of(self, stem: str) -> str | None:
        """Return the path of the model of which a module is part of a block; None for a separate module."""
        block = _BLOCK.match(stem)
        return None if block is None else block["root"]

    def _is_unified(self, root: str | None) -> bool:
        return root is not None and (self.is_whole or root in self.roots)

    def _width(self, root: str | None, stem: str, kind: str) -> Symbol:
        """Return the width of a model, or that of a separate module."""
        if root is None or not self._is_unified(root):
            return Symbol(stem, kind)
        for pair in self.pairs:
            is_shared = f"{pair}tok_emb.weight" in self.shapes or self.is_whole
            if root == pair or (root == f"{pair}encoder." and is_shared):
                return Symbol(f"{pair}decoder.", "width")
        return Symbol(root, "width")

    def _scope(self, stem: str) -> str:
        """Return the scope of sizes within a module: itself, or all modules of that name where layers are alike."""
        block = _BLOCK.match(stem)
        if block is None or not self.is_whole or block["root"] in self.varied:
            return stem
        # Layers with sinks may have other sizes than those without (MiMo-V2-Flash).
        kind = "with sinks." if "sinks" in self.attentions.get(stem, {}) else ""
        return f"{block['root']}trf_blocks.*.{block['part']}.{kind}"

    # ---- attention

    def _kind(self, stem: str) -> str:
        return next((kind for mark, kind in _MARKS.items() if mark in self.attentions.get(stem, {})), "plain")

    def _equal_symbols(self) -> dict[str, dict[str, str]]:
        """Return, for each scope of attention, the symbols that equal other symbols of it."""
        sizes: dict[str, dict[str, collections.Counter[int]]] = collections.defaultdict(
            lambda: collections.defaultdict(collections.Counter)
        )
        kinds: dict[str, str] = {}
        for stem, leaves in self.attentions.items():
            scope, kind = self._scope(stem), self._kind(stem)
            kinds.setdefault(scope, kind)
            for leaf, name in leaves.items():
                for symbol, size in zip(_ATTENTIONS[kind].get(leaf, ()), self.shapes[name], strict=False):
                    sizes[scope][symbol][size] += 1
        symbols = {}
        for scope, kind in kinds.items():
            usual = {symbol: counter.most_common(1)[0][0] for symbol, counter in sizes[scope].items()}
            symbols[scope] = _equal_in(kind, usual)
        return symbols

    def _attention(self, hit: re.Match[str]) -> Axes | None:
        stem, kinds = hit["stem"], _ATTENTIONS[self._kind(hit["stem"])].get(hit["leaf"])
        scope, root, is_cross = self._scope(stem), self._root_of(stem), stem.endswith("cross_att.")

        def symbol(kind: str) -> Symbol:
            kind = self.equal[scope].get(kind, kind)
            if kind == "query input":
                if "W_query_latent.weight" in self.attentions[stem]:
                    return Symbol(scope, "query latent")
                kind = "input"
            if kind in ("input", "output") or (kind == "context" and not is_cross and self._is_unified(root)):
                return self._width(root, stem, kind)
            if kind == "context" and root is not None and self._is_unified(root):
                return self._width(f"{root.removesuffix('decoder.')}encoder.", stem, kind)
            return Symbol(scope, kind)

        return None if kinds is None else _axes(kinds, symbol)

    # ---- the rest of a model

    def _feed(self, hit: re.Match[str]) -> Axes | None:
        stem, part, leaf = hit["stem"], hit["part"], hit["leaf"]
        root, scope = self._root_of(stem), self._scope(stem)
        if leaf.startswith("fc") and "fc3.weight" not in self.feeds[stem + part] and not self._is_unified(root):
            return None  # no module of ours: gates have three matrices
        hidden = "expert" if part.startswith("experts.") else "shared" if part else "hidden"

        def symbol(kind: str) -> Symbol:
            if kind == "input":
                return self._width(root, stem, kind)
            return Symbol(scope, hidden if kind == "hidden" else kind)

        return _axes(_OTHERS["feed_forward"][leaf], symbol)

    def _end(self, hit: re.Match[str]) -> Axes | None:
        root = hit["stem"]

        def symbol(kind: str) -> Symbol:
            if kind in ("width", "token width", "logit width"):
                return self._end_width(root, kind)
            return Symbol(self._table_of(root) if kind == "vocab" else root, kind)

        return _axes(_ENDS[hit["leaf"]], symbol) if self._is_unified(root) else None

    def _norm(self, hit: re.Match[str]) -> Axes:
        stem = hit["stem"]
        above = stem.removesuffix("norm.")
        if stem == f"{above}norm." and above in self.attentions:
            return (Symbol(self._scope(above), _ATTENTIONS[self._kind(above)][_OWN_NORM][0]),)
        outer = _OUTER_NORM.fullmatch(stem)
        if outer is not None and stem.endswith("emb_norm.") and self._is_unified(outer["root"]):
            return (self._end_width(outer["root"], "token width"),)
        return (self._width(outer["root"] if outer is not None else self._root_of(stem), stem, "norm"),)

    def _end_width(self, root: str, kind: str) -> Symbol:
        """Return the width of the ends of a model, that of its blocks unless a linear layer is between them."""
        between = {"token width": "emb_linear.weight", "logit width": "head_linear.weight"}
        if f"{root}{between.get(kind, '')}" in self.shapes and kind != "width":
            return Symbol(root, kind)
        return self._width(root, root, "width")

    def _table_of(self, root: str) -> str:
        """Return the path with a table's vocabulary: an encoder without shared embeddings may have a separate one."""
        for pair in self.pairs:
            if root in (pair, f"{pair}decoder.") or (root == f"{pair}encoder." and self.is_whole):
                return pair
        return root


def _axes(kinds: Iterable[str], symbol: Callable[[str], Symbol]) -> Axes:
    """Return the symbols of a tensor's axes, of the kinds that its table has."""
    return tuple(None if kind in ("", "convolved") else 1 if kind == "1" else symbol(kind) for kind in kinds)


def _equal_in(kind: str, usual: Mapping[str, int]) -> dict[str, str]:
    """Return the symbols of attention that equal others.

    Query and context have one width and so have key and value, in groups or not; in linear attention these pairs are
    query and key, value and context. The sizes decide between the two cases.
    """
    if kind == "latent":
        return {"mixed": "values"}
    if kind in ("state space", "selective", "convolution"):
        return {}
    if kind in ("delta", "channel delta"):
        return {"queries": "keys", "mixed": "values", "context": "input"}
    is_linear = usual.get("keys") != usual.get("values") and usual.get("queries") == usual.get("keys")
    equal = {"keys": "queries", "mixed": "values"} if is_linear else {"values": "keys", "mixed": "queries"}
    queries, keys, values, mixed = (usual.get(name, 0) for name in ("queries", "keys", "values", "mixed"))
    if values != keys and queries != keys and mixed * keys == values * queries:
        equal = {}  # as many heads of values as of keys, but of another width
    is_full = usual.get("query norm") == usual.get("queries")
    norms = {"query norm": "queries", "key norm": equal.get("keys", "keys")} if is_full else {}
    return {**equal, "query norm": "head", "key norm": "head", **norms}
