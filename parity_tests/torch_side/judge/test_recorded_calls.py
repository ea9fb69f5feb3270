"""`parity.record` on torch modules: copies of calls, bounded, without a graph."""

from __future__ import annotations

import gc
import pickle
import re
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from attn_bridge import parity


class Block(nn.Module):
    def __init__(self, width, bias=True, **more):
        super().__init__()
        self.width, self.more = width, more
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x, mask=None, *, scale=1.0):
        x = self.out(x) * scale
        return x if mask is None else x * mask


def test_calls_are_copied_with_their_submodules_mode_and_arguments():
    block = Block(3).eval()
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    with parity.record(block) as recording:
        block.bfloat16()(x, scale=2.0).sum().backward()
        block.train()(x, torch.ones(2, 1))
    block(x)
    with torch.no_grad():
        x.add_(1)
    assert [(call.path, call.type, call.training) for call in recording.calls] == [
        ("", "Block", False),
        ("out", "Linear", False),
        ("", "Block", True),
        ("out", "Linear", True),
    ]
    first = recording.inputs
    assert (first.args[0].dtype.name, first.args[0].tolist(), dict(first.kwargs)) == (
        "bfloat16",
        [[1.0] * 3] * 2,
        {"scale": 2.0},
    )
    assert recording.calls[2].shapes == [(2, 3), (2, 1)]
    assert recording.left_out == []
    assert (recording.constructor, recording.of("out").constructor["in_features"]) == ({"width": 3}, 3)


def test_nothing_keeps_the_graph_or_the_module():
    block, x = Block(3), torch.ones(2, 3, requires_grad=True)
    with parity.record(block) as recording:
        hidden = x * 2
        block(hidden).sum().backward()
    assert not block._forward_pre_hooks
    references = [weakref.ref(one) for one in (block, hidden)]
    del block, hidden
    gc.collect()
    assert [one() for one in references] == [None, None]
    assert len(recording.calls) == 2


def test_a_class_is_recorded_with_its_constructor_arguments():
    before = Block.__init__, Block.forward
    with parity.record(Block) as recording:
        Block(3, bias=False, depth=2)(torch.zeros(1, 3))
    assert (Block.__init__, Block.forward) == before
    assert recording.constructor == {"width": 3, "bias": False, "depth": 2}
    assert recording.calls[0].path == ""
    assert pickle.loads(pickle.dumps(recording)).inputs.args[0].shape == (1, 3)


def test_what_is_left_out_is_listed():
    block = Block(4)
    with parity.record(block, max_calls=2, max_bytes=1000) as recording:
        block(torch.zeros(1, 4))
        for _ in range(3):
            block(torch.zeros(1, 4))
    assert recording.left_out == [
        "Block: 2 calls not stored: more than 2 (max_calls)",
        "out: 2 calls not stored: more than 2 (max_calls)",
    ]
    with parity.record(block, max_bytes=100) as recording:
        block(torch.zeros(7, 4))
    assert recording.left_out[0] == "Block: 1 call not stored: more than 100 bytes (max_bytes) with them"
    with pytest.raises(ValueError, match=r"^no call of Block was stored \(Block: 1 call not stored: more than 100 "):
        _ = recording.inputs

    class Cached(nn.Module):
        def forward(self, x, cache):
            return x

    with parity.record(Cached) as recording:
        Cached()(torch.zeros(1), {"keys": iter(())})
    assert recording.left_out == ["Cached: 1 call not stored: argument[1]['keys'] is a tuple_iterator"]


def test_a_port_is_compared_on_a_recorded_call():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), Block(4))
    with parity.record(model) as recording:
        model(torch.randn(2, 7, 5))
    call = recording.of("1")
    other = Block(4)
    report = parity.compare(model[1], other, call.inputs, seeds=1)
    assert report.verdict == "equal"
    wrong = Block(4)
    wrong.forward = lambda x: Block.forward(wrong, x, scale=1.01)
    assert parity.compare(model[1], wrong, call.inputs, seeds=1, localise=False).verdict == "different"


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (
            3,
            {},
            TypeError,
            "module must be a torch.nn.Module, an nnx.Module, a Linen module or a class of those, got int",
        ),
        (
            dict,
            {},
            TypeError,
            "module must be a torch.nn.Module, an nnx.Module, a Linen module or a class of those, got dict",
        ),
        (Block, {"max_calls": 0}, ValueError, "max_calls (0) must be a whole number from 1"),
        (Block, {"max_bytes": 1.5}, ValueError, "max_bytes (1.5) must be a whole number from 1"),
    ],
)
def test_refusals(given, options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"), parity.record(given, **options):
        pass


def test_arrays_of_numpy_and_nested_ones_are_copied():
    array = np.ones(3)

    class Takes(nn.Module):
        def forward(self, tree, dtype):
            return tree

    with parity.record(Takes) as recording:
        Takes()({"a": (array, [torch.ones(2)])}, torch.float32)
    array[:] = 5
    tree = recording.calls[0].args[0]
    assert tree["a"][0].tolist() == [1, 1, 1]
    assert isinstance(tree["a"][1][0], np.ndarray)
    assert recording.calls[0].args[1] is torch.float32
