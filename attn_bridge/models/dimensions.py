"""Symbols of sizes that axes of our tensors share: the width, the vocabulary, the heads.

Every layout maps to our names, so a single table of our names checks all of them. In: shapes under our names. Out: the
axis symbols of each tensor. `misfits` compares the sizes.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping

from ..weights.placements import Shape
from .dimension_tables import (
    ATTENTION_KINDS,
    ENDS,
    FEED_FORWARD,
    FROM_QUERY_LATENT,
    OF_BLOCK,
    OWN_NORMS,
    STREAMS,
    Symbol,
)

Axes = tuple[Symbol | int | None, ...]
"""Per axis its symbol, its size if fixed, or None for any size."""


_ENDS = {**ENDS, **OF_BLOCK, **STREAMS}
_STEM = r"(?P<stem>(?:.+\.)?)"


def _leaves(names: Iterable[str]) -> str:
    """Return the pattern of one of the names of tensors below their modules."""
    return rf"(?P<leaf>{'|'.join(map(re.escape, names))})"


_ALL_ATTENTION = sorted({leaf for table in ATTENTION_KINDS.values() for leaf in table} - {"norm.scale"})
_ATTENTION = re.compile(_STEM + _leaves(_ALL_ATTENTION))
_FEED = re.compile(rf"(?P<stem>(?:.+\.)?(?:ff|dense)\.)(?P<part>experts\.[0-9]+\.|shared\.|){_leaves(FEED_FORWARD)}")
_END = re.compile(_STEM + _leaves(ENDS))
_OF_BLOCK = re.compile(rf"{_STEM}trf_blocks\.[0-9]+\.{_leaves(OF_BLOCK)}")
_STREAM = re.compile(rf"{_STEM}{_leaves(STREAMS)}\.[0-9]+\.weight")
_VARIED = (".scalar", ".altup.corrected_scale")
"""Endings of those that blocks of models have whose layers are of several sizes (Gemma 3n and 4)."""
_NORM = re.compile(r"(?P<stem>(?:.+\.)?)(?P<leaf>scale|shift)")
_BLOCK = re.compile(
    r"(?P<root>(?:.+?\.)??)(?:trf_blocks|layers)\.(?P<number>[0-9]+)\."
    r"(?P<part>att|cross_att|linear_att|ff|dense|norm[123]|post_norm[12]|(?:dense|experts|input|laurel)_norm|altup)\."
)
_OUTER_NORM = re.compile(r"(?P<root>(?:.+\.)?)(?:emb|final)_norm\.")


def axes_of(shapes: Mapping[str, Shape], *, is_whole: bool) -> dict[str, Axes]:
    """Return the symbols of our tensors' axes; names of no module of ours are left out.

    Args:
        shapes: our name -> shape.
        is_whole: whether the tensors are one model with one config, whose layers have the same sizes.
    """
    return {name: axes for name, axes in _Symbols(shapes, is_whole).read() if axes is not None}


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

    def read(self) -> Iterator[tuple[str, Axes | None]]:
        for name in self.shapes:
            yield name, self._axes(name)

    def _axes(self, name: str) -> Axes | None:
        patterns = (
            (_ATTENTION, self._attention),
            (_FEED, self._feed),
            *((pattern, self._end) for pattern in (_END, _OF_BLOCK, _STREAM)),
        )
        for pattern, read in patterns:
            hit = pattern.fullmatch(name)
            if hit is not None:
                return read(hit)
        hit = _NORM.fullmatch(name)
        if hit is None:
            return None
        above = hit["stem"].removesuffix("norm.")
        if hit["stem"] == f"{above}norm." and above in self.attentions:
            return (Symbol(self._scope(above), OWN_NORMS[self._kind(above)]),)
        outer = _OUTER_NORM.fullmatch(hit["stem"])
        if outer is not None and hit["stem"].endswith("emb_norm.") and self._is_unified(outer["root"]):
            return (self._end_width(outer["root"], "token width"),)
        root = outer["root"] if outer is not None else self._root_of(hit["stem"])
        return (self._width(root, hit["stem"], "norm"),)

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
        leaves = self.attentions.get(stem, {})
        if "W_latent.weight" in leaves:
            return "latent"
        if "W_step.weight" in leaves:
            return "state space"
        if "W_step_up.weight" in leaves:
            return "selective"
        if "W_decay_up.weight" in leaves:
            return "channel delta"
        if "conv1d.weight" in leaves and "A_log" not in leaves:
            return "convolution"
        return "delta" if leaves.keys() & {"A_log", "conv1d.weight", "dt_bias"} else "plain"

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
                for symbol, size in zip(ATTENTION_KINDS[kind].get(leaf, ()), self.shapes[name], strict=False):
                    sizes[scope][symbol][size] += 1
        symbols = {}
        for scope, kind in kinds.items():
            usual = {symbol: counter.most_common(1)[0][0] for symbol, counter in sizes[scope].items()}
            symbols[scope] = _equal_in(kind, usual)
        return symbols

    def _attention(self, hit: re.Match[str]) -> Axes | None:
        stem, leaf = hit["stem"], hit["leaf"]
        kind, scope, root = self._kind(stem), self._scope(stem), self._root_of(stem)
        symbols = ATTENTION_KINDS[kind].get(leaf)
        if symbols is None:
            return None
        is_cross = stem.endswith("cross_att.")
        through_latent = kind == "latent" and "W_query_latent.weight" in self.attentions[stem]
        axes: list[Symbol | int | None] = []
        for symbol in symbols:
            name = self.equal[scope].get(symbol, symbol)
            if leaf in FROM_QUERY_LATENT and name == "input" and through_latent:
                axes.append(Symbol(scope, "query latent"))
            elif name in ("input", "output") or (name == "context" and not is_cross and self._is_unified(root)):
                axes.append(self._width(root, stem, name))
            elif name == "context" and is_cross and root is not None and self._is_unified(root):
                encoder = f"{root.removesuffix('decoder.')}encoder."
                axes.append(self._width(encoder, stem, name))
            else:
                axes.append(_fixed(name) if name in ("", "1", "convolved") else Symbol(scope, name))
        return tuple(axes)

    # ---- the rest of a model

    def _feed(self, hit: re.Match[str]) -> Axes | None:
        stem, part, leaf = hit["stem"], hit["part"], hit["leaf"]
        root = self._root_of(stem)
        if leaf.startswith("fc") and "fc3.weight" not in self.feeds[stem + part] and not self._is_unified(root):
            return None  # no module of ours: gates have three matrices
        kind = "expert" if part.startswith("experts.") else "shared" if part else "hidden"
        axes: list[Symbol | int | None] = []
        for symbol in FEED_FORWARD[leaf]:
            if symbol == "input":
                axes.append(self._width(root, stem, symbol))
            elif symbol == "1":
                axes.append(1)
            else:
                axes.append(Symbol(self._scope(stem), kind if symbol == "hidden" else symbol))
        return tuple(axes)

    def _end(self, hit: re.Match[str]) -> Axes | None:
        root, leaf = hit["stem"], hit["leaf"]
        if not self._is_unified(root):
            return None
        axes: list[Symbol | int | None] = []
        for symbol in _ENDS[leaf]:
            if symbol in ("width", "token width", "logit width"):
                axes.append(self._end_width(root, symbol))
            elif symbol in ("", "1"):
                axes.append(_fixed(symbol))
            else:
                axes.append(Symbol(self._table_of(root) if symbol == "vocab" else root, symbol))
        return tuple(axes)

    def _end_width(self, root: str, symbol: str) -> Symbol:
        """Return the width of the ends of a model, that of its blocks unless a linear layer is between them."""
        between = {"token width": "emb_linear.weight", "logit width": "head_linear.weight"}
        if f"{root}{between.get(symbol, '')}" in self.shapes and symbol != "width":
            return Symbol(root, symbol)
        return self._width(root, root, "width")

    def _table_of(self, root: str) -> str:
        """Return the path with a table's vocabulary: an encoder without shared embeddings may have a separate one."""
        for pair in self.pairs:
            if root in (pair, f"{pair}decoder.") or (root == f"{pair}encoder." and self.is_whole):
                return pair
        return root


def _fixed(symbol: str) -> int | None:
    return 1 if symbol == "1" else None


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
