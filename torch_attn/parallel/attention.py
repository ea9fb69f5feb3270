"""Attention over the devices of a mesh: global arguments, of which each device computes its part.

Callers see whole arrays, which devices share (`DTensor`); the attention itself is plain code on a device's part.
Sequences are cut by fsdp, heads by tensor, tokens by context.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attn_bridge.sharding import ShardingPlan
from attn_bridge.sharding.plan import Role

from ..implementations import KernelCall, reference
from ..shards import whole
from ..signatures.attention import Output
from .devices import Cut, Devices, as_scores
from .heads import heads_to_hold
from .masks import part_of
from .schemes import all_gather, balance, ring, ulysses
from .schemes.part import Part


@dataclasses.dataclass(frozen=True)
class Cuts:
    """The cuts of a call by the axes of the mesh: every size that divides.

    Attributes:
        batch: whether fsdp cuts sequences.
        heads: whether tensor cuts query heads.
        key_heads: whether tensor cuts key heads.
        queries: whether context cuts queries.
        keys: whether context cuts keys.
        method: how queries meet keys of other devices; None where a device holds all keys.
    """

    batch: bool
    heads: bool
    key_heads: bool
    queries: bool
    keys: bool
    method: str | None

    @classmethod
    def of(cls, plan: ShardingPlan, call: KernelCall) -> Cuts:
        """Return the cuts of a call by a plan."""
        batch, heads, queries, keys = call.scores_shape

        def cut(role: Role, size: int) -> bool:
            devices = plan.size(role)
            return devices > 1 and size % devices == 0

        by_heads, by_queries = cut("tensor", heads), cut("context", queries)
        by_keys = by_queries and cut("context", keys)
        method: str | None = plan.method
        if call.return_weights or (method == "ulysses" and heads // plan.size("tensor") % plan.size("context")):
            method = "all_gather"
        key_heads = by_heads and cut("tensor", call.key.shape[2])
        return cls(cut("fsdp", batch), by_heads, key_heads, by_queries, by_keys, method if by_keys else None)

    @property
    def working(self) -> tuple[Role, ...]:
        """The roles that share the computation."""
        roles: tuple[tuple[Role, bool], ...] = (
            ("fsdp", self.batch),
            ("tensor", self.heads),
            ("context", self.queries),
        )
        return tuple(role for role, is_cut in roles if is_cut)

    @property
    def query(self) -> Cut:
        """Cut of the queries ``(B, T, H, D)``."""
        return {"fsdp": _if(self.batch, 0), "context": _if(self.queries, 1), "tensor": _if(self.heads, 2)}

    @property
    def key(self) -> Cut:
        """Cut of keys and values ``(B, S, K, D)`` as the method starts with them."""
        keys = self.keys and self.method != "all_gather"
        return {"fsdp": _if(self.batch, 0), "context": _if(keys, 1), "tensor": _if(self.key_heads, 2)}

    def of_scores(self, shape: tuple[int, ...]) -> Cut:
        """Return the cut of an operand of this shape that broadcasts to the scores ``(B, H, T, S)``."""
        cut: Cut = {"fsdp": _if(self.batch, 0), "tensor": _if(self.heads, 1), "context": _if(self.queries, 2)}
        return {role: axis if axis is not None and shape[axis] > 1 else None for role, axis in cut.items()}


def _if(is_cut: bool, axis: int) -> int | None:
    return axis if is_cut else None


def attend(sharding: Devices, call: KernelCall, implementation: str | None) -> Output:
    """Like the `implementations`, computed by all devices of a mesh."""
    cuts, plan = Cuts.of(sharding.plan, call), sharding.plan
    batch, heads, queries, keys = call.scores_shape
    working = cuts.working
    query = sharding.local(call.query, cuts.query, working)
    key = _pick_heads(sharding, cuts, call, sharding.local(call.key, cuts.key, working))
    value = key
    if call.value is not call.key:
        value = _pick_heads(sharding, cuts, call, sharding.local(call.value, cuts.key, working))
    bias = None if call.bias is None else as_scores(call.bias)
    if bias is not None:
        bias = sharding.local(bias, cuts.of_scores(tuple(bias.shape)), working)
    sinks = call.sinks
    if sinks is not None:
        sinks = sharding.local(sinks, {"tensor": _if(cuts.heads, 0)}, working)
    rows = sharding.slice_of("fsdp", batch, cuts.batch)
    of_heads = sharding.slice_of("tensor", heads, cuts.heads)
    places = sharding.slice_of("context", queries, cuts.queries)
    mask = None
    if call.mask is not None:
        mask = call.mask.with_arrays(lambda array: whole(array) if isinstance(array, Tensor) else array)
        mask = part_of(mask, rows, of_heads)
    keep = None
    if call.dropout:
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        drawn = reference.draw((batch, heads, queries, keys), call.dropout, call.rng, dtype, query.device)
        keep = drawn[rows, of_heads, places]
    options = (call.scale, call.softcap, call.dropout, call.return_weights, implementation)
    part = Part(query, key, value, mask, bias, sinks, keep, places.start, *options)
    result = _run(part, sharding, cuts, plan.size("context"))
    if not call.return_weights:
        return _joined(sharding, result, cuts.query)
    context, weights = result
    return _joined(sharding, context, cuts.query), _joined(sharding, weights, cuts.of_scores((2, 2, 2, 2)))


def _joined(sharding: Devices, part: Tensor, cut: Cut) -> Tensor:
    joined = sharding.joined(part, cut)
    return sharding.cut(joined, {**cut, "tensor": None}) if sharding.whole_heads else joined


def _run(part: Part, sharding: Devices, cuts: Cuts, devices: int) -> Output:
    """Compute a device's part, by the method."""
    if cuts.method is None:
        return part.attend()
    group, rank = sharding.group("context"), sharding.rank("context")
    if cuts.method == "ulysses":
        return ulysses.attend(part, group, rank, devices)
    tokens = devices * part.query.shape[1]
    keys = part.key.shape[1] * (devices if cuts.method == "ring" else 1)
    is_balanced = not part.return_weights and keys == tokens and balance.pays(part.mask, tokens, devices)
    at = balance.Places(group, rank, devices, tokens, is_balanced)
    return (ring if cuts.method == "ring" else all_gather).attend(part, at)


def _pick_heads(sharding: Devices, cuts: Cuts, call: KernelCall, array: Tensor) -> Tensor:
    """Return the key heads that a device's query heads read, where it holds those of all devices."""
    if not cuts.heads or cuts.key_heads:
        return array
    table = heads_to_hold(call.query.shape[2], call.key.shape[2], sharding.plan.size("tensor"))
    return array[:, :, torch.from_numpy(table[sharding.rank("tensor")]).to(array.device)]
