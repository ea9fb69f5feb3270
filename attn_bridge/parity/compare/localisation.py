"""Where two modules first diverge, by teacher forcing: each submodule is fed the other side's activations.

Both sides run once, freely, and every call of every submodule is recorded with its inputs, outputs and the gradient
that reaches it. Then each submodule runs by itself on what the other side's counterpart was given, forward and
backward, in both directions. One that differs although it was fed the same numbers is at fault, or one inside it is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from .criterion import Measure, measure, precision_used, scale_of
from .report import Divergence, ModuleNode, Side
from .subject import Arguments, Array, Arrays, Call, CannotLiftError, Harness, ModuleFailedError, Run, is_float
from .submodule_pairs import differing_settings, pair_modules

if TYPE_CHECKING:
    from .pair import Comparison
    from .samples import Sample

LIMIT = 1e-11
"""Largest relative difference of a submodule in float64, by itself, fed the same numbers."""

CAUSE = 1e-4
"""Least part of the whole module's difference that can have caused it; less is rounding in an ill-conditioned part."""

SMALL_PART = 0.1
"""Less than this part of what the worst submodule loses is not where the loss of precision is said to begin."""

COPIES = 6
"""How many slightly moved inputs a submodule's precision is judged on."""

MOST_CALLS = 3
"""Most calls of one submodule that are tried; one that is called in a loop repeats itself."""

_CLOSE = 1e-6

Aim = Literal["meaning", "precision"]


@dataclasses.dataclass
class Node:
    """A torch submodule with its counterpart and what was found out about it."""

    path: str | None
    flax_path: str | None
    torch_type: str = ""
    flax_type: str = ""
    order: int = 0
    message: str = ""
    error_in: float | None = None
    error_out: float | None = None
    forward: float | None = None
    backward: float | None = None
    guilty_forward: bool = False
    guilty_backward: bool = False
    first: bool = False
    calls: list[tuple[Call, Call]] = dataclasses.field(default_factory=list)
    children: list[Node] = dataclasses.field(default_factory=list)

    def frozen(self) -> ModuleNode:
        """Return the node for a report."""
        verdict = None
        if self.forward is not None:
            verdict = "different" if self.guilty_forward or self.guilty_backward else "equal"
        return ModuleNode(
            self.path,
            self.flax_path,
            self.torch_type,
            self.flax_type,
            verdict,  # type: ignore[arg-type]
            self.error_in,
            self.error_out,
            self.forward,
            self.backward,
            self.message,
            self.first,
            tuple(child.frozen() for child in sorted(self.children, key=lambda child: child.order)),
        )


def locate(comparison: Comparison, sample: Sample, aim: Aim) -> tuple[ModuleNode, Divergence | None]:
    """Return the module tree of a comparison and the first divergence in it, None if no submodule shows it.

    Args:
        comparison: the two modules, paired.
        sample: numbers on which they differ.
        aim: ``meaning`` looks in float64, ``precision`` for the submodule that loses more than its share.
    """
    search = _Search(comparison, sample, aim)
    root = search.tree()
    divergence = search.first(root)
    return root.frozen(), divergence


class _Search:
    def __init__(self, comparison: Comparison, sample: Sample, aim: Aim):
        self.comparison = comparison
        self.sample = sample
        self.aim = aim
        self.dtype = "float64" if not comparison.lacks else None
        self.limits = {"forward": LIMIT, "backward": LIMIT}
        weights = {"torch": sample.weights, "flax": comparison.flax_weights(sample)}
        self.low: dict[str, Arrays] = weights
        self.weights: dict[str, Arrays] = {side: _widened(arrays, self.dtype) for side, arrays in weights.items()}

    def tree(self) -> Node:
        """Record both sides and return the tree of their submodules, with the pairs' calls."""
        comparison, sample = self.comparison, self.sample
        torch = comparison.torch.run(self.weights["torch"], sample.torch, dtype=self.dtype)
        random = np.random.default_rng(11)
        cotangents: list[Array] = [np.asarray(random.normal(size=one.shape)) for one in torch.outputs]
        calls: dict[Side, list[Call]] = {"torch": [], "flax": []}
        problems = []
        sides: tuple[tuple[Side, Harness, Arguments], ...] = (
            ("torch", comparison.torch, sample.torch),
            ("flax", comparison.flax, sample.flax),
        )
        for side, harness, arguments in sides:
            try:
                outputs = harness.run(self.weights[side], arguments, dtype=self.dtype).outputs
                whole = Call("", 0, -1, arguments, outputs, list(cotangents))
                calls[side] = [whole]
                if self.dtype is not None:
                    calls[side] += harness.record(self.weights[side], arguments, cotangents)
            except (CannotLiftError, ModuleFailedError) as error:
                problems.append(f"the {side} side's submodules could not be recorded: {error}")
        root = self._build(calls)
        root.message = "; ".join([root.message, *problems]).strip("; ")
        return root

    def _build(self, calls: Mapping[Side, Sequence[Call]]) -> Node:
        ours, theirs = self.comparison.torch.modules(), self.comparison.flax.modules()
        pairs = pair_modules(self.comparison.pairing.matches, ours, theirs)
        found: dict[Side, dict[str, list[Call]]] = {"torch": {}, "flax": {}}
        for side in found:
            for call in calls[side]:
                found[side].setdefault(call.path, []).append(call)
        types = {module.path: module.type for module in theirs}
        nodes: dict[str, Node] = {}
        for position, module in enumerate(ours):
            path = module.path
            other = pairs.get(path)
            node = Node(path, other, module.type, types.get(other, "") if other is not None else "", position)
            mine, its = found["torch"].get(path, []), found["flax"].get(other, []) if other is not None else []
            node.order = mine[0].order if mine else 10**6 + position
            if other is None:
                node.message = "no counterpart"
            elif not mine or not its:
                sides = [side for side, some in (("torch", mine), ("flax", its)) if not some]
                node.message = f"never called by itself in {' and '.join(sides)}"
            elif len(mine) != len(its):
                node.message = f"called {len(mine)} times in torch and {len(its)} times in Flax"
            else:
                node.calls = list(zip(mine, its, strict=True))[:MOST_CALLS]
            nodes[path] = node
            if path:
                nodes[path.rpartition(".")[0]].children.append(node)
        back = {flax: torch for torch, flax in pairs.items()}
        for module in theirs:
            if module.path in back:
                continue
            parent = module.path
            while parent and parent not in back:
                parent = parent.rpartition(".")[0]
            some = found["flax"].get(module.path, [])
            order = some[0].order if some else 10**6
            message = "no counterpart" if some else "no counterpart, never called by itself"
            node = Node(None, module.path, "", module.type, order, message)
            nodes[back.get(parent, "")].children.append(node)
        _settle_order(nodes[""])
        return nodes[""]

    def first(self, root: Node) -> Divergence | None:
        """Try every pair (for precision: along the way down) and mark the first divergence."""
        if self.aim == "meaning":
            total = sum(1 for _ in _walk(root))
            for done, node in enumerate(_walk(root)):
                self.comparison.progress("looking for the first divergence", done, total)
                self._try(node)
                if node is root:
                    whole = {"forward": node.forward, "backward": node.backward}
                    self.limits = {key: max(LIMIT, CAUSE * _finite(value)) for key, value in whole.items()}
        else:
            self._try(root)
        if not (root.guilty_forward or root.guilty_backward):
            return None
        direction: Literal["forward", "backward"] = "forward" if root.guilty_forward else "backward"
        node = root
        while True:
            inner = list(_nearest(node))
            if self.aim == "precision":
                for child in inner:
                    self._try(child)
            bad = [
                child for child in inner if (child.guilty_forward if direction == "forward" else child.guilty_backward)
            ]
            if direction == "backward":
                bad = [child for child in bad if not child.guilty_forward] or bad
            if self.aim == "precision":  # a neighbour may be a little beyond by chance, or by what it is fed
                shares = [(child.forward if direction == "forward" else child.backward) or 0.0 for child in bad]
                least = SMALL_PART * max(shares, default=0.0)
                bad = [child for child, used in zip(bad, shares, strict=True) if used >= least]
            if not bad:
                break
            key = lambda child: child.order  # noqa: E731
            node = min(bad, key=key) if direction == "forward" else max(bad, key=key)
        node.first = True
        settings = [
            text
            for text in differing_settings(self.comparison)
            if f" of {node.path or self.comparison.torch.name} is " in text
        ]
        node.message = "; ".join([*settings, node.message])
        return Divergence(node.path or "", node.flax_path or "", direction, node.message)

    def _try(self, node: Node) -> None:
        """Run a pair by itself, fed by each side in turn."""
        for torch_call, flax_call in node.calls:
            try:
                if self.aim == "meaning":
                    self._force(node, torch_call, flax_call)
                else:
                    self._weigh(node, torch_call, flax_call)
            except (CannotLiftError, ModuleFailedError) as error:
                node.message = node.message or f"could not be run by itself: {error}"

    def _force(self, node: Node, torch_call: Call, flax_call: Call) -> None:
        groups = match_leaves(torch_call.arguments.leaves, flax_call.arguments.leaves)
        outputs = match_leaves(torch_call.outputs, flax_call.outputs)
        if not outputs:
            node.message = "the outputs have no shape in common"
            return
        free = [
            (group.torch_value(torch_call.arguments.leaves), group.flax_value(flax_call.arguments.leaves))
            for group in groups
        ]
        node.error_in = _larger(node.error_in, _relative(free) if free else None)
        free = [(one.torch_value(torch_call.outputs), one.flax_value(flax_call.outputs)) for one in outputs]
        node.error_out = _larger(node.error_out, _relative(free))
        for source in ("torch", "flax"):
            torch_arguments, flax_arguments = fed(torch_call.arguments, flax_call.arguments, groups, source)
            torch_cotangents, flax_cotangents = _fed_cotangents(torch_call, flax_call, outputs, source)
            torch = self._run("torch", node.path or "", torch_arguments, torch_cotangents)
            flax = self._run("flax", node.flax_path or "", flax_arguments, flax_cotangents)
            forward = _relative([(one.torch_value(torch.outputs), one.flax_value(flax.outputs)) for one in outputs])
            backward, name = self._backward(torch, flax, groups)
            node.forward, node.backward = _larger(node.forward, forward), _larger(node.backward, backward)
            if not node.guilty_forward and forward > self.limits["forward"]:
                node.guilty_forward = True
                node.message = f"fed the same inputs, the outputs differ by {forward:.2g} of the largest value"
            elif not node.guilty_forward and not node.guilty_backward and backward > self.limits["backward"]:
                node.message = (
                    f"fed the same inputs and gradients, the outputs agree and {name} differs by {backward:.2g} "
                    "of the largest gradient"
                )
            node.guilty_backward = node.guilty_backward or backward > self.limits["backward"]

    def _backward(self, torch: Run, flax: Run, groups: Sequence[Group]) -> tuple[float, str]:
        """Return the largest difference of gradients, relative to the largest of them, and which one it is."""
        pairs: list[tuple[str, Array, Array]] = []
        for position, group in enumerate(groups):
            one, two = group.torch_sum(torch.input_gradients), group.flax_sum(flax.input_gradients)
            if one is not None and two is not None:
                pairs.append((f"the gradient of input {position}", one, two))
        ours = self.comparison.pairing.aligned(torch.parameter_gradients, "torch")
        theirs = self.comparison.pairing.aligned(flax.parameter_gradients, "flax")
        pairs += [(f"the gradient of {name}", ours[name], theirs[name]) for name in ours if name in theirs]
        scale = scale_of([array for _, *two in pairs for array in two]) or 1.0
        largest, guilty = 0.0, ""
        for name, one, two in pairs:
            apart = _distance(one, two) / scale
            if apart > largest:
                largest, guilty = apart, name
        return largest, guilty

    def _run(
        self, side: Side, path: str, arguments: Arguments, cotangents: Sequence[Array | None], *, low: bool = False
    ) -> Run:
        harness: Harness = self.comparison.torch if side == "torch" else self.comparison.flax
        weights = self.low[side] if low else self.weights[side]
        return harness.run(weights, arguments, cotangents, dtype=None if low else self.dtype, path=path)

    def _weigh(self, node: Node, torch_call: Call, flax_call: Call) -> None:
        """Judge the precision of a pair by itself, on the torch side's inputs."""
        groups = match_leaves(torch_call.arguments.leaves, flax_call.arguments.leaves)
        outputs = match_leaves(torch_call.outputs, flax_call.outputs)
        if not outputs:
            node.message = "the outputs have no shape in common"
            return
        dtype = self.comparison.dtype or "float32"
        found: dict[str, list[Measure]] = {"forward": [], "backward": []}
        for copy in range(COPIES):
            torch_arguments, flax_arguments = fed(
                torch_call.arguments, flax_call.arguments, groups, "torch", copy, dtype
            )
            cotangents = _fed_cotangents(torch_call, flax_call, outputs, "torch", dtype)
            runs: dict[tuple[Side, bool], Run] = {}
            for low in (True, False):
                runs["torch", low] = self._run("torch", node.path or "", torch_arguments, cotangents[0], low=low)
                runs["flax", low] = self._run("flax", node.flax_path or "", flax_arguments, cotangents[1], low=low)
            order: list[tuple[Side, bool]] = [("torch", True), ("flax", True), ("torch", False), ("flax", False)]
            for position, one in enumerate(outputs):
                tensors = [_get(one, side, runs[side, low].outputs) for side, low in order]
                found["forward"] += _measured(tensors, dtype, position, copy)
            for position, group in enumerate(groups):
                gradients = [_total(group, side, runs[side, low].input_gradients) for side, low in order]
                found["backward"] += _measured(gradients, dtype, position, copy)
        for direction, measures in found.items():
            used = precision_used(measures) if measures else (0.0, 0.0)
            if max(used) > 1.0:
                side = "torch" if used[0] > used[1] else "flax"
                if direction == "forward":
                    node.guilty_forward = True
                node.guilty_backward = node.guilty_backward or direction == "backward"
                node.message = node.message or (
                    f"fed the same inputs, the {side} side loses {max(used):.3g} times its share of precision "
                    f"({direction})"
                )
            if direction == "forward":
                node.forward = max(used)
            else:
                node.backward = max(used)


# ---- which array is which


@dataclasses.dataclass(frozen=True)
class Group:
    """Arrays that hold the same numbers on each side, and how the torch axes become the Flax axes."""

    torch: tuple[int, ...]
    flax: tuple[int, ...]
    permutation: tuple[int, ...] | None
    torch_shape: tuple[int, ...]
    flax_shape: tuple[int, ...]

    def to_flax(self, array: Array) -> Array:
        """Bring a torch array into Flax axes."""
        return array.reshape(self.flax_shape) if self.permutation is None else array.transpose(self.permutation)

    def to_torch(self, array: Array) -> Array:
        """Bring a Flax array into torch axes."""
        if self.permutation is None:
            return array.reshape(self.torch_shape)
        return array.transpose(tuple(np.argsort(self.permutation)))

    def torch_value(self, leaves: Sequence[Array]) -> Array:
        """Return the torch side's array, in Flax axes."""
        return self.to_flax(leaves[self.torch[0]])

    def flax_value(self, leaves: Sequence[Array]) -> Array:
        """Return the Flax side's array."""
        return leaves[self.flax[0]]

    def torch_sum(self, gradients: Sequence[Array | None]) -> Array | None:
        """Return the gradient with respect to the array that all torch arrays of the group are, in Flax axes."""
        found = [one for i in self.torch if (one := gradients[i]) is not None]
        return self.to_flax(_added(found)) if found else None

    def flax_sum(self, gradients: Sequence[Array | None]) -> Array | None:
        """Return the gradient with respect to the array that all Flax arrays of the group are."""
        found = [one for i in self.flax if (one := gradients[i]) is not None]
        return _added(found) if found else None


def match_leaves(torch: Sequence[Array], flax: Sequence[Array]) -> list[Group]:
    """Match the arrays of two calls: by value where they agree, by shape and order where they don't."""
    ours, theirs = _same(torch), _same(flax)
    options = []
    for i, mine in enumerate(ours):
        for j, others in enumerate(theirs):
            for permutation in _permutations(torch[mine[0]], flax[others[0]]):
                group = Group(tuple(mine), tuple(others), permutation, torch[mine[0]].shape, flax[others[0]].shape)
                apart = _relative([(group.to_flax(torch[mine[0]]), flax[others[0]])])
                is_plain = permutation is not None and permutation == tuple(range(len(permutation)))
                options.append((0.0 if apart < _CLOSE else 1.0, not is_plain, abs(i - j), i, j, apart, group))
    options.sort(key=lambda option: option[:5])
    used: tuple[set[int], set[int]] = (set(), set())
    found = []
    for *_, i, j, _, group in options:
        if i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
            found.append((i, group))
    return [group for _, group in sorted(found, key=lambda pair: pair[0])]


def _same(leaves: Sequence[Array]) -> list[list[int]]:
    """Group the floating-point arrays that hold the same numbers."""
    groups: list[list[int]] = []
    for position, leaf in enumerate(leaves):
        if not is_float(leaf):
            continue
        for group in groups:
            first = leaves[group[0]]
            if first.shape == leaf.shape and np.array_equal(first, leaf):
                group.append(position)
                break
        else:
            groups.append([position])
    return groups


def _permutations(one: Array, two: Array) -> Iterator[tuple[int, ...] | None]:
    if one.size != two.size:
        return
    if one.ndim != two.ndim:
        yield None
        return
    if one.ndim > 4:
        if one.shape == two.shape:
            yield tuple(range(one.ndim))
        return
    for permutation in itertools.permutations(range(one.ndim)):
        if tuple(one.shape[axis] for axis in permutation) == two.shape:
            yield permutation


def fed(
    torch: Arguments, flax: Arguments, groups: Sequence[Group], source: str, copy: int = 0, dtype: str | None = None
) -> tuple[Arguments, Arguments]:
    """Return both calls with every matched array taken from the `source` side."""
    ours, theirs = list(torch.leaves), list(flax.leaves)
    for group in groups:
        value = group.torch_value(torch.leaves) if source == "torch" else group.flax_value(flax.leaves)
        if copy:
            value = value * (1.0 + 2.0**-10 * np.random.default_rng([copy, group.torch[0]]).normal(size=value.shape))
        if dtype is not None:
            value = _in(value, dtype)
        for i in group.torch:
            ours[i] = np.asarray(group.to_torch(value), order="C")
        for i in group.flax:
            theirs[i] = np.asarray(value, order="C")
    if dtype is not None:
        ours, theirs = ([_in(leaf, dtype) for leaf in leaves] for leaves in (ours, theirs))
    return torch.with_leaves(ours), flax.with_leaves(theirs)


def _fed_cotangents(
    torch: Call, flax: Call, outputs: Sequence[Group], source: str, dtype: str | None = None
) -> tuple[list[Array | None], list[Array | None]]:
    """Return the gradients for both sides' outputs, taken from one of them; an unmatched output gets none."""
    ours: list[Array | None] = [None] * len(torch.outputs)
    theirs: list[Array | None] = [None] * len(flax.outputs)
    for group in outputs:
        given = torch.cotangents[group.torch[0]] if source == "torch" else flax.cotangents[group.flax[0]]
        if given is None:
            continue
        value = group.to_flax(given) if source == "torch" else given
        value = _in(value, dtype) if dtype is not None else value
        ours[group.torch[0]], theirs[group.flax[0]] = group.to_torch(value), value
    return ours, theirs


# ---- small things


def _measured(tensors: Sequence[Array | None], dtype: str, group: int, sample: int) -> list[Measure]:
    """Measure one tensor: both sides' results and both float64 results; one that there is none of says nothing."""
    known = [one for one in tensors if one is not None and is_float(one)]
    if len(known) < len(tensors):
        return []
    scale = scale_of(known[2:])
    keywords = {"kind_scale": scale, "dtype": dtype, "group": group, "weights": "own", "sample": sample}
    return [measure(*known, **keywords)]  # type: ignore[arg-type]


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _settle_order(node: Node) -> int:
    """Let a container that is never called itself stand where the first module in it does."""
    node.order = min([node.order, *map(_settle_order, node.children)])
    return node.order


def _nearest(node: Node) -> Iterator[Node]:
    """Yield the nearest nodes below that can be tried by themselves."""
    for child in node.children:
        if child.calls:
            yield child
        else:
            yield from _nearest(child)


def _added(arrays: Sequence[Array]) -> Array:
    result = arrays[0]
    for array in arrays[1:]:
        result = result + array
    return result


def _widened(arrays: Arrays, dtype: str | None) -> Arrays:
    if dtype is None:
        return arrays
    return {name: array.astype(dtype) if is_float(array) else array for name, array in arrays.items()}


def _in(array: Array, dtype: str) -> Array:
    from ..check.cases import numpy_dtype

    return array.astype(numpy_dtype(dtype)) if is_float(array) else array


def _get(group: Group, side: str, leaves: Sequence[Array]) -> Array:
    return group.torch_value(leaves) if side == "torch" else group.flax_value(leaves)


def _total(group: Group, side: str, gradients: Sequence[Array | None]) -> Array | None:
    return group.torch_sum(gradients) if side == "torch" else group.flax_sum(gradients)


def _distance(one: Array, two: Array) -> float:
    if one.shape != two.shape:
        return float("inf")
    one, two = one.astype(np.float64), two.astype(np.float64)
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(one - two))
    return float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _relative(pairs: Sequence[tuple[Array, Array]]) -> float:
    return max((_distance(one, two) / (scale_of([_f(one), _f(two)]) or 1.0) for one, two in pairs), default=0.0)


def _f(array: Array) -> Array:
    return array.astype(np.float64)


def _finite(value: float | None) -> float:
    return value if value is not None and np.isfinite(value) else 0.0


def _larger(one: float | None, two: float | None) -> float | None:
    return two if one is None else one if two is None else max(one, two)
