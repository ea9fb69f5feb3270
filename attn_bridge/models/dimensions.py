"""Symbols of sizes that axes of our tensors share: the width, the vocabulary, the heads.

Every layout maps to our names, so a single table of our names checks all of them. In: shapes under our names. Out: the
axis symbols of each tensor. `misfits` compares the sizes.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

from ..weights.placements import Shape


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

WORDS = {
    "width": "width of the model",
    "input": "width of the input",
    "context": "width of the context",
    "output": "width of the output",
    "vocab": "number of tokens",
    "positions": "number of positions",
    "types": "number of token types",
    "hidden": "width of the feed-forward layers",
    "expert": "width of an expert",
    "shared": "width of the shared expert",
    "experts": "number of experts",
    "queries": "width of all query heads",
    "keys": "width of all key heads",
    "values": "width of all value heads",
    "head": "width of a head",
    "heads": "number of heads",
    "value head": "width of a value head",
    "query latent": "width of the latent of queries",
    "latent": "width of the latent of keys and values",
    "gate latent": "width of the latent of gates",
    "decay latent": "width of the latent of decays",
    "index queries": "width of all heads of the indexer",
    "index key": "width of a head of the indexer",
    "index heads": "number of heads of the indexer",
    "rotary": "number of rotary channels",
    "norm": "width of the norm",
    "channels": "number of channels of the convolution",
    "state": "width of the state of a channel",
    "step latent": "width of the latent of steps",
    "layer vocab": "number of tokens with per-layer embeddings",
    "layer parts": "width of the per-layer embeddings of all layers",
    "layer part": "width of the per-layer embedding of a layer",
    "laurel": "rank of LAuReL",
    "streams": "number of streams",
    "coefficients": "number of coefficients of streams",
}
"""Kind of a symbol -> its name in messages."""

# Symbols of attention by what the tensor is called below its module. "input", "context" and "output" are the width of
# the model in a block of one. Which of "queries", "keys" and "values" are equal depends on the kind of attention.
_PLAIN: dict[str, tuple[str, ...]] = {
    "W_query.weight": ("queries", "input"),
    "W_key.weight": ("keys", "context"),
    "W_value.weight": ("values", "context"),
    "W_gate.weight": ("queries", "input"),
    "W_head_gate.weight": ("heads", "input"),
    "W_head_gate.bias": ("heads",),
    "W_query.bias": ("queries",),
    "W_key.bias": ("keys",),
    "W_value.bias": ("values",),
    "W_gate.bias": ("queries",),
    "W_query": ("input", "queries"),
    "W_key": ("context", "keys"),
    "W_value": ("context", "values"),
    "out_proj.weight": ("output", "mixed"),
    "out_proj.bias": ("output",),
    "q_norm.scale": ("query norm",),
    "k_norm.scale": ("key norm",),
    "q_norm.shift": ("query norm",),
    "k_norm.shift": ("key norm",),
    "sinks": ("heads",),
    "relative_bias": ("", "heads"),
    **{f"lambda_{letter}{number}": ("head",) for letter in "qk" for number in (1, 2)},
}
_LATENT: dict[str, tuple[str, ...]] = {
    **_PLAIN,
    "W_query_latent.weight": ("query latent", "input"),
    "W_query_latent.bias": ("query latent",),
    "query_norm.scale": ("query latent",),
    "W_latent.weight": ("latent", "input"),
    "W_latent.bias": ("latent",),
    "latent_norm.scale": ("latent",),
    "W_key_rope.weight": ("rotary", "input"),
    "W_key_rope.bias": ("rotary",),
    "W_key.weight": ("keys", "latent"),
    "W_value.weight": ("values", "latent"),
    "indexer.W_index_query.weight": ("index queries", "input"),
    "indexer.W_index_key.weight": ("index key", "input"),
    "indexer.key_norm.scale": ("index key",),
    "indexer.key_norm.shift": ("index key",),
    "indexer.W_index_weights.weight": ("index heads", "input"),
}
_FROM_QUERY_LATENT = {"W_query.weight", "indexer.W_index_query.weight"}
"""Leaves of latent attention whose input is the latent of queries where there is one."""

_DELTA: dict[str, tuple[str, ...]] = {
    **_PLAIN,
    "W_gate.weight": ("values", "input"),
    "W_beta.weight": ("heads", "input"),
    "W_alpha.weight": ("heads", "input"),
    "dt_bias": ("heads",),
    "A_log": ("heads",),
    "conv1d.weight": ("convolved", "1", ""),
    "norm.scale": ("value head",),
}
_CHANNEL_DELTA: dict[str, tuple[str, ...]] = {
    **_PLAIN,
    "W_beta.weight": ("heads", "input"),
    "W_decay_down.weight": ("decay latent", "input"),
    "W_decay_up.weight": ("keys", "decay latent"),
    "W_gate_down.weight": ("gate latent", "input"),
    "W_gate_up.weight": ("values", "gate latent"),
    "dt_bias": ("keys",),
    "A_log": ("heads",),
    "conv1d.weight": ("convolved", "1", ""),
    "norm.scale": ("value head",),
}
_STATE_SPACE: dict[str, tuple[str, ...]] = {
    **{f"{name}.weight": ("values", "input") for name in ("W_gate", "W_value")},
    **{f"{name}.bias": ("values",) for name in ("W_gate", "W_value")},
    **{f"{name}.weight": ("keys", "input") for name in ("W_key", "W_query")},
    **{f"{name}.bias": ("keys",) for name in ("W_key", "W_query")},
    "W_step.weight": ("heads", "input"),
    "W_step.bias": ("heads",),
    "dt_bias": ("heads",),
    "A_log": ("heads",),
    "D": ("heads",),
    "conv1d.weight": ("channels", "1", ""),
    "conv1d.bias": ("channels",),
    "norm.scale": ("values",),
    "out_proj.weight": ("output", "values"),
    "out_proj.bias": ("output",),
}
_CONVOLUTION: dict[str, tuple[str, ...]] = {
    **{f"{name}.weight": ("channels", "input") for name in ("W_query", "W_key", "W_value")},
    **{f"{name}.bias": ("channels",) for name in ("W_query", "W_key", "W_value")},
    "conv1d.weight": ("channels", "1", ""),
    "conv1d.bias": ("channels",),
    "out_proj.weight": ("output", "channels"),
    "out_proj.bias": ("output",),
}
_SELECTIVE: dict[str, tuple[str, ...]] = {
    **{f"{name}.weight": ("values", "input") for name in ("W_gate", "W_value")},
    **{f"{name}.bias": ("values",) for name in ("W_gate", "W_value")},
    "W_step_down.weight": ("step latent", "values"),
    **{f"{name}.weight": ("state", "values") for name in ("W_key", "W_query")},
    **{f"{name}_norm.scale": ("state",) for name in ("k", "q")},
    "step_norm.scale": ("step latent",),
    "W_step_up.weight": ("values", "step latent"),
    "dt_bias": ("values",),
    "A_log": ("values", "state"),
    "D": ("values",),
    "conv1d.weight": ("values", "1", ""),
    "conv1d.bias": ("values",),
    "out_proj.weight": ("output", "values"),
    "out_proj.bias": ("output",),
}
_KINDS = {
    "plain": _PLAIN,
    "latent": _LATENT,
    "delta": _DELTA,
    "channel delta": _CHANNEL_DELTA,
    "state space": _STATE_SPACE,
    "selective": _SELECTIVE,
    "convolution": _CONVOLUTION,
}
_OWN_NORMS = {
    "plain": "queries",
    "latent": "values",
    "delta": "value head",
    "channel delta": "value head",
    "state space": "values",
    "selective": "values",
    "convolution": "channels",
}
"""Kind of attention -> the symbol of its norm's size."""

_FEED_FORWARD: dict[str, tuple[str, ...]] = {
    "layers.0.weight": ("hidden", "input"),
    "layers.0.bias": ("hidden",),
    "layers.1.alpha_p": ("1",),
    "layers.1.alpha_n": ("1",),
    "layers.1.beta": (),
    "layers.1.eps": (),
    "layers.2.weight": ("input", "hidden"),
    "layers.2.bias": ("input",),
    **{f"fc{number}.weight": ("hidden", "input") for number in (1, 2)},
    **{f"fc{number}.bias": ("hidden",) for number in (1, 2)},
    "fc3.weight": ("input", "hidden"),
    "fc3.bias": ("input",),
    "router.weight": ("experts", "input"),
    "router.bias": ("experts",),
    "router.correction_bias": ("experts",),
    "router.expert_scale": ("experts",),
    "shared_gate.weight": ("1", "input"),
    "shared_gate.bias": ("1",),
}

_ENDS: dict[str, tuple[str, ...]] = {
    "tok_emb.weight": ("vocab", "width"),
    "pos_emb.weight": ("positions", "width"),
    "type_emb.weight": ("types", "width"),
    "out_head.weight": ("vocab", "width"),
    "out_head.bias": ("vocab",),
    "logits_bias": ("1", "vocab"),
    "out_bias": ("vocab",),
    "layer_emb.weight": ("layer vocab", "layer parts"),
    "layer_linear.weight": ("layer parts", "width"),
    "layer_norm.scale": ("layer part",),
    "head_linear.weight": ("width", "width"),
    "head_linear.bias": ("width",),
    "conv1.weight": ("width", "", ""),
    "conv1.bias": ("width",),
    "conv2.weight": ("width", "width", ""),
    "conv2.bias": ("width",),
}
"""Parameters in front of the blocks of a model and after them, except norms."""

_ALL_ATTENTION = sorted({leaf for table in _KINDS.values() for leaf in table} - {"norm.scale"})
_ATTENTION = re.compile(rf"(?P<stem>(?:.+\.)?)(?P<leaf>{'|'.join(map(re.escape, _ALL_ATTENTION))})")
_FEED = re.compile(
    r"(?P<stem>(?:.+\.)?(?:ff|dense)\.)(?P<part>experts\.[0-9]+\.|shared\.|)"
    rf"(?P<leaf>{'|'.join(map(re.escape, _FEED_FORWARD))})"
)
_END = re.compile(rf"(?P<stem>(?:.+\.)?)(?P<leaf>{'|'.join(map(re.escape, _ENDS))})")
_LAYER_INPUT = re.compile(
    r"(?P<root>(?:.+\.)?)trf_blocks\.(?P<number>[0-9]+)\.(?P<leaf>layer_gate\.weight|layer_proj\.weight|scalar"
    r"|laurel_(?:down|up)\.weight|altup\.(?:corrected_scale|(?:correction|prediction|stream_router)\.weight))"
)
"""Parameters that are a block's own."""
_STREAM = re.compile(r"(?P<root>(?:.+\.)?)stream_(?:in|out)\.[0-9]+\.weight")
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
            elif name.endswith(_VARIED) and (own := _LAYER_INPUT.fullmatch(name)) is not None:
                self.varied.add(own["root"])
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
            (_END, self._end),
            (_LAYER_INPUT, self._layer_input),
            (_STREAM, self._stream),
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
            return (Symbol(self._scope(above), _OWN_NORMS[self._kind(above)]),)
        outer = _OUTER_NORM.fullmatch(hit["stem"])
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

    def _scope(self, stem: str, part: str = "") -> str:
        """Return the scope of sizes within a module: itself, or all modules of that name where layers are alike."""
        block = _BLOCK.match(stem)
        if block is None or not self.is_whole or block["root"] in self.varied:
            return stem
        return f"{block['root']}trf_blocks.*.{block['part']}.{part}"

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
                for symbol, size in zip(_KINDS[kind].get(leaf, ()), self.shapes[name], strict=False):
                    sizes[scope][symbol][size] += 1
        symbols = {}
        for scope, kind in kinds.items():
            usual = {symbol: counter.most_common(1)[0][0] for symbol, counter in sizes[scope].items()}
            symbols[scope] = _equal_in(kind, usual)
        return symbols

    def _attention(self, hit: re.Match[str]) -> Axes | None:
        stem, leaf = hit["stem"], hit["leaf"]
        kind, scope, root = self._kind(stem), self._scope(stem), self._root_of(stem)
        symbols = _KINDS[kind].get(leaf)
        if symbols is None:
            return None
        is_cross = stem.endswith("cross_att.")
        through_latent = kind == "latent" and "W_query_latent.weight" in self.attentions[stem]
        axes: list[Symbol | int | None] = []
        for symbol in symbols:
            name = self.equal[scope].get(symbol, symbol)
            if leaf in _FROM_QUERY_LATENT and name == "input" and through_latent:
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
        for symbol in _FEED_FORWARD[leaf]:
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
            if symbol == "width":
                axes.append(self._width(root, root, symbol))
            elif symbol in ("", "1"):
                axes.append(_fixed(symbol))
            else:
                axes.append(Symbol(self._table_of(root) if symbol == "vocab" else root, symbol))
        return tuple(axes)

    def _layer_input(self, hit: re.Match[str]) -> Axes | None:
        root = hit["root"]
        if not self._is_unified(root):
            return None
        width, part, rank = Symbol(root, "width"), Symbol(root, "layer part"), Symbol(root, "laurel")
        streams, coefficients = Symbol(root, "streams"), Symbol(root, "coefficients")
        axes: dict[str, Axes] = {
            "layer_gate.weight": (part, width),
            "layer_proj.weight": (width, part),
            "scalar": (1,),
            "laurel_down.weight": (rank, width),
            "laurel_up.weight": (width, rank),
            "altup.corrected_scale": (width,),
            "altup.correction.weight": (streams, streams),
            "altup.prediction.weight": (coefficients, streams),
            "altup.stream_router.weight": (streams, width),
        }
        return axes[hit["leaf"]]

    def _stream(self, hit: re.Match[str]) -> Axes | None:
        width = Symbol(hit["root"], "width")
        return (width, width) if self._is_unified(hit["root"]) else None

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
    is_full = usual.get("query norm") == usual.get("queries")
    norms = {"query norm": "queries", "key norm": equal.get("keys", "keys")} if is_full else {}
    return {**equal, "query norm": "head", "key norm": "head", **norms}
