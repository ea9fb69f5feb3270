"""Typical faults of code for many devices; both ``mesh_mutants/`` contain the faulty code.

This module has the name of each fault, its description, and the configurations that run the faulty code. Its visibility
is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .configs import MeshConfig

Predicate = Callable[[MeshConfig], bool]


@dataclasses.dataclass(frozen=True)
class MeshFault:
    """One fault.

    Attributes:
        name: its name, which the block takes.
        about: what went wrong.
        needs: where the code that goes wrong runs, and can show.
    """

    name: str
    about: str
    needs: Predicate


def _tensor(config: MeshConfig) -> bool:
    return config.tensor > 1


def _context(config: MeshConfig) -> bool:
    return config.context > 1


def _ring(config: MeshConfig) -> bool:
    return _context(config) and config.method == "ring"


def _gathered(config: MeshConfig) -> bool:
    return _context(config) and config.method == "all_gather"


def _gathers_or_rings(config: MeshConfig) -> bool:
    return _ring(config) or _gathered(config)


def _ulysses(config: MeshConfig) -> bool:
    return _context(config) and config.method == "ulysses"


def _reads_other_keys(config: MeshConfig) -> bool:
    """Whether another rank's key heads are other ones."""
    return _tensor(config) and config.num_kv_heads > 1


def _pads(config: MeshConfig) -> bool:
    return _context(config) and config.padding and len(set(config.lengths)) > 1


def _knows_places(config: MeshConfig) -> bool:
    return config.masked or config.padding


MESH_FAULTS: tuple[MeshFault, ...] = (
    # Reductions over devices that share heads or hidden units.
    MeshFault("attention-reduction-missing", "output projection not added up over devices", _tensor),
    MeshFault("mlp-reduction-missing", "second layer of the MLP not added up over devices", _tensor),
    MeshFault("attention-reduction-averaged", "output projection averaged over devices", _tensor),
    MeshFault("mlp-reduction-averaged", "second layer of the MLP averaged over devices", _tensor),
    MeshFault("attention-reduction-twice", "output projection added up twice", _tensor),
    MeshFault("mlp-reduction-twice", "second layer of the MLP added up twice", _tensor),
    MeshFault(
        "attention-reduction-over-wrong-axis",
        "output projection added up over context",
        lambda c: _tensor(c) and _context(c),
    ),
    MeshFault("mlp-reduction-over-wrong-axis", "MLP added up over context", lambda c: _tensor(c) and _context(c)),
    MeshFault(
        "attention-bias-on-every-rank", "output bias added before the reduction", lambda c: _tensor(c) and c.bias
    ),
    MeshFault("mlp-bias-on-every-rank", "bias of the MLP added before the reduction", _tensor),
    MeshFault("residual-inside-reduction", "residual stream added before the reduction", _tensor),
    # Heads and weights.
    MeshFault("key-head-of-wrong-rank", "grouped heads read the key heads of another rank", _reads_other_keys),
    MeshFault("heads-of-ranks-in-wrong-order", "output projection applied to the heads of another rank", _tensor),
    MeshFault("weight-shard-exchanged", "shards of the MLP's first matrix on each other's device", _tensor),
    MeshFault("weight-stale-on-one-device", "one device computes with older weights, 1 % off", lambda c: True),
    MeshFault(
        "norm-of-shard-alone",
        "norm over heads takes the mean over the device's own",
        lambda c: _tensor(c) and c.inner_norm,
    ),
    # Positions and masks.
    MeshFault(
        "positions-counted-locally", "every shard of the sequence counts from 0", lambda c: _context(c) and c.rope
    ),
    MeshFault(
        "positions-of-wrong-shard", "a shard rotates by the positions of the next", lambda c: _context(c) and c.rope
    ),
    MeshFault(
        "causal-counted-locally", "causal mask by places within the shard", lambda c: _gathers_or_rings(c) and c.causal
    ),
    MeshFault(
        "window-counted-locally",
        "window by places within the shard",
        lambda c: _gathers_or_rings(c) and c.window is not None,
    ),
    MeshFault(
        "padding-cut-along-batch",
        "padding mask cut along the batch",
        lambda c: _pads(c) and len(c.lengths) % c.context == 0,
    ),
    MeshFault("padding-of-first-shard", "every device holds the padding mask of the first", _pads),
    # Keys of other devices.
    MeshFault("keys-not-gathered", "queries meet the keys of their own device alone", _gathered),
    MeshFault(
        "gathered-in-wrong-order",
        "keys and values gathered in another order than the mask",
        lambda c: _gathered(c) and _knows_places(c),
    ),
    MeshFault("values-not-moved", "keys of other devices meet the wrong values", _gathers_or_rings),
    MeshFault("balanced-order-not-restored", "output left in the balanced order", lambda c: c.balanced),
    MeshFault("ring-hop-dropped", "ring ends one hop early", _ring),
    MeshFault("ring-hop-doubled", "ring goes on for one hop too many", _ring),
    MeshFault(
        "ring-owner-mistaken",
        "keys that came round the ring taken for the device's own places",
        lambda c: _ring(c) and c.masked,
    ),
    MeshFault("merge-unweighted", "parts averaged without their log-sum-exp", _ring),
    MeshFault("merge-weights-swapped", "parts weighted with each other's log-sum-exp", _ring),
    MeshFault("softmax-normalised-locally", "softmax over each device's keys alone, added up", _ring),
    MeshFault("sinks-at-every-hop", "sinks counted at every hop", lambda c: _ring(c) and c.sinks),
    MeshFault(
        "sinks-of-first-heads", "every device takes the sinks of the first heads", lambda c: _ulysses(c) and c.sinks
    ),
    MeshFault("heads-exchanged-back-in-wrong-order", "heads back in another order after the exchange", _ulysses),
    # Gradients alone.
    MeshFault("gradient-averaged", "gradients of weights averaged over shards of the sequence", _context),
    MeshFault("gradient-summed-twice", "gradients of weights added up twice", _context),
    MeshFault("gradient-of-one-shard", "weights receive the gradient of one shard of the sequence", _context),
    MeshFault("input-gradient-not-reduced", "gradient of attention's input not added up over heads", _tensor),
    MeshFault("ring-gradient-stopped", "no gradient to keys of other devices", _gathers_or_rings),
    MeshFault(
        "norm-gradient-of-shard-alone",
        "gradient of a norm over heads through the device's own statistics alone",
        lambda c: _tensor(c) and c.inner_norm,
    ),
)
"""All of them, grouped by what goes wrong."""

_BY_NAME = {fault.name: fault for fault in MESH_FAULTS}


def find_mesh_fault(name: str) -> MeshFault:
    """Return the fault of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in _BY_NAME:
        raise ValueError(f"fault ({name}) must be one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
