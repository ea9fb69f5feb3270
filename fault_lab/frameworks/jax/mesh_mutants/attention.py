"""Attention of the queries that one device serves, over the keys of all: gathered, round a ring, or heads for tokens.

The twin is `torch.mesh_mutants.attention`. Letters: b batch, t query, s key, h head, c channel of a head.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from einops import einsum, rearrange
from jax import Array

from ....mesh.configs import MeshConfig
from .devices import Devices, detach

LOW = -1e30
"""Replaces minus infinity, whose differences are NaN."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The shared state of a block's parts: configuration, devices, and the fault ("" for none)."""

    config: MeshConfig
    devices: Devices
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys and values ``(B, S, H, C)``, their positions in the sequence, and 1 for each that is not padding."""

    key: Array
    value: Array
    places: Array
    valid: Array | None

    def moved(self, setup: Setup, places: Array) -> Keys:
        """Return the previous device's keys and values, whose positions are given."""
        move, fault = setup.devices.move, setup.fault
        key, value = move(self.key, "context"), move(self.value, "context")
        if fault == "ring-gradient-stopped":
            key, value = detach(key), detach(value)
        valid = None if self.valid is None else move(self.valid, "context")
        return Keys(key, self.value if fault == "values-not-moved" else value, places, valid)


def attend(setup: Setup, query: Array, keys: Keys, sinks: Array | None) -> Array:
    """Return the context of this device's queries ``(B, T, H, C)``."""
    c, devices, fault = setup.config, setup.devices, setup.fault
    size, rank = devices.size("context"), devices.rank("context")
    layout = c.layout(size)
    if c.method == "ring":
        parts = [score(setup, query, keys, keys.places)]
        places, moving = keys.places, keys
        for hop in range(1, size + {"ring-hop-dropped": -1, "ring-hop-doubled": 1}.get(fault, 0)):
            owner = (rank - hop) % size
            moving = moving.moved(setup, places if fault == "ring-owner-mistaken" else devices.row(layout, owner))
            parts.append(score(setup, query, moving, places))
        return merge(setup, parts, sinks)
    whole = devices.row(layout.reshape(1, -1), 0)
    if c.method == "ulysses":
        query, key, value = (devices.exchange(one, "context", 2, 1) for one in (query, keys.key, keys.value))
        number, places = query.shape[2], whole
        if sinks is not None:
            first = 0 if fault == "sinks-of-first-heads" else rank * number
            sinks = sinks[first + devices.row(np.arange(number)[None], 0)]
    else:
        key, value = (devices.gather(one, "context", 1) for one in (keys.key, keys.value))
        places, width = keys.places, keys.key.shape[1]
        if fault == "gathered-in-wrong-order":
            key = jnp.roll(key, width, 1)
        if fault in ("gathered-in-wrong-order", "values-not-moved"):
            value = jnp.roll(value, width, 1)
        if fault == "ring-gradient-stopped":
            key, value = (_own_gradient(setup, one, own) for one, own in ((key, keys.key), (value, keys.value)))
    valid = None if keys.valid is None else devices.gather(keys.valid, "context", 1)
    if fault == "keys-not-gathered":
        whole, key, value, valid = keys.places, keys.key, keys.value, keys.valid
    out = merge(setup, [score(setup, query, Keys(key, value, whole, valid), places)], sinks)
    if c.method == "ulysses":
        out = devices.exchange(out, "context", 1, 2)
        out = jnp.roll(out, out.shape[2] // size, 2) if fault == "heads-exchanged-back-in-wrong-order" else out
    return out


def _own_gradient(setup: Setup, whole: Array, own: Array) -> Array:
    """Return gathered keys that send a gradient to the device's own part alone."""
    size, rank = setup.devices.size("context"), setup.devices.rank("context")
    mine = setup.devices.row(np.repeat(np.eye(size), own.shape[1], 1), rank)[None, :, None, None]
    still = detach(whole)
    return still + jnp.asarray(mine, whole.dtype) * (
        jnp.concatenate([own] * size, 1) - detach(jnp.concatenate([own] * size, 1))
    )


def score(setup: Setup, query: Array, keys: Keys, places: Array) -> tuple[Array, Array, Array]:
    """Return sums of values and of weights over some keys, and the largest score that both are relative to."""
    c, fault = setup.config, setup.fault
    scores = einsum(query, keys.key, "b t h c, b s h c -> b h t s") / math.sqrt(c.head_dim)
    at, key_at = places[:, None], keys.places[None, :]
    local = _count(setup, query)[:, None], (_count(setup, keys.key) if c.method == "ring" else keys.places)[None, :]
    allowed = jnp.ones(scores.shape, bool)
    if c.causal:
        seen = local if fault == "causal-counted-locally" else (at, key_at)
        allowed = allowed & (seen[1] <= seen[0])
    if c.window is not None:
        seen = local if fault == "window-counted-locally" else (at, key_at)
        allowed = allowed & (abs(seen[1] - seen[0]) < c.window)
    if keys.valid is not None:
        allowed = allowed & (keys.valid[:, None, None, :] > 0)
    scores = jnp.where(allowed, scores, LOW)
    top = detach(scores.max(-1, keepdims=True))
    weights = jnp.where(allowed, jnp.exp(scores - top), 0.0)
    return einsum(weights, keys.value, "b h t s, b s h c -> b h t c"), weights.sum(-1, keepdims=True), top


def _count(setup: Setup, x: Array) -> Array:
    return setup.devices.row(np.arange(x.shape[1])[None], 0)


def merge(setup: Setup, parts: list[tuple[Array, Array, Array]], sinks: Array | None) -> Array:
    """Return values over all keys ``(B, T, H, C)`` from the results over parts of them."""
    fault = setup.fault
    tops = [top for _, _, top in parts]
    sink = None if sinks is None else rearrange(sinks, "h -> 1 h 1 1")
    if sink is not None:
        tops.append(detach(sink) + 0 * tops[0])
    highest = tops[0]
    for top in tops[1:]:
        highest = jnp.maximum(highest, top)
    factors = [jnp.exp(top - highest) for _, _, top in parts]
    weights = [factor * total for factor, (_, total, _) in zip(factors, parts, strict=True)]
    whole = sum(weights[1:], weights[0])
    if sink is not None:
        times = len(parts) if fault == "sinks-at-every-hop" else 1
        whole = whole + times * jnp.exp(sink - highest)
    means = [values / _safe(total) for values, total, _ in parts]
    if fault == "softmax-normalised-locally":
        out = sum(means[1:], means[0])
    elif fault == "merge-unweighted":
        out = sum(means[1:], means[0]) / len(means)
    else:
        if fault == "merge-weights-swapped":
            weights = weights[1:] + weights[:1]
        out = sum((mean * weight for mean, weight in zip(means[1:], weights[1:], strict=True)), means[0] * weights[0])
        out = out / _safe(whole)
    return rearrange(out, "b h t c -> b t h c")


def _safe(total: Array) -> Array:
    """Return sums of weights, 1 where nothing is seen."""
    return jnp.where(total > 0, total, 1.0)


def rotate(x: Array, places: object) -> Array:
    """Rotate halves of each head by the places of tokens (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    rates = jnp.asarray(10_000.0 ** (-np.arange(half) / half), x.dtype)
    angles = jnp.asarray(places, x.dtype)[:, None, None] * rates
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
