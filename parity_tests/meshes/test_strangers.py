"""The judge on sharded modules that other people write: right ones are equal, and a fault on one shard names it."""

from __future__ import annotations

import pytest

from .processes.sharded_strangers import judged, refused, tables_moved


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_a_right_sharded_module_is_equal(framework):
    for said in judged(framework, ""):
        assert (said.verdict, said.first) == ("equal", "")


@pytest.mark.parametrize(("framework", "fault"), [("torch", "scale on one shard"), ("flax", "mask on one shard")])
def test_a_fault_on_one_shard_names_the_shard(framework, fault):
    shard = {"torch": "model=2", "flax": "model=1"}[framework]
    told = judged(framework, fault)
    assert {said.verdict for said in told} == {"different"}
    weight = {"torch": "grad o.weight", "flax": "grad o.kernel"}[framework]
    for said in told:  # every process finds the same
        assert said == told[0]
        assert said.shards[weight] == f"only in shard {shard} of {4 if framework == 'torch' else 2}"


def test_positions_counted_per_shard_are_located_between_submodules():
    (said,) = judged("flax", "positions counted locally")
    assert said.verdict == "different"
    assert "between" in said.first


def test_a_layer_that_shards_its_input_is_judged_alone():
    # Its hook takes what is plain for this process's part: run by itself with all of it, it raised.
    for said in judged("torch", "bias on every device"):
        assert said.verdict == "different"
        assert "in o: fed the same inputs, the outputs differ" in said.first


def test_copies_that_devices_should_hold_alike_are_compared():
    told = judged("torch", "copies differ")
    assert {said.verdict for said in told} == {"different"}
    for said in told:
        assert said == told[0]
        assert "model=3 holds other numbers than model=0" in said.messages["copies of output"]


def test_sharded_and_plain_modules_have_the_same_table_moves():
    # Activations that torch wraps for the devices are no tables: they depend on inputs.
    for error, moved in tables_moved():
        assert error < 1e-14
        assert 1e-10 < moved < 1e-6


@pytest.mark.parametrize(
    ("wrapper", "told"),
    [
        ("fully_shard", "1 of Sequential is sharded by fully_shard, which keeps the weights itself"),
        ("DDP", "DistributedDataParallel sums gradients of weights that can't be exchanged; give its .module"),
    ],
)
def test_wrappers_that_keep_their_weights_are_refused_everywhere(wrapper, told):
    # With its weights exchanged below it, fully_shard ends the process.
    for text in refused(wrapper):
        assert told in text
