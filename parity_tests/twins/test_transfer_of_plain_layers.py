"""`attn_bridge.transfer` between layers of torch and Flax that stand at the same path, by their type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge import Rule, WeightsMismatchError, parity, transfer
from attn_parity.results.findings import PairedParameter
from torch_attn import compat

D = 6


def drawn(module, seed=0):
    """Return a torch module whose tensors all hold distinct numbers."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module.eval()


def rngs():
    return nnx.Rngs(0)


LAYERS = {
    "Linear": (lambda: nn.Linear(D, 4), lambda: nnx.Linear(D, 4, rngs=rngs()), (2, D)),
    "Linear without bias": (
        lambda: nn.Linear(D, 4, bias=False),
        lambda: nnx.Linear(D, 4, use_bias=False, rngs=rngs()),
        (2, D),
    ),
    "LayerNorm": (lambda: nn.LayerNorm(D), lambda: nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs()), (2, D)),
    "RMSNorm": (lambda: nn.RMSNorm(D, eps=1e-6), lambda: nnx.RMSNorm(D, epsilon=1e-6, rngs=rngs()), (2, D)),
    "GroupNorm": (
        lambda: nn.GroupNorm(3, D),
        lambda: nnx.GroupNorm(D, num_groups=3, epsilon=1e-5, rngs=rngs()),
        (2, 5, D),
    ),
    "BatchNorm1d": (
        lambda: nn.BatchNorm1d(D),
        lambda: nnx.BatchNorm(D, use_running_average=True, epsilon=1e-5, rngs=rngs()),
        (2, 5, D),
    ),
    "Conv1d": (lambda: nn.Conv1d(D, 4, 3), lambda: nnx.Conv(D, 4, (3,), padding="VALID", rngs=rngs()), (2, 5, D)),
    "Conv2d in groups": (
        lambda: nn.Conv2d(D, 4, (3, 2), groups=2),
        lambda: nnx.Conv(D, 4, (3, 2), padding="VALID", feature_group_count=2, rngs=rngs()),
        (2, 5, 4, D),
    ),
    "Conv3d": (
        lambda: nn.Conv3d(D, 4, (3, 2, 1)),
        lambda: nnx.Conv(D, 4, (3, 2, 1), padding="VALID", rngs=rngs()),
        (2, 5, 4, 3, D),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_transfer_by_type_and_compute_the_same(name):
    make_torch, make_flax, shape = LAYERS[name]
    source, flax, back = drawn(make_torch()), make_flax(), drawn(make_torch(), 1)
    transfer(source, flax)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    first = len(shape) > 2
    with torch.no_grad(), jax.default_matmul_precision("highest"):
        given = torch.from_numpy(np.moveaxis(x, -1, 1) if first else x)
        expected = source(given).numpy()
        expected = np.moveaxis(expected, 1, -1) if first else expected
        np.testing.assert_allclose(np.asarray(flax(jnp.asarray(x))), expected, rtol=1e-4, atol=1e-4)
    transfer(flax, back)
    for key, value in source.state_dict().items():
        assert torch.equal(value, back.state_dict()[key]), key


def test_embeddings_transfer_by_type():
    source, target = drawn(nn.Embedding(7, D)), nnx.Embed(7, D, rngs=rngs())
    transfer(source, target)
    np.testing.assert_array_equal(target.embedding[...], source.weight.detach().numpy())


class TorchBlock(nn.Module):
    def __init__(self, attention=nn.MultiheadAttention):
        super().__init__()
        self.attn = attention(8, 2, batch_first=True)
        self.ln1, self.ln2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.ln2(x))))


class FlaxBlock(nnx.Module):
    def __init__(self, eps=1e-5, down=nnx.Linear):
        self.attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs())
        self.ln1, self.ln2 = nnx.LayerNorm(8, epsilon=eps, rngs=rngs()), nnx.LayerNorm(8, epsilon=1e-5, rngs=rngs())
        self.up, self.down = nnx.Linear(8, 12, rngs=rngs()), down(12, 8, rngs=rngs())

    def __call__(self, x):
        h = self.ln1(x)
        x = x + self.attn(h)
        return x + self.down(jax.nn.relu(self.up(self.ln2(x))))


@pytest.mark.parametrize("attention", [nn.MultiheadAttention, compat.MultiheadAttention], ids=["stock", "drop-in"])
def test_a_block_transfers_without_rules(attention):
    source, target, back = drawn(TorchBlock(attention)), FlaxBlock(), drawn(TorchBlock(attention), 1)
    assert not transfer(source, target).notes
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    with torch.no_grad(), jax.default_matmul_precision("highest"):
        expected = source(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(np.asarray(target(jnp.asarray(x))), expected, rtol=1e-4, atol=1e-3)
    transfer(target, back)
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in source.state_dict().items())


def test_the_report_notes_an_eps_that_differs():
    report = transfer(TorchBlock(), FlaxBlock(eps=1e-6))
    assert report.notes == ("ln1.eps is 1e-05 in the source and 1e-06 in the target",)
    assert "note: ln1.eps is 1e-05" in str(report)


def test_group_norms_of_other_groups_are_refused():
    with pytest.raises(ValueError, match=r"^configs differ: num_groups is 3 in the source and 2 in the target$"):
        transfer(nn.GroupNorm(3, D), nnx.GroupNorm(D, num_groups=2, rngs=rngs()))


def test_rules_of_the_user_replace_those_by_type():
    source, target = drawn(TorchBlock()), FlaxBlock()
    del target.up
    target.wide = nnx.Linear(8, 12, rngs=rngs())
    renamed = [Rule("up.weight", "wide.kernel", "o i -> i o"), Rule("up.bias", "wide.bias")]
    transfer(source, target, renamed)
    np.testing.assert_array_equal(target.wide.kernel[...], source.up.weight.detach().numpy().T)
    transfer(
        target,
        drawn(TorchBlock(), 1),
        [{"torch": one.torch, "flax": one.flax, "pattern": one.pattern} for one in renamed],
    )


def test_a_dropped_tensor_of_a_layer_keeps_its_numbers():
    source, target = drawn(TorchBlock()), FlaxBlock()
    rules = [Rule(torch="up.bias", drop="not here"), Rule(flax="up.bias", drop="not here")]
    transfer(source, target, rules)
    np.testing.assert_array_equal(target.up.bias[...], np.zeros(12))


def test_names_without_a_rule_are_listed_once_with_rules_for_them():
    source, target = TorchBlock(), FlaxBlock(down=lambda *sizes, rngs: nnx.LinearGeneral(*sizes, rngs=rngs))
    with pytest.raises(WeightsMismatchError) as caught:
        transfer(source, target)
    assert caught.value.missing == ["down.bias", "down.kernel"]
    assert caught.value.unexpected == ["down.bias", "down.weight"]
    assert str(caught.value) == (
        "weights do not match: missing: down.kernel; unexpected: down.weight; without a rule on both sides: down.bias; "
        "down is a Linear in the source and a LinearGeneral in the target; "
        "give rules=[Rule('down.bias', 'down.bias'), Rule('down.weight', 'down.kernel', 'o i -> i o')]"
    )


def test_a_tensor_of_the_source_alone_is_refused_with_the_rule_that_drops_it():
    source = TorchBlock()
    source.register_buffer("mask", torch.ones(2, 3))
    with pytest.raises(WeightsMismatchError) as caught:
        transfer(source, FlaxBlock())
    assert str(caught.value) == (
        "weights do not match: unexpected: mask; give rules=[Rule(torch='mask', drop='why')] to leave it out"
    )


def test_a_bias_of_one_side_alone_is_refused():
    with pytest.raises(WeightsMismatchError) as caught:
        transfer(nn.Linear(3, 4, bias=False), nnx.Linear(3, 4, rngs=rngs()))
    assert str(caught.value) == (
        "weights do not match: missing: bias; give rules=[Rule(flax='bias', drop='why')] to leave it out"
    )


class TorchPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.heads, self.norm = nn.Linear(3, 6), nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.heads(torch.tanh(self.fc(x))))


class FlaxPair(nnx.Module):
    def __init__(self):
        self.dense, self.norm = nnx.Linear(3, 6, rngs=rngs()), nnx.BatchNorm(8, epsilon=1e-5, rngs=rngs())
        self.heads = nnx.Param(jax.random.normal(jax.random.key(0), (6, 8)))

    def __call__(self, x):
        return self.norm(jax.numpy.tanh(self.dense(x)) @ self.heads[...], use_running_average=True)


@pytest.mark.parametrize("torch_first", [True, False], ids=["torch first", "Flax first"])
def test_the_pairing_of_a_comparison_serves_as_rules(torch_first):
    source, target = drawn(TorchPair()), FlaxPair()
    sides = (source, target) if torch_first else (target, source)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    report = parity.compare(*sides, x, seeds=1)
    assert report.pairing
    transfer(source, target, rules=report.pairing)
    np.testing.assert_array_equal(target.dense.kernel[...], source.fc.weight.detach().numpy().T)
    np.testing.assert_array_equal(target.heads[...], source.heads.weight.detach().numpy().T)
    back = drawn(TorchPair(), 1)
    transfer(target, back, rules=report.pairing)
    assert torch.equal(back.fc.weight, source.fc.weight)


@pytest.mark.parametrize("swap", [False, True], ids=["torch first", "Flax first"])
def test_pairs_of_heads_get_their_sizes_from_shapes(swap):
    source, target = nn.Linear(3, 8, bias=False), nnx.LinearGeneral(3, (2, 4), use_bias=False, rngs=rngs())
    pair = PairedParameter("weight", "kernel", "(h d) i -> i h d", "probe")
    pair = PairedParameter("kernel", "weight", "i h d -> (h d) i", "probe") if swap else pair
    transfer(source, target, rules=[pair])
    np.testing.assert_array_equal(
        target.kernel[...], source.weight.detach().numpy().reshape(2, 4, 3).transpose(2, 0, 1)
    )


def test_a_pair_of_a_part_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^weight\[query\] is a part of a tensor; give a Rule for all of weight$"):
        transfer(
            nn.Linear(3, 8),
            nnx.Linear(3, 8, rngs=rngs()),
            rules=[PairedParameter("weight[query]", "q.kernel", "o i -> i o", "name")],
        )


def test_a_pair_with_an_axis_read_backwards_is_refused():
    pair = PairedParameter("weight", "kernel", "o i -> i o, i backwards", "numbers")
    with pytest.raises(ValueError, match=r"^weight: o i -> i o, i backwards: no rule reads an axis backwards$"):
        transfer(nn.Linear(3, 8, bias=False), nnx.Linear(3, 8, use_bias=False, rngs=rngs()), rules=[pair])
