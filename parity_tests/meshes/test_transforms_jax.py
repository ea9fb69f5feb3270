"""Sharded modules of JAX under its transforms, one operation at a time and compiled."""

from __future__ import annotations

from attn_parity import workers

from .processes import sharded_transforms


def test_mapped_over_a_batch() -> None:
    (found,) = workers.run(sharded_transforms.mapped, ["ring"], 1)
    assert len(found) == 4, found
    assert max(found.values()) < 1e-12, found
