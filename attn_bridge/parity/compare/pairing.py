"""Which parameter of one side is which of the other: a bijection, proposed from names, shapes and classes, or refused.

A proposal is never a silent guess. Every pair says what settled it; what names and shapes leave open (two square
matrices) is settled by running both sides with weights that are all different, or refused with the candidates listed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...weights import Rule, Rules, Side, WeightsMismatchError
from .report import Pair
from .subject import Array, Arrays, Parameter

MOST_CANDIDATES = 256
"""Most pairings that are tried out before the choice is left to the user."""

_MARGIN = 0.15
"""By how much names must speak for one pairing over another to settle it."""

_SYNONYMS = {
    **dict.fromkeys(("self", "params", "module", "model", "layernorm", "layer", "multi", "head"), ""),
    **dict.fromkeys(("attention", "attn", "mha", "selfattention", "selfattn"), "attn"),
    **dict.fromkeys(("ln", "norm", "layernorm", "rmsnorm", "bn", "n"), "norm"),
    **dict.fromkeys(("q", "query", "wq"), "query"),
    **dict.fromkeys(("k", "key", "wk"), "key"),
    **dict.fromkeys(("v", "value", "wv"), "value"),
    **dict.fromkeys(("o", "out", "wo", "output"), "out"),
    **dict.fromkeys(("fc", "linear", "lin", "dense", "f", "w", "ff", "ffn", "mlp", "feedforward"), "linear"),
    **dict.fromkeys(("blocks", "block", "layers", "h", "stack", "encoder", "transformer"), "block"),
    **dict.fromkeys(("emb", "embed", "embedding", "embeddings", "wte", "embedder"), "embed"),
    **dict.fromkeys(("pos", "position", "positional", "positions", "wpe"), "position"),
    **dict.fromkeys(("tok", "token", "tokens", "word"), "token"),
    **dict.fromkeys(("c", "to", "proj", "projection"), ""),
}
"""Words of names that mean the same in different libraries; "" says nothing."""

_ROLES = {
    **dict.fromkeys(("kernel",), "matrix"),
    **dict.fromkeys(("scale", "gamma"), "scale"),
    **dict.fromkeys(("bias", "shift", "beta"), "bias"),
    **dict.fromkeys(("embedding",), "embedding"),
    **dict.fromkeys(("running_mean", "mean"), "mean"),
    **dict.fromkeys(("running_var", "var"), "variance"),
}
"""Last word of a name -> what kind of parameter it is, whatever owns it."""

_LINEAR = {"Linear", "NonDynamicallyQuantizableLinear", "LinearGeneral", "Dense", "DenseGeneral", "LoRALinear"}
_CONVOLUTION = re.compile(r"^(Lazy)?Conv[123]?d?$")
_FUSED = {"in_proj_weight": ("matrix", ""), "in_proj_bias": ("bias", "")}
_PARTS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A parameter, or one of equal parts along its first torch axis (the last Flax axis), under a name of its own."""

    name: str
    source: str
    shape: tuple[int, ...]
    parameter: Parameter
    part: tuple[int, int] | None = None

    def take(self, arrays: Mapping[str, Array], side: Side) -> Array:
        """Return this tensor's elements from arrays by parameter name."""
        array = arrays[self.source]
        if self.part is None:
            return array
        position, parts = self.part
        return np.split(array, parts, axis=0 if side == "torch" else -1)[position]


@dataclasses.dataclass(frozen=True)
class Match:
    """One tensor on both sides, the rule between them, and what settled it."""

    torch: Tensor
    flax: Tensor
    rule: Rule
    how: str


@dataclasses.dataclass(frozen=True)
class Pairing:
    """A bijection between the parameters of both sides."""

    matches: tuple[Match, ...]

    def to_flax(self, arrays: Mapping[str, Array]) -> Arrays:
        """Convert torch weights by parameter name to Flax weights by parameter name."""
        return self._convert(arrays, "torch")

    def to_torch(self, arrays: Mapping[str, Array]) -> Arrays:
        """Convert Flax weights by parameter name to torch weights by parameter name."""
        return self._convert(arrays, "flax")

    def aligned(self, arrays: Mapping[str, Array], side: Side) -> dict[str, Array]:
        """Return arrays of one side (weights or gradients) per pair, under torch names and with torch axes."""
        found = {}
        for match in self.matches:
            tensor = match.torch if side == "torch" else match.flax
            if tensor.source in arrays:
                array = tensor.take(arrays, side)
                found[match.torch.name] = array if side == "torch" else match.rule.convert(array, "flax")
        return found

    def rows(self) -> list[Pair]:
        """Return the pairs for a report."""
        return [Pair(match.torch.name, match.flax.name, match.rule.pattern, match.how) for match in self.matches]

    def _convert(self, arrays: Mapping[str, Array], source: Side) -> Arrays:
        parts: dict[str, dict[int, Array]] = collections.defaultdict(dict)
        counts: dict[str, int] = {}
        for match in self.matches:
            here, there = (match.torch, match.flax) if source == "torch" else (match.flax, match.torch)
            position, counts[there.source] = there.part or (0, 1)
            parts[there.source][position] = match.rule.convert(here.take(arrays, source), source)
        axis = -1 if source == "torch" else 0
        return {
            name: np.asarray(
                found[0] if counts[name] == 1 else np.concatenate([found[i] for i in sorted(found)], axis=axis),
                order="C",
            )
            for name, found in parts.items()
        }


def from_rules(
    rules: Rules | Iterable[Rule], torch: Mapping[str, Parameter], flax: Mapping[str, Parameter], how: str = "rules"
) -> Pairing:
    """Return the pairing that rules say.

    Raises:
        WeightsMismatchError: lists every parameter that they miss, lack or misshape.
    """
    rules = rules if isinstance(rules, Rules) else Rules(rules)
    pairs, missing, unexpected = rules.pair(torch, "torch")
    targets = {other for _, other in pairs.values()}
    missing += [name for name in flax if name not in targets]
    unexpected += [name for name in targets if name not in flax]
    misshapen, matches = [], []
    for name, (rule, other) in pairs.items():
        if other not in flax:
            continue
        try:
            shape = rule.convert_shape(torch[name].shape, "torch")
        except ValueError as error:
            misshapen.append(f"{name}: {error}")
            continue
        if shape != flax[other].shape:
            misshapen.append(f"{other}: expected {flax[other].shape}, the rules give {shape}")
        concrete = Rule(name, other, rule.pattern, **rule.sizes)
        matches.append(Match(_whole(name, torch[name]), _whole(other, flax[other]), concrete, how))
    if missing or unexpected or misshapen:
        raise WeightsMismatchError(missing, unexpected, misshapen)
    return Pairing(tuple(matches))


def propose(
    torch: Mapping[str, Parameter],
    flax: Mapping[str, Parameter],
    probe: Callable[[Pairing], float] | None = None,
) -> Pairing:
    """Return the pairing that names, classes and shapes suggest.

    Args:
        torch: parameters of the torch side.
        flax: parameters of the Flax side.
        probe: returns how far apart the outputs are when both sides hold the same, all different weights by a pairing;
            it decides between pairings that are left open.

    Raises:
        WeightsMismatchError: there is no bijection; lists what is left over.
        ValueError: several pairings are left open; lists them.
    """
    ours, theirs = _tensors(torch, flax)
    if len(ours) != len(theirs):
        raise _no_bijection(ours, theirs)
    scores, patterns = _scores(ours, theirs)
    assignment = _assign(scores)
    if assignment is None:
        raise _no_bijection(ours, theirs)
    groups = _open_groups(scores, assignment)
    chosen = [patterns[i, j] for i, j in enumerate(assignment)]
    open_patterns = collections.defaultdict(list)
    for i, found in enumerate(chosen):
        if len(found) > 1 and not any(i in group for group in groups):
            open_patterns[_template(ours[i].name), _template(theirs[assignment[i]].name)].append(i)
    if not groups and not open_patterns:
        return Pairing(
            tuple(
                _match(ours[i], theirs[j], patterns[i, j][0], "names" if scores[i][j] > 1.0 else "shapes")
                for i, j in enumerate(assignment)
            )
        )
    candidates = _candidates(ours, theirs, scores, patterns, assignment, groups, open_patterns)
    names = [ours[i].name for group in groups for i in group]
    names += [ours[i].name for found in open_patterns.values() for i in found]
    is_convention = not groups and all(
        ours[i].parameter.owner in _LINEAR and ours[i].source.endswith("weight")
        for found in open_patterns.values()
        for i in found
    )
    return _decide(candidates, probe, names, convention=is_convention)


def _decide(
    candidates: list[Pairing], probe: Callable[[Pairing], float] | None, open_names: list[str], *, convention: bool
) -> Pairing:
    """Return the one candidate under which the outputs agree.

    Where none does, the two sides differ whatever the pairing; if all that is open is which way round the matrices of
    torch's linear layers lie, the first candidate (transposed, as kernels are) goes on, to find out where they differ.
    """
    listed = "; ".join(dict.fromkeys(_describe(candidate, open_names) for candidate in candidates[:4]))
    more = f"; and {len(candidates) - 4} more" if len(candidates) > 4 else ""
    if probe is None or len(candidates) > MOST_CANDIDATES:
        raise ValueError(f"the pairing of parameters is ambiguous, give rules; candidates: {listed}{more}")
    found = []
    for candidate in candidates:
        apart = probe(candidate)
        if apart < 1e-9:
            found.append(candidate)
    if len(found) == 1:
        return found[0]
    if not found and convention:
        matches = candidates[0].matches
        return Pairing(tuple(dataclasses.replace(m, how="convention" if m.how == "probe" else m.how) for m in matches))
    what = "none makes the outputs agree" if not found else f"{len(found)} make the outputs agree"
    raise ValueError(f"the pairing of parameters is ambiguous and {what}, give rules; candidates: {listed}{more}")


def _describe(pairing: Pairing, names: Sequence[str]) -> str:
    rows = [match for match in pairing.matches if match.torch.name in names][:4]
    return ", ".join(f"{match.torch.name} = {match.flax.name} ({match.rule.pattern})" for match in rows)


def _no_bijection(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> WeightsMismatchError:
    """Name what is left when whatever can be paired is."""
    scores, _ = _scores(ours, theirs)
    left, right = set(range(len(ours))), set(range(len(theirs)))
    for _, i, j in sorted(
        ((scores[i][j], i, j) for i in left for j in right if scores[i][j] > -math.inf), reverse=True
    ):
        if i in left and j in right:
            left.remove(i)
            right.remove(j)
    return WeightsMismatchError(
        missing=[f"{theirs[j].name} {theirs[j].shape} (Flax, no torch parameter left for it)" for j in right],
        unexpected=[f"{ours[i].name} {ours[i].shape} (torch, no Flax parameter left for it)" for i in left],
    )


# ---- tensors


def _whole(name: str, parameter: Parameter) -> Tensor:
    return Tensor(name, name, parameter.shape, parameter)


def _tensors(torch: Mapping[str, Parameter], flax: Mapping[str, Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of both sides; a fused query, key, value is taken apart where the other side has it apart."""
    return _apart(torch, flax, "torch"), _apart(flax, torch, "flax")


def _apart(mine: Mapping[str, Parameter], others: Mapping[str, Parameter], side: Side) -> list[Tensor]:
    sizes = collections.Counter(math.prod(one.shape) for one in others.values())
    both_fused = any(_is_fused(name) for name in others)
    found = []
    for name, parameter in mine.items():
        whole = math.prod(parameter.shape)
        axis = 0 if side == "torch" else -1
        third = parameter.shape and parameter.shape[axis] % 3 == 0
        if both_fused or not (_is_fused(name) and third and sizes[whole // 3] >= 3):
            found.append(_whole(name, parameter))
            continue
        shape = list(parameter.shape)
        shape[axis] //= 3
        for position, part in enumerate(_PARTS):
            found.append(Tensor(f"{name}[{part}]", name, tuple(shape), parameter, (position, 3)))
    return found


def _is_fused(name: str) -> bool:
    """Tell whether a name is that of query, key and value in one tensor."""
    fused = r"(^|[._])(c_attn|qkv|qkv_proj|in_proj|query_key_value|Wqkv)([._]|$)"
    return name.rpartition(".")[2] in _FUSED or re.search(fused, name) is not None


def _renumbered(tensors: Sequence[Tensor]) -> list[str]:
    """Return the names with every number counted from 0 among its siblings: some count from 1, some leave gaps."""
    found: dict[str, set[int]] = collections.defaultdict(set)
    for tensor in tensors:
        for number in re.finditer(r"[0-9]+", tensor.source):
            found[tensor.source[: number.start()]].add(int(number[0]))
    ranks = {prefix: {number: rank for rank, number in enumerate(sorted(some))} for prefix, some in found.items()}
    return [
        re.sub(r"[0-9]+", lambda number: str(ranks[number.string[: number.start()]][int(number[0])]), tensor.source)
        for tensor in tensors
    ]


def _words(tensor: Tensor, name: str) -> tuple[list[str], str]:
    """Return the words of a name that mean something, and the role of the parameter."""
    path, _, last = name.rpartition(".")
    role = _role(tensor.source.rpartition(".")[2], tensor)
    words = path if role not in ("", None) else name
    if last in _FUSED or re.fullmatch(r"[qkv]_proj_weight|bias_[kv]", last):
        words = name.replace("in_proj_weight", "").replace("in_proj_bias", "")
        words = words.removesuffix("weight")
    if tensor.part is not None:
        words = f"{re.sub(r'(c_attn|qkv_proj|qkv|in_proj|query_key_value|Wqkv)', '', words)}.{_PARTS[tensor.part[0]]}"
    found = re.findall(r"[0-9]+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+", words)
    return [word for word in (_SYNONYMS.get(word.lower(), word.lower()) for word in found) if word], role


def _role(last: str, tensor: Tensor) -> str:
    if last in _FUSED:
        return _FUSED[last][0]
    if last in _ROLES:
        return _ROLES[last]
    owner = tensor.parameter.owner
    if last == "weight":
        if "Norm" in owner:
            return "scale"
        if "Embed" in owner:
            return "embedding"
        return "matrix" if len(tensor.shape) > 1 else "scale"
    return ""


def _template(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


# ---- scores


def _scores(
    ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> tuple[list[list[float]], dict[tuple[int, int], list[tuple[str, dict[str, int]]]]]:
    """Return how well each two fit by name (-inf: not by shape), and the patterns that fit."""
    our_words, their_words = (list(map(_words, side, _renumbered(side))) for side in (ours, theirs))
    rarity = collections.Counter(word for words, _ in (*our_words, *their_words) for word in set(words))
    patterns = {}
    scores = []
    for i, one in enumerate(ours):
        row = []
        for j, two in enumerate(theirs):
            found = _patterns(one, two) if math.prod(one.shape) == math.prod(two.shape) else []
            patterns[i, j] = found
            row.append(_similarity(our_words[i], their_words[j], rarity) if found else -math.inf)
        scores.append(row)
    return scores, patterns


def _similarity(one: tuple[list[str], str], two: tuple[list[str], str], rarity: Mapping[str, int]) -> float:
    (words, role), (others, other_role) = one, two
    if role and other_role and role != other_role:
        return -1.0
    a, b = (collections.Counter(word for word in found if not word.isdigit()) for found in (words, others))
    shared, union = (
        sum(count / math.sqrt(rarity[word]) for word, count in counter.items()) for counter in (a & b, a | b)
    )
    score = shared / union if union else 0.5
    digits, other_digits = [[word for word in found if word.isdigit()] for found in (words, others)]
    if digits == other_digits:
        score += 0.5
    elif digits and other_digits:
        same = sum(x == y for x, y in zip(digits, other_digits, strict=False))
        score += 0.5 * same / max(len(digits), len(other_digits)) - 0.25
    return score + (1.0 if role == other_role and role else 0.25)


def _patterns(one: Tensor, two: Tensor) -> list[tuple[str, dict[str, int]]]:
    """Return the einops patterns (with sizes) that take the torch axes to the Flax axes."""
    torch, flax = one.shape, two.shape
    linear = one.parameter.owner in {*_LINEAR, "MultiheadAttention"} and two.parameter.owner in _LINEAR
    if len(torch) == 2 and linear and two.source.rpartition(".")[2] == "kernel":
        return _grouped(torch, flax, transposed=True)
    if _CONVOLUTION.match(one.parameter.owner) and _CONVOLUTION.match(two.parameter.owner) and len(torch) > 2:
        space = " ".join("xyz"[: len(torch) - 2])
        fits = flax == (*torch[2:], torch[1], torch[0])
        return [(f"o i {space} -> {space} i o", {})] if fits else []
    if len(torch) == 2 and one.parameter.owner in _LINEAR and one.source.endswith("weight"):
        found = _grouped(torch, flax, transposed=True)
        return found + [pattern for pattern in _grouped(torch, flax, transposed=False) if pattern not in found]
    conventional = "Embed" in one.parameter.owner or "Norm" in one.parameter.owner
    found = _grouped(torch, flax, transposed=False)
    if len(torch) >= 2 and not conventional:
        found += [pattern for pattern in _grouped(torch, flax, transposed=True) if pattern not in found]
    return found


def _grouped(torch: tuple[int, ...], flax: tuple[int, ...], *, transposed: bool) -> list[tuple[str, dict[str, int]]]:
    """Return the pattern between axes and groups of axes, in the same order or with the two ends exchanged."""
    if torch == flax and not transposed:
        return [("... -> ...", {})]
    if len(torch) == 1:
        axes = [f"a{i}" for i in range(len(flax))]
        return [(f"({' '.join(axes)}) -> {' '.join(axes)}", dict(zip(axes, flax, strict=True)))]
    if len(flax) == 1 and len(torch) > 1:
        axes = [f"a{i}" for i in range(len(torch))]
        return [(f"{' '.join(axes)} -> ({' '.join(axes)})", dict(zip(axes, torch, strict=True)))]
    if len(torch) != 2:
        if transposed and len(torch) == len(flax) and torch[::-1] == flax:
            axes = [f"a{i}" for i in range(len(torch))]
            return [(f"{' '.join(axes)} -> {' '.join(reversed(axes))}", {})]
        return []
    found = []
    rows, columns = torch
    for cut in range(1, len(flax)):
        head, tail = flax[:cut], flax[cut:]
        first, second = (columns, rows) if transposed else (rows, columns)
        if math.prod(head) != first or math.prod(tail) != second:
            continue
        names = [f"a{i}" for i in range(len(flax))]
        sizes = dict(zip(names, flax, strict=True))
        left, right = _group(names[:cut]), _group(names[cut:])
        known = {name: sizes[name] for part in (names[:cut], names[cut:]) if len(part) > 1 for name in part}
        torch_axes = f"{right} {left}" if transposed else f"{left} {right}"
        found.append((f"{torch_axes} -> {' '.join(names)}", known))
    return found[:1]


def _group(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


# ---- assignment


def _assign(scores: list[list[float]]) -> list[int] | None:
    """Return, per torch tensor, the Flax tensor of the best bijection; None if there is none."""
    if not scores:
        return []
    from scipy.optimize import linear_sum_assignment  # JAX brings scipy

    array = np.array(scores)
    cost = np.where(np.isfinite(array), -array, 1e6)
    rows, columns = linear_sum_assignment(cost)
    if not np.isfinite(array[rows, columns]).all():
        return None
    return [int(column) for column in columns[np.argsort(rows)]]


def _open_groups(scores: list[list[float]], assignment: list[int]) -> list[list[int]]:
    """Return groups of tensors that could exchange their counterparts without the names objecting."""
    array = np.array(scores) if scores else np.zeros((0, 0))
    count = len(assignment)
    parent = list(range(count))

    def find(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    if count:
        matched = array[np.arange(count), assignment]
        permuted = array[:, assignment]
        with np.errstate(invalid="ignore"):
            loss = matched[:, None] + matched[None, :] - permuted - permuted.T
        close = np.isfinite(loss) & (loss < _MARGIN)
        for i, j in zip(*np.nonzero(np.triu(close, 1)), strict=True):
            parent[find(int(i))] = find(int(j))
    groups = collections.defaultdict(list)
    for i in range(count):
        groups[find(i)].append(i)
    return [group for group in groups.values() if len(group) > 1]


def _candidates(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    scores: list[list[float]],
    patterns: Mapping[tuple[int, int], list[tuple[str, dict[str, int]]]],
    assignment: list[int],
    groups: list[list[int]],
    open_patterns: Mapping[Any, list[int]],
) -> list[Pairing]:
    """Return every pairing that is left open; what repeats in numbered blocks is decided once for all of them."""
    alike = collections.defaultdict(list)
    for group in groups:
        key = tuple((_template(ours[i].name), _template(theirs[assignment[i]].name)) for i in group)
        alike[key].append(group)
    choices: list[list[Callable[[dict[int, int], dict[int, int]], bool]]] = []
    for same in alike.values():
        choices.append(
            [_permute(same, order, assignment, scores) for order in itertools.permutations(range(len(same[0])))]
        )
        count = max(len(patterns[i, assignment[j]]) for group in same for i in group for j in group)
        for position in range(len(same[0]) if count > 1 else 0):
            choices.append([_orient([group[position] for group in same], number) for number in range(count)])
    for indices in open_patterns.values():
        count = max(len(patterns[i, assignment[i]]) for i in indices)
        choices.append([_orient(indices, number) for number in range(count)])
    if math.prod(map(len, choices)) > 20_000:
        choices = [choice[:2] for choice in choices[:9]]  # far more than can be tried: a few to show
    found: dict[Any, Pairing] = {}
    for combination in itertools.product(*choices):
        targets, numbers = dict(enumerate(assignment)), dict.fromkeys(range(len(ours)), 0)
        if not all(choose(targets, numbers) for choose in combination):
            continue
        chosen = tuple((targets[i], numbers[i]) for i in range(len(ours)))
        if any(numbers[i] >= len(patterns[i, targets[i]]) for i in range(len(ours))):
            continue
        settled = {i for group in groups for i in group} | {i for one in open_patterns.values() for i in one}
        found[chosen] = Pairing(
            tuple(
                _match(ours[i], theirs[j], patterns[i, j][n], "probe" if i in settled else "names")
                for i, (j, n) in enumerate(chosen)
            )
        )
        if len(found) > MOST_CANDIDATES:
            break
    return list(found.values())


def _permute(
    groups: list[list[int]], order: Sequence[int], assignment: list[int], scores: list[list[float]]
) -> Callable[[dict[int, int], dict[int, int]], bool]:
    def choose(targets: dict[int, int], numbers: dict[int, int]) -> bool:
        del numbers
        for group in groups:
            for i, other in zip(group, order, strict=True):
                targets[i] = assignment[group[other]]
                if scores[i][targets[i]] == -math.inf:
                    return False
        return True

    return choose


def _orient(indices: Sequence[int], number: int) -> Callable[[dict[int, int], dict[int, int]], bool]:
    def choose(targets: dict[int, int], numbers: dict[int, int]) -> bool:
        del targets
        numbers.update(dict.fromkeys(indices, number))
        return True

    return choose


def _match(one: Tensor, two: Tensor, pattern: tuple[str, dict[str, int]], how: str) -> Match:
    text, sizes = pattern
    return Match(one, two, _rule(text, tuple(sizes.items())), how)


@functools.cache
def _rule(pattern: str, sizes: tuple[tuple[str, int], ...]) -> Rule:
    """Return a rule for its pattern alone; the names of parts stand in the match."""
    return Rule("torch", "flax", pattern, **dict(sizes))
