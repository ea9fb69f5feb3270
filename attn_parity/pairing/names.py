"""Parse parameter names: their words, the role of the parameter, and the similarity of two names."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ..sides.subject import Array
from .tensors import Tensor

Key = TypeVar("Key", bound=Hashable)

_SYNONYMS = {
    **dict.fromkeys(("self", "params", "module", "model", "layer", "multi", "head", "einsum"), ""),
    **dict.fromkeys(("attention", "attn", "mha", "selfattention", "selfattn"), "attn"),
    **dict.fromkeys(("ln", "norm", "layernorm", "rmsnorm", "bn", "n"), "norm"),
    **dict.fromkeys(("q", "query", "wq"), "query"),
    **dict.fromkeys(("k", "key", "wk"), "key"),
    **dict.fromkeys(("v", "value", "wv"), "value"),
    **dict.fromkeys(("o", "out", "wo", "output"), "out"),
    **dict.fromkeys(("fc", "linear", "lin", "dense", "f", "w", "ff", "ffn", "ffw", "mlp"), "linear"),
    **dict.fromkeys(("feedforward", "feed"), "linear"),
    **dict.fromkeys(("blocks", "block", "layers", "h", "stack", "encoder", "transformer"), "block"),
    **dict.fromkeys(("emb", "embed", "embedding", "embeddings", "wte", "embedder"), "embed"),
    **dict.fromkeys(("pos", "position", "positional", "positions", "wpe"), "position"),
    **dict.fromkeys(("tok", "token", "tokens", "word"), "token"),
    **dict.fromkeys(("backward", "reverse", "bwd"), "backward"),
    **dict.fromkeys(("c", "to", "proj", "projection", "forward"), ""),
}
"""Word -> its synonym across libraries; "" for words without meaning."""

_NORM = re.compile("(?:batch|group|instance|layer|rms)_?norm", re.IGNORECASE)
"""Classes by which Linen calls norms that have no name."""

_ROLES = {
    **dict.fromkeys(("kernel",), "matrix"),
    **dict.fromkeys(("scale", "gamma"), "scale"),
    **dict.fromkeys(("bias", "shift", "beta", "offset"), "bias"),
    **dict.fromkeys(("embedding", "embeddings"), "embedding"),
    **dict.fromkeys(("running_mean", "mean", "moving_mean"), "mean"),
    **dict.fromkeys(("running_var", "var", "moving_var", "moving_variance", "variance"), "variance"),
}
"""Last word of a name -> what kind of parameter it is, whatever owns it."""

_LAYERS = {"weight", "kernel", "bias", "scale", "w", "b", "W", "gamma", "beta", "offset"}
"""Last words of what stands once in a layer."""

_OPAQUE = re.compile(r"(?:(in_proj|[qkv]_proj)_)?(weight|bias)(?:_(ih|hh|hr|[kv])(?:_l(\d+)(_reverse)?)?)?")
"""The last word of what torch's MultiheadAttention and its recurrent layers hold."""

FUSED = {
    **dict.fromkeys(("c_attn", "qkv", "qkv_proj", "in_proj", "query_key_value", "wqkv", "to_qkv"), "qkv"),
    **dict.fromkeys(("kv", "kv_proj", "key_value", "kv_einsum", "to_kv", "wkv"), "kv"),
    **dict.fromkeys(("gate_up_proj", "gate_up", "gating_einsum", "gating", "wi_fused"), "gateup"),
    **dict.fromkeys(("weight_ih", "dense_i", "ih"), "ih"),
    **dict.fromkeys(("weight_hh", "dense_h", "hh"), "hh"),
}
"""Name of a layer that holds several in one -> the one word for it."""

_SETS = {
    "qkv": ("query", "key", "value"),
    "qkv of two": ("query", "kv"),
    "kv": ("key", "value"),
    "gateup": ("gate", "up"),
    "gateup of Llama": ("w1", "w3"),
    "gateup of T5": ("wi_0", "wi_1"),
    "ih": ("ii", "if", "ig", "io"),
    "hh": ("hi", "hf", "hg", "ho"),
    "ih of three": ("ir", "iz", "in"),
    "hh of three": ("hr", "hz", "hn"),
}
"""Word of a fused layer -> its parts, in the order in which every library stores them."""


_AUTOMATIC = re.compile(r"[A-Z]\w*_")
"""The part before the number in a name that Linen made of a class; it numbers them as they are created."""


_CLASSES = "linear|dense|conv[123]d|embed(ding)?|(batch|group|instance|layer|rms)_norm(alization)?"

_BY_CLASS = re.compile(rf"[A-Z]\w*_[0-9]+|({_CLASSES})(_[0-9]+)?")
"""A layer's name that Linen, Keras or Haiku made of its class: two layers of one class may have either name."""


@dataclasses.dataclass(frozen=True)
class Counter:
    """The siblings that one number of a name counts.

    Attributes:
        word: the word that the number follows; "" where nothing names them, or Linen numbered them by class; `ROOT`.
        sizes: elements below each sibling, in the order of their numbers.
    """

    word: str
    sizes: tuple[int, ...]


ROOT = "(root)"
"""Word of the numbers in a module that holds nothing but a list of modules, such as `nn.Sequential`."""


@dataclasses.dataclass(frozen=True)
class Name:
    """The parsed name of a tensor.

    Attributes:
        literal: all words in lower case, numbers counted from 0, without the wrapper of a whole model.
        words: the words with synonyms replaced, without numbers and words without meaning.
        numbers: the numbers in order; a number without siblings is left out.
        role: the kind of parameter, or "".
        own: the word of the layer itself, as spelled.
        parent: the path above the layer.
        last: the last word, if it names a role.
        layer: path of the layer that contains the tensor.
        natural: key that sorts names in the order of declaration, with numbers in numeric order.
        spelled: the word of the layer itself with its number, as spelled on this side.
        above: words and numbers of the path above the layer, as in `words` and `numbers`.
        counters: for each number with siblings, the siblings that it counts.
        chosen: the words of `words`, and those of `literal`, without names that a library made of a class.
    """

    literal: tuple[str, ...]
    words: tuple[str, ...]
    numbers: tuple[str, ...]
    role: str
    own: str
    parent: str
    last: str
    layer: str = ""
    natural: tuple[tuple[int, int], ...] = ()
    spelled: str = ""
    above: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    counters: tuple[Counter, ...] = ()
    chosen: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def same(self) -> tuple[object, ...]:
        """Key that is equal for equal names."""
        return self.literal, self.role

    @property
    def alike(self) -> tuple[object, ...]:
        """Key that is equal for names with the same meaning."""
        return tuple(word for word in self.words if word != "block"), self.numbers, self.role

    @property
    def numbered(self) -> str:
        """The word of the layer itself if it ends in a number, such as ``wi_0``; else ""."""
        return self.spelled.lower() if re.fullmatch(r"[A-Za-z_]+[0-9]+", self.spelled) else ""

    @property
    def owner(self) -> Name:
        """The name of the module that contains the layer."""
        words, numbers = self.above
        literal = _literal(self.parent)
        return dataclasses.replace(self, literal=literal, words=words, numbers=numbers, spelled="")

    @property
    def fused(self) -> str:
        """The word for the layers that it holds in one, or ""."""
        return FUSED.get(self.own.lower().removesuffix("_l"), "")


def read(tensors: Sequence[Tensor]) -> list[Name]:
    """Parse the names of the tensors of one side."""
    renumbered, counters = _renumbered(tensors)
    order = _declared(renumbered)
    renumbered = _norms_by_place(renumbered)
    return [
        _read(tensor, name, counted, natural)
        for tensor, name, counted, natural in zip(tensors, renumbered, counters, order, strict=True)
    ]


def is_counted_alike(first: Name, second: Name) -> bool:
    """Return whether the numbers in two names count the same things, so that equal numbers mean the same layer.

    A number is an order within a container and a class: torch counts activations in a Sequential, Linen counts each
    class for itself. Two numbers are comparable where both follow a word and the siblings have the same sizes. A name
    that a library made of a class counts its instances, also where there is one.
    """
    if [one.sizes for one in first.counters] != [two.sizes for two in second.counters]:
        return False
    if first.literal == second.literal:
        return True
    if any(one.chosen[1] != one.literal for one in (first, second)):
        return False
    return all(one.word and two.word for one, two in zip(first.counters, second.counters, strict=True))


def _norms_by_place(names: Sequence[str]) -> list[str]:
    """Rename the two norms of a pre-norm layer after the sublayers that follow them.

    `transformers` calls the norm in front of attention ``input_layernorm`` and the norm in front of the feed-forward
    layers ``post_attention_layernorm`` (Llama and its derivatives). Gemma 2 has norms in front of and behind both
    sublayers; its ``post_attention_layernorm`` does follow attention.
    """
    if not any("post_attention_layernorm" in name for name in names):
        return list(names)
    is_sandwich = any("pre_feedforward" in name for name in names)
    first, second = ("pre_attn_norm", "post_attn_norm") if is_sandwich else ("attn_norm", "mlp_norm")
    return [name.replace("input_layernorm", first).replace("post_attention_layernorm", second) for name in names]


def _read(tensor: Tensor, name: str, counters: Sequence[Counter], natural: tuple[tuple[int, int], ...]) -> Name:
    single = [len(counter.sizes) == 1 for counter in counters]
    path, _, last = name.rpartition(".")
    role = role_of(tensor, last, path)
    layer = path if role else name
    which_one = ""  # layer and direction, of which torch holds several side by side
    opaque = _OPAQUE.fullmatch(tensor.spelled.rpartition(".")[2])
    if opaque and any(opaque.groups()[i] for i in (0, 2)):
        of, kind, which, layer_number, reverse = opaque.groups()
        which_one = (f"_{layer_number}" if layer_number not in (None, "0") else "") + (reverse or "")
        own = of or (which if which in "kv" else f"weight_{which}")
        parts = [path, f"{own}{which_one}"]
        layer, last = ".".join(part for part in parts if part), kind
        single = [*single, *[False] * 2]
        fused_own = spelled_own = own
    else:
        fused_own = re.sub(r"_?[0-9]+$", "", layer.rpartition(".")[2])
        spelled_own = (tensor.spelled.rpartition(".")[0] if role else tensor.spelled).rpartition(".")[2]
    parent = layer.rpartition(".")[0]
    key = FUSED.get(fused_own.lower(), "")
    spelled = f"{parent}.{key}" + "_reverse" * ("_reverse" in layer) if key else layer
    words, numbers = _said(spelled, single)
    chosen = [
        ".".join(part for part in re.split(r"[./]", one) if not _BY_CLASS.fullmatch(part)) for one in (spelled, layer)
    ]
    return Name(
        _literal(layer),
        words,
        numbers,
        role,
        fused_own,
        parent,
        last if role else "",
        layer,
        natural,
        spelled_own,
        _said(parent + which_one, single),
        tuple(counter for counter in counters if len(counter.sizes) > 1),
        (_said(chosen[0], ())[0], _literal(chosen[1])),
    )


def _said(path: str, single: Sequence[bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words and the numbers of a path.

    Args:
        path: the path.
        single: for each number, whether it has no siblings; such numbers are left out.
    """
    alone = iter(single)
    words: list[str] = []
    digits: list[str] = []
    for word in _split(_NORM.sub("norm", path)):
        if word.isdigit():
            if not next(alone, False):
                digits.append(word)
        else:
            meaning = _SYNONYMS.get(word, word)
            if meaning and words[-1:] != [meaning]:
                words.append(meaning)
    return tuple(words), tuple(digits)


def _literal(path: str) -> tuple[str, ...]:
    words = [word for word in _split(path) if word not in ("params", "module")]
    while words[:1] == ["model"]:
        words = words[1:]
    return tuple(words)


def _split(text: str) -> list[str]:
    # Numbers, capitals alone (MHA), and words that may begin with one: selfAttn has two words.
    return [word.lower() for word in re.findall(r"[0-9]+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]


def role_of(tensor: Tensor, last: str, path: str) -> str:
    """Return the role that the last word of a name gives a parameter, or ""."""
    opaque = _OPAQUE.fullmatch(last)
    if opaque and (opaque[1] or opaque[3]):
        return "bias" if opaque[2] == "bias" else "matrix"
    if last in _ROLES:
        return _ROLES[last]
    owner, several = tensor.parameter.owner, len(tensor.shape) > 1
    if last == "weight":
        if "Norm" in owner:
            return "scale"
        if "Embed" in owner:
            return "embedding"
        return "matrix" if several else "scale"
    if path and last in ("w", "W", "weights"):
        return "matrix" if several else "scale"
    if path and last == "b":
        return "bias"
    return ""


def last_word(tensor: Tensor) -> str:
    """Return the last word of a name, if it names a role, as `read` does."""
    path, _, last = tensor.spelled.rpartition(".")
    opaque = _OPAQUE.fullmatch(last)
    if opaque and (opaque[1] or opaque[3]):
        return opaque[2]
    return last if role_of(tensor, last, path) else ""


def layer_of(tensor: Tensor) -> str:
    """Return the path of the layer that contains a tensor; "" for part of a tensor and for a tensor outside a layer."""
    if tensor.name.endswith("]") and not tensor.alias:
        return ""
    return tensor.spelled.rpartition(".")[0] if last_word(tensor) in _LAYERS else ""


def _renumbered(tensors: Sequence[Tensor]) -> tuple[list[str], list[list[Counter]]]:
    """Return the names with every number counted from 0 among its siblings, and for each number the siblings.

    Some libraries count from 1, some leave gaps. In a list that alternates matrices and biases, each kind is counted
    separately.
    """
    sizes: dict[str, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    keys: list[list[str]] = []
    for tensor in tensors:
        mine = []
        for number in re.finditer(r"[0-9]+", tensor.spelled):
            key = tensor.spelled[: number.start()]
            if number.end() == len(tensor.spelled) and key[-1:] in ("", "."):
                key += f" of {len(tensor.shape)} axes"
            sizes[key][int(number[0])] += math.prod(tensor.shape)
            mine.append(key)
        keys.append(mine)
    ranks = {key: {number: rank for rank, number in enumerate(sorted(some))} for key, some in sizes.items()}
    counters = {key: _counter(key, some) for key, some in sizes.items()}
    names = []
    for tensor, mine in zip(tensors, keys, strict=True):
        rest = iter(mine)
        names.append(re.sub(r"[0-9]+", lambda hit: str(ranks[next(rest)][int(hit[0])]), tensor.spelled))  # noqa: B023
    return names, [[counters[key] for key in mine] for mine in keys]


def _counter(key: str, sizes: Mapping[int, int]) -> Counter:
    last = key.partition(" of ")[0].removesuffix(".").rpartition(".")[2]
    word = "" if _AUTOMATIC.fullmatch(last) else last.strip("_0123456789")
    word = word if key else ROOT
    return Counter(word, tuple(sizes[number] for number in sorted(sizes)))


def _declared(names: Sequence[str]) -> list[tuple[tuple[int, int], ...]]:
    """Return keys that sort names as they were declared, with numbers in their order."""
    first: dict[str, int] = {}
    keys = []
    for name in names:
        key = []
        for part in re.finditer(r"[0-9]+|[^0-9.]+", name):
            if part[0].isdigit():
                key.append((0, int(part[0])))
            else:
                key.append((first.setdefault(name[: part.end()], len(first)), 0))
        keys.append(tuple(key))
    return keys


def part_word(name: Name) -> tuple[str, tuple[str, ...]]:
    """Return the word that makes a layer part of a fused one, and the words that distinguish it from its namesakes.

    A model without submodules calls its queries ``q1`` and ``q2``, or ``self_q`` and ``cross_q``.
    """
    own = name.spelled.lower().rstrip("_")  # NNX calls a gate if_
    if own in {word for some in _SETS.values() for word in some}:
        return own, ()
    part_words = ("query", "key", "value", "kv", "gate", "up")
    words = [_SYNONYMS.get(word, word) for word in [FUSED.get(own, own), *_split(name.spelled)]]
    part = next((word for word in words if word in part_words), "")
    return part, () if own in FUSED else tuple(word for word in words[1:] if word and word != part)


def part_sets() -> dict[str, tuple[str, ...]]:
    """Return the parts of fused layers, in their order."""
    return _SETS


def likeness(ours: Sequence[Name], theirs: Sequence[Name], *, numbers: bool = True) -> Array:
    """Return the similarity of each pair of names; above 1, the names alone support a match.

    Args:
        ours: names of the first side.
        theirs: names of the second side.
        numbers: whether numbers count, too; otherwise only roles, and words of names that code gives.

    Returns:
        (ours, theirs), float64.
    """
    words_of = [[(name.words, name.literal) if numbers else name.chosen for name in side] for side in (ours, theirs)]
    rarity = collections.Counter(
        word for side in words_of for words, literal in side for word in {*words, *(f"={word}" for word in literal)}
    )
    score = _overlap(*([_weigh(words, rarity) for words, _ in side] for side in words_of))
    literals = [[[f"={word}" for word in literal if not word.isdigit()] for _, literal in side] for side in words_of]
    score += 0.5 * _overlap(*([_weigh(words, rarity) for words in side] for side in literals))
    # Roles that contradict take off 2.0: more than all words (1.0) and literal words (0.5) can add.
    score += _table([name.role for name in ours], [name.role for name in theirs], _roles)
    if numbers:
        score += _table([name.numbers for name in ours], [name.numbers for name in theirs], _number_score)
        score += _table([name.numbered for name in ours], [name.numbered for name in theirs], _same_number)
    return score


def _weigh(words: Iterable[str], rarity: Mapping[str, int]) -> dict[str, float]:
    # A word that every name has, such as `layers`, supports no pair more than another.
    return {word: count / math.sqrt(rarity[word]) for word, count in collections.Counter(words).items()}


def _overlap(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> Array:
    """Return the share of words that each two have in common, a half where neither has any."""
    number = {word: i for i, word in enumerate(dict.fromkeys(word for some in (*ours, *theirs) for word in some))}
    mine, its = (np.zeros((len(side), len(number) + 1)) for side in (ours, theirs))
    for array, side in ((mine, ours), (its, theirs)):
        for row, words in enumerate(side):
            for word, weight in words.items():
                array[row, number[word]] = weight
    # Two weights of a word count as their geometric mean, which is a matrix product.
    roots = np.sqrt(mine), np.sqrt(its)
    # Jaccard's index, the intersection over the union, of weighted words.
    shared = roots[0] @ roots[1].T
    union = mine.sum(1)[:, None] + its.sum(1)[None, :] - shared
    return np.where(union > 0, shared / np.where(union > 0, union, 1.0), 0.5)


def _table(ours: Sequence[Key], theirs: Sequence[Key], value: Callable[[Key, Key], float]) -> Array:
    """Return a function of two keys for each two, computed once for each two different keys."""
    mine, its = list(dict.fromkeys(ours)), list(dict.fromkeys(theirs))
    table = np.array([[value(one, two) for two in its] for one in mine]).reshape(len(mine), len(its))
    rows, columns = ({key: i for i, key in enumerate(some)} for some in (mine, its))
    return table[np.ix_([rows[key] for key in ours], [columns[key] for key in theirs])]


def _number_score(left: tuple[str, ...], right: tuple[str, ...]) -> float:
    """Return how well the numbers in two names agree: 0.5 if equal, 0 if one has none, else from -0.25 to 0.25."""
    if left == right:
        return 0.5
    if not left or not right:
        return 0.0
    # Below 0 for numbers that share less than half: names of other blocks must lose to names without numbers.
    return 0.5 * _in_common(left, right) / max(len(left), len(right)) - 0.25


def _in_common(left: Sequence[str], right: Sequence[str]) -> int:
    """Return how many numbers two have in common, in their order.

    What one side counts alone may be outside, as the stages of a ResNet, or inside, as the layers of a Sequential.
    """
    # The longest common subsequence, by a table of which one row is kept.
    lengths = [0] * (len(right) + 1)
    for x in left:
        before = lengths[:]
        for j, y in enumerate(right):
            lengths[j + 1] = before[j] + 1 if x == y else max(before[j + 1], lengths[j])
    return lengths[-1]


def _same_number(left: str, right: str) -> float:
    return 0.25 if left == right and left else 0.0


def _roles(left: str, right: str) -> float:
    if left and right and left != right:
        return 0.0 if {left, right} <= {"matrix", "embedding"} else -2.0
    return 1.0 if left == right and left else 0.25
