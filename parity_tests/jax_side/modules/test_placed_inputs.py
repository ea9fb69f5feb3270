"""Inputs and caches of a sharded module: which axes are cut over which devices, and which tokens a device serves."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jax_attn.decoding.cache import KeyValueCache
from jax_attn.decoding.recurrent_cache import RecurrentCache
from jax_attn.parallel import entry, explicit
from jax_attn.parallel.schemes import balance


def sharding(**sizes):
    """Return a stand-in for a sharding whose mesh has that many devices per role."""
    plan = types.SimpleNamespace(size=lambda role: sizes.get(role, 1), tensor="tensor", check_tokens=lambda count: None)
    return types.SimpleNamespace(
        plan=plan, divided=lambda role, size: role if sizes.get(role, 1) > 1 and size % sizes[role] == 0 else None
    )


def cuts_of(cache, monkeypatch, **sizes):
    """Return shape -> axes of the mesh, of the arrays of a cache."""
    found = {}

    def constrain(given, array, *cuts):
        found[array.shape] = cuts
        return array

    monkeypatch.setattr(entry, "_constrain", constrain)
    placed = entry.place_caches(sharding(**sizes), {"layers": [cache, 3]})
    assert placed["layers"][1] == 3
    return found


@pytest.mark.parametrize(
    ("batch", "keys", "heads", "cuts"),
    [
        (4, 3, 2, ("fsdp", None, "tensor", None)),
        (3, 4, 2, (None, None, "tensor", None)),
        (4, 4, 3, ("fsdp", None, None, None)),
    ],
)
def test_keys_are_cut_by_batch_and_heads_where_they_divide(batch, keys, heads, cuts, monkeypatch):
    cache = KeyValueCache.empty(batch, keys, heads, 5)
    found = cuts_of(cache, monkeypatch, fsdp=2, tensor=2)
    assert found[batch, keys, heads, 5] == cuts
    assert all(cut == () for shape, cut in found.items() if len(shape) != 4)


def test_a_state_is_cut_by_batch_and_heads(monkeypatch):
    cache = RecurrentCache.empty(4, 9, (2, 3, 5))
    found = cuts_of(cache, monkeypatch, fsdp=2, tensor=2)
    assert found[4, 2, 3, 5] == ("fsdp", "tensor", None, None)
    assert cuts_of(cache, monkeypatch, fsdp=1, tensor=1)[4, 2, 3, 5] == (None, None, None, None)


@pytest.mark.parametrize(
    ("array", "cuts"),
    [
        (np.zeros((4, 6, 5), "f4"), ("fsdp", "context", None)),
        (np.zeros((3, 6, 4), "f4"), (None, "context", None)),
        (np.zeros((4, 5, 4), "f4"), ("fsdp", None, None)),
        (np.zeros((6, 4), "f4"), ("context", None)),
        (np.zeros((4, 6), "i4"), ("fsdp", "context")),
        (np.zeros((3, 6), "i4"), (None, "context")),
    ],
    ids=lambda value: f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else "",
)
def test_sequences_are_cut_by_batch_and_tokens(array, cuts, monkeypatch):
    monkeypatch.setattr(entry, "_put", lambda given, array, *cuts: cuts)
    assert entry._sequence(sharding(fsdp=2, context=2), array, must_divide=True) == cuts


@pytest.mark.parametrize(("balanced", "starts"), [(False, ((0, 8, 16),)), (True, ((0, 4, 8), (20, 16, 12)))])
def test_balanced_devices_start_at_an_early_and_a_late_piece(balanced, starts):
    assert balance.starts_of(24, 3, balanced=balanced) == starts


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((4, 6, 5), ("fsdp", "context", None)),
        ((4, 3, 6, 5), ("fsdp", None, "context", None)),
        ((3, 6, 5), (None, "context", None)),
        ((6, 5), ("context", None)),
        ((5,), (None,)),
    ],
)
def test_results_on_explicit_axes_are_cut_by_batch_and_tokens(shape, cuts):
    mesh = AbstractMesh((2, 2, 2), ("fsdp", "context", "tensor"), (AxisType.Explicit,) * 3)
    given = sharding(fsdp=2, context=2, tensor=2)
    given.outside_mesh = mesh
    cache = KeyValueCache.empty(4, 3, 2, 5)
    shapes = jax.eval_shape(lambda: ((jnp.zeros(shape), cache), {}))
    (result, of_cache), _ = explicit._shardings(given, shapes)
    assert (*result.spec, *(None,) * (len(shape) - len(result.spec))) == cuts
    assert of_cache.key.spec == P("fsdp", None, "tensor")
