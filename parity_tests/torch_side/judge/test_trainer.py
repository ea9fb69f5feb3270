"""Training steps of torch modules: checkpoints of either kind change nothing, and one step runs at a time."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_parity.frameworks.torch.running.state import ONE_AT_A_TIME
from attn_parity.frameworks.torch.training import Trainer, optimizer
from attn_parity.sides.dropout_masks import Masks
from attn_parity.sides.subject import Arguments, ModuleFailedError
from attn_parity.training.stepping import Hyperparameters

X, Y = (np.random.default_rng(seed).normal(size=(4, 6)).astype(np.float32) for seed in (0, 1))


class Net(nn.Module):
    def __init__(self, how=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.how = how

    def block(self, x):
        return x + self.drop(torch.tanh(self.inner(self.drop(x))))

    def forward(self, x):
        x = self.norm(self.first(self.drop(x)))
        for _ in range(2):
            x = self.block(x) if self.how is None else checkpoint(self.block, x, use_reentrant=self.how)
        return x


def trainer(module, loss="mse", **options):
    return Trainer(module, loss, optimizer("adamw", Hyperparameters(lr=0.1), ["first.weight"]), **options)


def weights_of(module):
    return {name: one.detach().numpy().copy() for name, one in module.state_dict().items()}


def steps(module, count=3, **options):
    """Return what each step found, the masks it drew, and the weights after it."""
    one, weights = trainer(module, **options), weights_of(module)
    if options.get("dtype"):
        weights = {name: array.astype(np.float64) for name, array in weights.items()}
    state, found = one.first_state(), []
    for step in range(count):
        masks = Masks(0, step)
        taken = one.gradients(weights, Arguments((X,)), Y, masks)
        weights, state = one.update({**weights, **taken.statistics}, taken.gradients, state)
        found.append((taken, masks.draws, weights))
    return found


@pytest.mark.parametrize("how", [True, False])
@pytest.mark.parametrize("options", [{}, {"dtype": "float64"}, {"dropout": False}])
def test_a_checkpoint_changes_no_step(how, options):
    module = Net(how)
    for (ours, draws, after), (theirs, its_draws, its_after) in zip(
        steps(module, **options), steps(Net(), **options), strict=True
    ):
        assert ours.loss == theirs.loss
        assert ours.foreign == theirs.foreign
        assert len(draws) == len(its_draws) == (0 if options.get("dropout") is False else 5)
        for one, two in ((ours.gradients, theirs.gradients), (ours.statistics, theirs.statistics), (after, its_after)):
            assert one.keys() == two.keys()
            for name, array in one.items():
                np.testing.assert_array_equal(array, two[name], err_msg=name)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    "loss", [lambda out, y: torch.square(out - y), lambda out, y: torch.square(y).mean()], ids=["many", "constant"]
)
def test_a_loss_must_be_a_scalar_of_the_weights(loss):
    with pytest.raises(ModuleFailedError, match=r"^torch module Net raised ValueError: the loss must be one number"):
        steps(Net(), loss=loss)


def test_a_backward_pass_that_fails_says_why():
    def refuse(_):
        raise RuntimeError("no way back")

    def loss(out, _):
        out.register_hook(refuse)
        return out.sum()

    with pytest.raises(
        ModuleFailedError, match=r"^torch module Net raised RuntimeError: no way back \(.*test_trainer\.py:\d+\)$"
    ):
        steps(Net(), loss=loss)


@pytest.mark.parametrize("what", ["gradients", "update"])
def test_a_step_waits_for_what_runs(what):
    module = Net()
    one, weights = trainer(module), weights_of(module)
    gradients = one.gradients(weights, Arguments((X,)), Y, Masks(0)).gradients
    calls = {
        "gradients": lambda: one.gradients(weights, Arguments((X,)), Y, Masks(0)),
        "update": lambda: one.update(weights, gradients, one.first_state()),
    }
    thread = threading.Thread(target=calls[what])
    with ONE_AT_A_TIME:
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()


class Counting(torch.optim.SGD):
    """Divides the learning rate by the number of its step, which it counts in a plain integer."""

    def step(self):
        for parameter in (one for group in self.param_groups for one in group["params"]):
            count = self.state[parameter].get("count", 0) + 1
            self.state[parameter]["count"] = count
            with torch.no_grad():
                parameter -= 0.1 / count * parameter.grad


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optimizer("momentum", Hyperparameters(lr=0.1, momentum=0.9), []), {"lr": 0.1, "momentum": 0.9}),
        (Counting, None),
    ],
    ids=["momentum", "of a user"],
)
def test_steps_are_those_of_torchs_optimizer(ours, theirs):
    module = nn.Linear(6, 6)
    one = Trainer(module, "mse", ours)
    weights, state = weights_of(module), one.first_state()
    for step in range(3):
        taken = one.gradients(weights, Arguments((X,)), Y, Masks(0, step))
        weights, state = one.update(weights, taken.gradients, state)
    alone = Counting(module.parameters()) if theirs is None else torch.optim.SGD(module.parameters(), **theirs)
    for _ in range(3):
        alone.zero_grad()
        nn.functional.mse_loss(module(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        alone.step()
    for key, array in weights_of(module).items():
        np.testing.assert_allclose(weights[key], array, rtol=0, atol=1e-6)
