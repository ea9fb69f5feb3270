"""A run folder as Orbax's CheckpointManager writes it, with the state of an NNX module and its random streams."""

from __future__ import annotations

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_attn
from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.specs import GroupedQueryAttentionConfig


def test_the_newest_step_of_a_manager_loads(tmp_path):
    config = GroupedQueryAttentionConfig(d_in=6, num_heads=2, num_kv_heads=1, dropout=0.5)
    module = jax_attn.GroupedQueryAttention(config, rngs=nnx.Rngs(0, dropout=1))
    state, moments = nnx.state(module), {"mu": np.ones(2, np.float32)}
    assert any("rngs" in map(str, path) for path, _ in nnx.to_flat_state(state))
    with ocp.CheckpointManager(tmp_path / "run", item_names=("params", "opt_state")) as manager:
        for step in (3, 20):
            save = ocp.args.StandardSave
            manager.save(step, args=ocp.args.Composite(params=save(state), opt_state=save(moments)))
        manager.wait_until_finished()
    for side in ("torch", "flax"):
        checkpoints.convert(tmp_path / "run", tmp_path / side, to_layout=side, item="params", from_layout="flax")
        assert checkpoints.verify(tmp_path / "run", tmp_path / side).passed
    found = {name.removesuffix(".value"): one for name, one in checkpoints.read(tmp_path / "flax").items()}
    wanted = {
        ".".join(map(str, path)): np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())
    assert checkpoints.plan(tmp_path / "run", tmp_path / "x", item="params", step=3).notes[-1] == "read step 3"
    with pytest.raises(CheckpointError, match=r"20: holds several items, opt_state; params; --item chooses one$"):
        checkpoints.plan(tmp_path / "run", tmp_path / "x")
