"""`parity.train`: right pairs train alike, and every planted fault is named by its step and tensor."""

from __future__ import annotations

import functools
import json
import runpy
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from torch import nn

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import parity
from attn_parity.frameworks.torch.drawing import drawing
from attn_parity.sides.dropout_masks import Masks
from attn_parity.training.free_runs import drift
from parity_tests.support.calls import cover
from torch_attn.random import JaxRngs

LR, RATE = 1e-2, 0.25


class TorchNet(nn.Module):
    def __init__(self, rate=RATE):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 8), nn.LayerNorm(8, eps=1e-6), nn.Linear(8, 3)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


class FlaxNet(nnx.Module):
    def __init__(self, rate=RATE, dropout=nnx.Dropout):
        rngs = nnx.Rngs(7)
        self.a, self.norm, self.b = (
            nnx.Linear(5, 8, rngs=rngs),
            nnx.LayerNorm(8, rngs=rngs),
            nnx.Linear(8, 3, rngs=rngs),
        )
        self.drop = dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(jnp.tanh(self.norm(self.a(x)))))


def torch_net(**options):
    torch.manual_seed(3)
    return TorchNet(**options)


def data(count=3):
    random = np.random.default_rng(0)
    return [(random.normal(size=(6, 5)), random.normal(size=(6, 3))) for _ in range(count)]


def adamw(named, kind=torch.optim.AdamW):
    decayed = [pair for pair in named if pair[1].ndim > 1]
    others = [pair for pair in named if pair[1].ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return kind(groups, lr=LR)


def matrices(parameters):
    return {name: one.ndim > 1 for name, one in parameters.items()}


def train(torch_module=None, flax_module=None, **options):
    return parity.train(
        torch_module or torch_net(), flax_module or FlaxNet(), data(), **{"steps": 4, "lr": LR, **options}
    )


# ---- right pairs


@functools.cache
def right_report(optimizer):
    """Return the report on eight steps of a right pair with dropout, which several tests read."""
    return train(optimizer=optimizer, steps=8)


@cover.some("optimizer", ["sgd", "momentum", "adamw"], always=["momentum", "adamw"])
def test_a_right_pair_trains_alike_with_dropout(optimizer):
    report = right_report(optimizer)
    assert report.verdict == "equal", report.explain()
    assert report.first_difference is None
    exact = [np.array(report.losses[name]) for name in ("torch float64", "flax float64")]
    np.testing.assert_allclose(*exact, rtol=1e-12)
    assert len(exact[0]) == 8
    assert len(set(exact[0])) == 8
    assert {"loss", "grad a.weight", "grad a.bias", "update a.weight", "update norm.bias"} <= {
        one.name for one in report.tensors
    }
    slots = {"sgd": set(), "momentum": {"trace"}, "adamw": {"mu", "nu"}}[optimizer]
    assert {one.name.split()[0] for one in report.tensors} == {"loss", "grad", "update", *slots}
    assert report.raise_for_mismatch() is report


def test_float64_alone_and_a_rate_of_numpy():
    report = train(dtype="float64", lr=np.float32(0.05))
    assert report.verdict == "equal", report.explain()
    assert report.dtype == "float64"
    np.testing.assert_allclose(report.losses["torch"], report.losses["flax"], rtol=1e-12)


def test_a_pair_of_optimizers_and_of_losses():
    def of_torch(result, targets):
        return torch.abs(result - targets).mean()

    def of_flax(result, targets):
        return jnp.abs(result - targets).mean()

    pair = (adamw, optax.adamw(LR, weight_decay=0.01, mask=matrices))
    assert train(optimizer=pair, loss=(of_torch, of_flax)).verdict == "equal"
    report = train(optimizer=pair, loss=(of_torch, lambda result, targets: 2.0 * of_flax(result, targets)))
    assert (report.first_difference.step, report.first_difference.tensor) == (1, "loss")


def our_models(rngs=None):
    config = {"vocab_size": 11, "context_length": 6, "emb_dim": 8, "n_heads": 2, "n_layers": 1}
    config |= {"drop_rate": 0.1, "qkv_bias": True}
    torch.manual_seed(1)
    pair = torch_attn.GPTModel(config, rngs=rngs), jax_attn.GPTModel(config, rngs=nnx.Rngs(5))
    ids = np.random.default_rng(2).integers(0, 11, (3, 7))
    return pair, [(ids[:, :-1], ids[:, 1:])]


def test_our_model_trains_alike():
    pair, text = our_models()
    report = parity.train(*pair, text, steps=3, loss="cross_entropy", lr=LR)
    assert report.verdict == "equal", report.explain()


def test_another_rate_in_our_model_whose_masks_are_jaxs():
    pair, text = our_models(JaxRngs(0))
    pair[1].trf_blocks[0].drop_shortcut.rate = 0.2
    report = parity.train(*pair, text, steps=1, loss="cross_entropy", dtype="float64")
    assert report.first_difference.tensor == "dropout trf_blocks.0.drop_shortcut"
    assert report.first_difference.message == "masks of shape (3, 6, 8): rate 0.1 in torch, 0.2 in Flax"


# ---- four layers, two hundred steps


class TorchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6, eps=1e-6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class TorchDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([TorchLayer() for _ in range(4)])
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class FlaxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(6, use_fast_variance=False, rngs=rngs)
        self.up, self.down = nnx.Linear(6, 9, rngs=rngs), nnx.Linear(9, 6, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(jnp.tanh(self.up(self.norm(x)))))


class FlaxDeep(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(1)
        self.layers = nnx.List([FlaxLayer(rngs) for _ in range(4)])
        self.out = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def train_deep(flax_module=None, **options):
    random = np.random.default_rng(4)
    batches = [(random.normal(size=(5, 6)), random.normal(size=(5, 3))) for _ in range(4)]
    return parity.train(TorchDeep(), flax_module or FlaxDeep(), batches, **{"lr": LR, "seed": 3, **options})


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [pytest.param("float64", 200, marks=pytest.mark.full), (None, 20)],
)
def test_four_layers_train_alike(dtype, steps):
    report = train_deep(dtype=dtype, steps=steps)
    assert report.verdict == "equal", report.explain()
    ours, theirs = (np.array(report.losses[f"{side} float64" if dtype is None else side]) for side in ("torch", "flax"))
    assert len(ours) == len(theirs) == steps
    assert (np.abs(ours - theirs) <= 1e-9 * np.abs(ours)).all()
    assert ours[-4:].mean() < 0.9 * ours[:4].mean()


@pytest.mark.parametrize(
    ("changed", "tensor"),
    [
        pytest.param({"b1": 0.999, "b2": 0.9}, "mu layers.0.norm.weight", marks=pytest.mark.full),
        ({"mask": None}, "update layers.0.norm.weight"),
        (None, "loss"),
    ],
    ids=["betas swapped", "biases decay", "dropout scaled wrongly"],
)
def test_a_fault_in_four_layers_is_named(changed, tensor):
    theirs = FlaxDeep()
    if changed is None:
        theirs.layers[2].drop = ScaledWrongly(0.1, rngs=nnx.Rngs(0))
    values = {"learning_rate": LR, "weight_decay": 0.01, "mask": matrices, **(changed or {})}
    report = train_deep(theirs, optimizer=(adamw, optax.adamw(**values)), steps=2, dtype="float64")
    assert report.verdict == "different"
    assert (report.first_difference.step, report.first_difference.tensor) == (1, tensor)


def test_the_seed_gives_weights_order_and_masks():
    @functools.cache
    def losses(seed, torch_seed, **options):
        torch.manual_seed(torch_seed)
        report = train(TorchNet(), seed=seed, dtype="float64", steps=2, **options)
        assert report.verdict == "equal", report.explain()
        return report.losses["torch"]

    assert losses(5, 0) == losses(5, 1)
    assert losses(5, 0) != losses(6, 0)
    assert losses(5, 0, dropout=False)[:1] != losses(6, 0, dropout=False)[:1]
    assert losses(None, 0) != losses(None, 1)


# ---- planted faults


class ScaledWrongly(nnx.Dropout):
    def __call__(self, inputs):
        return super().__call__(inputs) * (1.0 - self.rate)


def spare(name):
    return lambda parameters: {one: is_matrix or one == name for one, is_matrix in matrices(parameters).items()}


FAULTS = {
    "betas swapped": ({"b1": 0.999, "b2": 0.9}, {}, "mu a.weight"),
    "b2 a little off": ({"b2": 0.9990001}, {}, "nu a.weight"),
    "first moment in bfloat16": ({"mu_dtype": jnp.bfloat16}, {}, "mu a.weight"),
    "a bias decays": ({"mask": spare("a.bias")}, {}, "update a.bias"),
    "nothing decays": ({"weight_decay": 0.0}, {}, "update a.weight"),
    "eps inside the root": ({"eps": 0.0, "eps_root": 1e-8}, {}, "update a.weight"),
    "lr a little off": ({"learning_rate": LR * (1 + 1e-9)}, {}, "update a.weight"),
    "dropout scaled wrongly": ({}, {"dropout": ScaledWrongly}, "loss"),
    "another rate": ({}, {"rate": 0.3}, "dropout drop"),
}


@cover.some(
    "name",
    list(FAULTS),
    always=["betas swapped", "first moment in bfloat16", "a bias decays", "eps inside the root", "another rate"],
)
def test_a_planted_fault_is_named(name):
    changed, net, tensor = FAULTS[name]
    values = {"learning_rate": LR, "weight_decay": 0.01, "mask": matrices, **changed}
    report = train(flax_module=FlaxNet(**net), optimizer=(adamw, optax.adamw(**values)), steps=1, dtype="float64")
    assert report.verdict == "different"
    assert (report.first_difference.step, report.first_difference.tensor) == (1, tensor)
    with pytest.raises(parity.ParityError, match=f"first difference at step 1 in {tensor}"):
        report.raise_for_mismatch()


def test_a_fault_is_named_at_its_first_step():
    net = torch_net()
    nn.init.zeros_(net.a.bias)  # what is zero does not decay
    report = train(net, optimizer=(adamw, optax.adamw(LR, weight_decay=0.01, mask=spare("a.bias"))), steps=2)
    assert (report.first_difference.step, report.first_difference.tensor) == (2, "update a.bias")
    late = optax.piecewise_constant_schedule(LR, {2: 1.001})
    report = train(optimizer=(adamw, optax.adamw(late, weight_decay=0.01, mask=matrices)), dtype="float64")
    assert report.first_difference.step == 3
    assert report.first_difference.tensor == "update a.weight"


def test_a_dropout_mask_shared_over_the_batch_is_different():
    def shared(rate, rngs):
        return nnx.Dropout(rate, broadcast_dims=(0,), rngs=rngs)

    report = train(flax_module=FlaxNet(dropout=shared), steps=1)
    assert report.verdict == "different"
    assert report.first_difference.tensor == "dropout drop"
    assert "shared over axis 0 in Flax (broadcast_dims=(0,)): (1, 8)" in report.first_difference.message


def test_a_side_that_loses_precision():
    class Coarse(nnx.Dropout):
        def __call__(self, inputs):
            return super().__call__(inputs).astype(jnp.bfloat16).astype(inputs.dtype)

    report = train(flax_module=FlaxNet(dropout=Coarse))
    assert report.verdict == "precision"
    assert report.first_difference is None


class CoarseMoment(torch.optim.AdamW):
    """Keeps the first moment in bfloat16 where the parameters are float32."""

    def step(self, closure=None):
        loss = super().step(closure)
        for state in self.state.values():
            if state["exp_avg"].dtype == torch.float32:
                state["exp_avg"].copy_(state["exp_avg"].bfloat16())
        return loss


def coarse_moment(inner):
    """Keep the first moment of ``optax.adamw`` in bfloat16 where the parameters are float32."""

    def coarse(moment):
        return moment.astype(jnp.bfloat16).astype(moment.dtype) if moment.dtype == jnp.float32 else moment

    def update(gradients, state, parameters=None):
        updates, (adam, *rest) = inner.update(gradients, state, parameters)
        return updates, (adam._replace(mu=jax.tree.map(coarse, adam.mu)), *rest)

    return optax.GradientTransformation(inner.init, update)


@cover.some("side", ["torch", "flax"], always=["flax"])
def test_a_first_moment_that_is_kept_in_bfloat16(side):
    ours, theirs = adamw, optax.adamw(LR, weight_decay=0.01, mask=matrices)
    if side == "torch":
        ours = functools.partial(adamw, kind=CoarseMoment)
    else:
        theirs = coarse_moment(theirs)
    report = train(optimizer=(ours, theirs))
    assert report.verdict == "precision"
    assert f"{side} drifts" in report.message
    lossy = {tensor.name: tensor.side for tensor in report.tensors if tensor.verdict == "precision"}
    assert lossy["mu a.weight"] == side


class FlaxNormed(nnx.Module):
    def __init__(self, momentum=0.9):
        rngs = nnx.Rngs(1)
        self.a, self.norm = nnx.Linear(5, 3, rngs=rngs), nnx.BatchNorm(3, momentum=momentum, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.a(x))


@pytest.mark.parametrize(
    ("momentum", "tensor", "said"),
    [
        (
            0.9,
            "statistic norm.running_var",
            "norm.running_var takes in 1/(n/(n-1)) times as much variance in Flax as in torch, with n = 6: "
            "consistent with the unbiased variance on one side alone",
        ),
        (
            0.99,
            "statistic norm.running_mean",
            "norm.running_mean changes 0.1 times as much in Flax as in torch: "
            "consistent with another momentum (torch's momentum is one minus Flax's)",
        ),
    ],
)
def test_differing_running_statistics_are_explained(momentum, tensor, said):
    torch.manual_seed(2)
    net = nn.Sequential()
    net.add_module("a", nn.Linear(5, 3))
    net.add_module("norm", nn.BatchNorm1d(3))
    report = train(net, FlaxNormed(momentum), steps=2)  # torch keeps the unbiased variance, Flax the biased one
    assert (report.first_difference.step, report.first_difference.tensor) == (1, tensor)
    assert report.first_difference.message.endswith(f"; {said}")
    noted = "momentum of norm is 0.1 in torch and 0.01 (written 0.99) in Flax" in report.notes
    assert noted == (momentum == 0.99)


def test_other_random_numbers_of_flax_leave_it_open():
    class Noisy(FlaxNet):
        def __call__(self, x):
            return super().__call__(x + jax.random.normal(self.drop.rngs(), x.shape))

    report = train(flax_module=Noisy(), steps=1)
    assert report.verdict == "inconclusive"
    assert report.message.startswith("the Flax module draws random numbers")


def test_other_random_numbers_of_torch_leave_it_open():
    class Noisy(TorchNet):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    report = train(Noisy(), steps=1)
    assert report.verdict == "inconclusive"
    assert "random numbers" in report.message


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, ("equal", 0)),
        ({"flax and flax float64": [1e-7, 1e-4, 1e-4]}, ("precision", 2)),
        ({"torch and torch float64": [1e-7, 1e-7, 1e-4]}, ("precision", 3)),
        ({"torch float64 and flax float64": [1e-16, 1e-16, 1e-11]}, ("different", 3)),
        ({"flax float64": [1.0, 0.9 * (1 + 2e-9), 0.8]}, ("different", 2)),
    ],
)
def test_how_free_runs_may_drift(changed, verdict):
    pairs = ("torch and torch float64", "flax and flax float64", "torch and torch moved", "torch and flax")
    growth = {name: [1e-7, 2e-7, 3e-7] for name in pairs}
    growth |= {f"torch float64 and {name}": [1e-16, 2e-16, 3e-16] for name in ("flax float64", "torch float64 moved")}
    losses = {name: [1.0, 0.9, 0.8] for name in ("torch float64", "flax float64", "torch float64 moved")}
    for name, values in changed.items():
        (growth if " and " in name else losses)[name] = values
    assert drift(losses, growth, "float32")[:2] == verdict


# ---- masks


def test_masks_are_those_of_jax():
    masks = Masks(5, 2)
    key = jax.random.fold_in(jax.random.key(5), 2)
    for number, shape in ((0, (4, 6)), (1, (4, 6)), (0, (3,))):
        mine = jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(repr(shape).encode())), number)
        np.testing.assert_array_equal(masks.draw(shape, 0.75), jax.random.bernoulli(mine, 0.75, shape))


def test_dropout_is_off_or_at_another_rate():
    found = {}
    for dropout, own in ((False, 0.4), (0.5, 0.0), (0.25, 0.0)):
        report = train(torch_net(rate=own), FlaxNet(rate=own), dropout=dropout, dtype="float64")
        assert report.verdict == "equal", report.explain()
        found[dropout] = tuple(report.losses["torch"])
    assert len(set(found.values())) == 3


def test_torch_attention_drops_the_masks_it_is_given():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 4, 3) for _ in range(3))
    with drawing(Masks(0), nn.Module()):
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.5)
    keep = torch.from_numpy(Masks(0).draw((2, 2, 4, 4), 0.5))
    scores = torch.where(torch.ones(4, 4).tril() == 1, query @ key.mT / 3**0.5, -torch.inf)
    torch.testing.assert_close(found, (torch.softmax(scores, -1) * keep * 2.0) @ value)


# ---- manners


def test_the_modules_are_left_as_they_were():
    ours, theirs = torch_net().eval(), FlaxNet()
    before = {name: one.clone() for name, one in ours.state_dict().items()}
    state = jax.tree.map(np.asarray, nnx.state(theirs, nnx.Param))
    torch.manual_seed(9)
    random = torch.get_rng_state()
    train(ours, theirs, steps=1)
    assert not ours.training
    assert not ours.drop.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(one, before[name]) for name, one in ours.state_dict().items())
    assert all(one.grad is None for one in ours.parameters())
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, nnx.state(theirs, nnx.Param)), state)


def test_the_report_as_text_and_json(tmp_path):
    report = right_report("adamw")
    text = report.explain()
    assert text.splitlines()[0].startswith("equal: 8 steps of TorchNet (torch) and FlaxNet (Flax) in float32")
    assert "weight decay 0.01, decoupled" in text
    assert "2 of 6" in text
    report.to_json(tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["losses"] == report.losses
    assert found["verdict"] == "equal"
    assert len(found["growth"]["torch float64 and flax float64"]) == 8


BAD = [
    ({"steps": 0}, ValueError, "steps (0) must be a whole number of at least 1"),
    ({"loss": "cross_entropy"}, ValueError, "targets of cross_entropy must be whole numbers of at least 0"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[message.split(" (")[0] for _, _, message in BAD])
def test_bad_arguments(options, error, message):
    with pytest.raises(error) as found:
        train(**options)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_a_linen_side_is_refused_by_name():
    dense = linen.Dense(3)
    side = dense, dense.init(jax.random.key(0), jnp.ones((6, 5)))
    with pytest.raises(TypeError) as found:
        parity.train(nn.Linear(5, 3), side, data())
    assert str(found.value) == (
        "train takes a flax.nnx.Module as its second argument, got the Linen module Dense with its variables; "
        "compare with train=True judges it in train mode"
    )


def test_bad_data():
    with pytest.raises(ValueError, match="at least one pair of inputs and targets"):
        parity.train(torch_net(), FlaxNet(), [])
    with pytest.raises(ValueError, match="data must hold pairs of inputs and targets, got ndarray"):
        parity.train(torch_net(), FlaxNet(), [np.ones((6, 5))])


# ---- the example


def test_the_example(capsys, tmp_path):
    example = Path(attn_bridge.__file__).parent.parent / "examples" / "training.py"
    names = runpy.run_path(str(example))
    names["CONFIG"].update(n_layers=1, emb_dim=8)
    with pytest.raises(SystemExit) as end:
        names["main"](str(tmp_path / "curves.svg"), steps=2)
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("equal: 2 steps of GPTModel")
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == 2
