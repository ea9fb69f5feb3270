"""`compare` in train mode: both sides drop by the same masks, and masks that only one side asks for are named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.random import bernoulli
from torch import nn
from torch.nn import functional
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import jax_attn
from attn_bridge import parity
from attn_bridge.cli.app import run
from attn_parity.results.findings import shown
from attn_parity.sides.dropout_masks import Draw, Masks, differences
from jax_attn.random import TorchRngs

RATE, BATCH, TIME, WIDTH = 0.3, 3, 5, 8
X = np.random.default_rng(0).normal(size=(BATCH, TIME, WIDTH)).astype(np.float32)


class TorchNet(nn.Module):
    """A linear layer, and after it whatever drops."""

    def __init__(self, drop, child=None):
        super().__init__()
        self.fc, self.drop, self.child = nn.Linear(WIDTH, WIDTH), drop, child

    def forward(self, x):
        x = torch.tanh(self.fc(x))
        return self.drop(x) if self.child is None else self.drop(self.child, x)


class FlaxNet(nnx.Module):
    def __init__(self, drop, child=None):
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.drop, self.child, self.rngs = drop, nnx.data(child), nnx.Rngs(3)

    def __call__(self, x):
        x = jnp.tanh(self.fc(x))
        return self.drop(self, x) if self.child is None else self.child(x)


def compare(ours, theirs, inputs=X, **options):
    torch.manual_seed(0)
    return parity.compare(ours, theirs, inputs, train=True, seeds=1, **options)


def keep(self, x, shape=None):
    return jax.random.bernoulli(self.rngs.dropout(), 1 - RATE, shape or x.shape)


def scaled(mask, x):
    return jnp.where(mask, x / (1 - RATE), 0.0)


@jax.jit
def compiled(key, x):
    return scaled(jax.random.bernoulli(key, 1 - RATE, x.shape), x)


# ---- what is driven

ELEMENTWISE = FlaxNet(None, nnx.Dropout(RATE, rngs=nnx.Rngs(1)))
PER_CHANNEL = FlaxNet(None, nnx.Dropout(RATE, broadcast_dims=(2,), rngs=nnx.Rngs(1)))

TORCH_FORMS = {
    "nn.Dropout": nn.Dropout(RATE),
    "in place": lambda x: functional.dropout(x + 0.0, RATE, True, True),
    "F.dropout": lambda x: functional.dropout(x, RATE),
    "F.dropout by another name": lambda x: dropout(x, p=RATE, training=True),
    "torch.dropout": lambda x: torch.dropout(x, RATE, True),
    "torch.bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 1 - RATE)) / (1 - RATE),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(1 - RATE).div(1 - RATE),
}


@pytest.mark.parametrize("form", TORCH_FORMS)
def test_every_way_to_drop_elements_in_torch(form):
    report = compare(TorchNet(TORCH_FORMS[form]), ELEMENTWISE)
    assert report.verdict == "equal", report.explain()
    assert "train mode: both sides drop by the same masks, 1 per call" in report.notes
    assert not any("off in eval mode" in one for one in report.unreached)


FLAX_FORMS = {
    "nnx.Dropout without a stream": (None, nnx.Dropout(RATE)),
    "jax.random.bernoulli": (lambda self, x: scaled(keep(self, x), x), None),
    "bernoulli by another name": (lambda self, x: scaled(bernoulli(self.rngs(), 1 - RATE, x.shape), x), None),
    "bernoulli of a stream": (lambda self, x: scaled(self.rngs.dropout.bernoulli(1 - RATE, x.shape), x), None),
    "compiled inside": (lambda self, x: compiled(self.rngs(), x), None),
    "ours": (None, jax_attn.dropout.Dropout(RATE, rngs=nnx.Rngs(0))),
    "ours with torch's numbers": (None, jax_attn.dropout.Dropout(RATE, rngs=TorchRngs(0))),
}


@pytest.mark.parametrize("form", FLAX_FORMS)
def test_every_way_to_drop_elements_in_flax(form):
    report = compare(TorchNet(nn.Dropout(RATE)), FlaxNet(*FLAX_FORMS[form]))
    assert report.verdict == "equal", report.explain()


@pytest.mark.parametrize("drop", [nn.Dropout1d(RATE), lambda x: functional.dropout2d(x[..., None], RATE)[..., 0]])
def test_whole_channels(drop):
    assert compare(TorchNet(drop), PER_CHANNEL).verdict == "equal"
    report = compare(TorchNet(drop), ELEMENTWISE)
    assert report.verdict == "different"
    assert "the mask is shared over " in report.tensors[0].message
    assert " in torch" in report.tensors[0].message


def test_a_path_that_is_dropped_as_a_whole():
    ours = TorchNet(lambda x: x * x.new_empty(BATCH, 1, 1).bernoulli_(1 - RATE) / (1 - RATE))
    theirs = FlaxNet(lambda self, x: x * keep(self, x, (BATCH, 1, 1)) / (1 - RATE))
    assert compare(ours, theirs).verdict == "equal"


def test_axes_in_another_order():
    theirs = FlaxNet(lambda self, x: scaled(keep(self, x, (TIME, BATCH, WIDTH)).transpose(1, 0, 2), x))
    assert compare(TorchNet(nn.Dropout(RATE)), theirs).verdict == "equal"


class TorchAttention(nn.Module):
    def __init__(self, need_weights=True):
        super().__init__()
        self.attn, self.drop = nn.MultiheadAttention(WIDTH, 2, dropout=RATE, batch_first=True), nn.Dropout(0.1)
        self.need_weights = need_weights

    def forward(self, x):
        return self.drop(self.attn(x, x, x, need_weights=self.need_weights)[0])


class FlaxAttention(nnx.Module):
    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.attn = nnx.MultiHeadAttention(2, WIDTH, dropout_rate=RATE, decode=False, rngs=rngs, **options)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.attn(x))


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_of_both_frameworks(need_weights):
    report = compare(TorchAttention(need_weights), FlaxAttention(broadcast_dropout=False))
    assert report.verdict == "equal", report.explain()
    assert "train mode: both sides drop by the same masks, 2 per call" in report.notes


def test_a_dropout_mask_shared_over_heads_is_different():
    report = compare(TorchAttention(), FlaxAttention())
    assert report.verdict == "different"
    assert (report.tensors[0].name, report.tensors[0].flax_name) == ("dropout attn", "dropout attn")
    assert report.tensors[0].message == (
        "the mask is shared over batch and heads in Flax (broadcast_dropout=True): (1, 1, 5, 5); "
        "torch draws (3, 2, 5, 5)"
    )
    assert report.first_divergence.path == "attn"


# ---- faults


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (lambda self, x: x, "torch draws a mask of (3, 5, 8) at rate 0.3, Flax none"),
        (lambda self, x: scaled(keep(self, x), scaled(keep(self, x), x)), "Flax draws a mask of (3, 5, 8) at rate 0.3"),
        (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), "masks of shape (3, 5, 8): rate 0.3 in torch, 0.5 in Flax"),
        (nnx.Dropout(RATE, broadcast_dims=(1,), rngs=nnx.Rngs(0)), "shared over axis 1 in Flax (broadcast_dims=(1,))"),
    ],
)
def test_other_masks_are_named(drop, message):
    theirs = FlaxNet(None, drop) if isinstance(drop, nnx.Module) else FlaxNet(drop)
    report = compare(TorchNet(nn.Dropout(RATE)), theirs)
    assert report.verdict == "different"
    assert message in report.tensors[0].message
    assert report.tensors[0].kind == "dropout"
    assert report.tensors[0].name in ("dropout", "dropout drop")


def test_a_wrong_scale_is_found_where_it_is():
    class Unscaled(nnx.Dropout):
        def __call__(self, inputs):
            return inputs if self.deterministic else super().__call__(inputs) * (1 - self.rate)

    report = compare(TorchNet(nn.Dropout(RATE)), FlaxNet(None, Unscaled(RATE, rngs=nnx.Rngs(0))))
    assert report.verdict == "different"
    assert report.tensors[0].name == "output"
    assert parity.compare(TorchNet(nn.Dropout(RATE)), FlaxNet(None, Unscaled(RATE)), X, seeds=1).verdict == "equal"


def test_an_ambiguous_mask_order_is_inconclusive():
    theirs = FlaxNet(lambda self, x: scaled(keep(self, x, (BATCH * TIME, WIDTH)).reshape(x.shape), x))
    report = compare(TorchNet(nn.Dropout(RATE)), theirs)
    assert report.verdict == "inconclusive"
    assert report.message.startswith("the masks hold as many elements, in an order that can't be told: (3, 5, 8)")


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_other_random_numbers_leave_it_open(side):
    ours = TorchNet(lambda x: x + (torch.rand_like(x) if side == "torch" else 0.0))
    theirs = FlaxNet(lambda self, x: x + (jax.random.uniform(self.rngs(), x.shape) if side == "flax" else 0.0))
    report = compare(ours, theirs)
    assert report.verdict == "inconclusive"
    assert report.message.startswith(f"the {shown(side)} module draws random numbers that are no dropout masks")


def again(child, x):
    return checkpoint(functional.dropout, x, RATE, use_reentrant=False, preserve_rng_state=False)


REFUSED = {
    "alpha_dropout": (TorchNet(nn.AlphaDropout(RATE)), ELEMENTWISE, "alpha_dropout is not driven by given masks"),
    "checkpoint": (TorchNet(again, nn.Identity()), ELEMENTWISE, "drawn again in the backward pass"),
    "vmap": (
        TorchNet(lambda x: torch.vmap(functional.dropout, randomness="different")(x)),
        ELEMENTWISE,
        "torch.vmap is not driven",
    ),
    "several probabilities": (
        TorchNet(lambda x: x * torch.bernoulli(torch.sigmoid(x))),
        ELEMENTWISE,
        "torch.bernoulli with several probabilities",
    ),
    "an array of probabilities": (
        TorchNet(nn.Dropout(RATE)),
        FlaxNet(lambda self, x: x * jax.random.bernoulli(self.rngs(), jax.nn.sigmoid(x))),
        "with a probability that is an array is not driven",
    ),
    "jax.vmap": (
        TorchNet(nn.Dropout(RATE)),
        FlaxNet(
            lambda self, x: jax.vmap(lambda key, x: scaled(jax.random.bernoulli(key, 1 - RATE, x.shape), x))(
                jax.random.split(self.rngs(), len(x)), x
            )
        ),
        "a dropout mask per element of jax.vmap",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_undrivable_dropout_is_refused_in_one_line(name):
    ours, theirs, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as found:
        compare(ours, theirs)
    assert "\n" not in str(found.value)


# ---- masks


def test_equal_shaped_masks_are_drawn_in_order():
    masks, turned = Masks(7), Masks(7)
    first, second = masks.draw((2, 3, 4), 0.5), masks.draw((2, 3, 4), 0.5)
    assert (first != second).any()
    assert (turned.draw((3, 4, 2), 0.5) == first.transpose(1, 2, 0)).all()
    assert (turned.draw((1, 2, 3, 1, 4), 0.5)[0, :, :, 0] == second).all()
    assert (Masks(8).draw((2, 3, 4), 0.5) != first).any()
    assert (Masks(7, 1).draw((2, 3, 4), 0.5) != first).any()


def test_common_masks_do_not_count_as_differences():
    draws = [Draw((2, 3), 0.9), Draw((4,), 0.9), Draw((2, 3), 0.8)]
    assert differences(draws, [Draw((4, 1), 0.9), Draw((3, 2), 0.9), Draw((2, 3), 0.8)]) == []
    (found,) = differences(draws, draws[:2])
    assert (found.first, found.second) == (draws[2], None)


# ---- manners


def test_the_modules_are_left_as_they_were():
    ours, theirs = TorchNet(nn.Dropout(RATE)).eval(), FlaxNet(None, nnx.Dropout(RATE, rngs=nnx.Rngs(0)))
    theirs.eval()
    random = torch.get_rng_state()
    assert parity.compare(ours, theirs, X, train=True, seeds=1).verdict == "equal"
    assert torch.equal(torch.get_rng_state(), random)
    assert not ours.training
    assert not ours.drop.training
    assert theirs.child.deterministic
    assert functional.dropout is dropout
    assert jax.random.bernoulli is bernoulli


def test_batch_norm_uses_the_batch_in_train_mode():
    class Normed(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, epsilon=1e-5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x)

    class TorchNormed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    ours = TorchNormed()
    before = ours.norm.running_mean.clone()
    report = compare(ours, Normed())
    assert report.verdict == "equal", report.explain()
    assert "running statistics that train mode changes are not compared; parity.train does that" in report.notes
    assert torch.equal(ours.norm.running_mean, before)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^train=True goes with modes=\('eager',\) only"):
        compare(TorchNet(nn.Dropout(RATE)), ELEMENTWISE, modes=("eager", "jit"))
    with pytest.raises(TypeError, match=r"^train must be True or False, got int$"):
        parity.compare(TorchNet(nn.Dropout(RATE)), ELEMENTWISE, X, train=1)


PAIR = """
import jax.numpy as jnp
import torch
from flax import nnx

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))

def make_flax():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.4, rngs=rngs))
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair_to_train.py").write_text(PAIR)
    given = ["compare", "pair_to_train.py:make", "pair_to_train.py:make_flax", "--shape", "3,4", "--seeds", "1"]
    assert run(given) == 0
    capsys.readouterr()
    assert run([*given, "--train"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "dropout 1 different masks of shape (3, 4): rate 0.5 in torch, 0.4 in Flax" in shown
    assert "attn-bridge compare pair_to_train.py:make pair_to_train.py:make_flax --shape 3,4 --train" in shown
    for more, message in (
        (["--mode", "jit"], "--train goes with --mode eager only"),
        (["--separate"], "--train needs"),
    ):
        assert run([*given, "--train", *more]) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")
