"""Running a side leaves the user's process unchanged: after errors, interrupts, and among threads."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from attn_parity.frameworks.torch.subject import subject_of
from attn_parity.sides.subject import Arguments, CannotPromoteError, ModuleFailedError

from .modules import Stack, X, assert_same, run


class Trouble(nn.Module):
    """Changes what it can reach, and then does what it is told."""

    def __init__(self, then):
        super().__init__()
        self.linear, self.norm, self.then = nn.Linear(6, 6), nn.BatchNorm1d(5), then
        self.register_buffer("cache", None)
        self.register_buffer("table", torch.ones(6))
        self.history, self.plain, self.seen = [], torch.zeros(6), {}
        self.norm.train()
        self.linear.eval()

    def forward(self, x):
        self.cache = x.detach()
        self.table.add_(1.0)
        self.history.append(x)
        self.seen["x"] = {"deep": x}
        if x.dtype == torch.float32:
            self.plain.add_(1.0)
        self.new = x
        self.linear.register_forward_hook(lambda *_: None)
        random.random()
        np.random.rand()
        torch.rand(2)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(True)
        x = self.norm(self.linear(x))
        self.train(not self.training)
        self.then(x)
        return x


def interrupt(x):
    raise KeyboardInterrupt


def interrupt_later(x):
    if x.requires_grad:
        x.register_hook(interrupt)


def fail(x):
    raise LookupError("planned")


def state_of(module):
    children = [child for _, child in module.named_modules()]
    return [
        [child.training for child in children],
        [{name: id(value) for name, value in child.__dict__.items()} for child in children],
        [len(child._forward_hooks) for child in children],
        [(name, id(one), one.requires_grad, one.grad, one._version) for name, one in module.named_parameters()],
        [(name, id(one)) for name, one in module.named_buffers()],
        (list(module.history), dict(module.seen), module.plain.tolist(), module.table.tolist()),
        (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()),
        torch.are_deterministic_algorithms_enabled(),
        (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            np.random.get_state()[2],
        ),
        (len(torch.overrides._get_current_function_mode_stack()), torch._C._len_torch_dispatch_stack()),
    ]


@pytest.mark.parametrize("then", [lambda x: None, fail, interrupt, interrupt_later], ids=lambda one: one.__name__)
@pytest.mark.parametrize("mode", ["eager", "float64", "jitter", "tables", "logsumexp", "flash", "record", "train"])
def test_a_run_restores_all_state(then, mode):
    module = Trouble(then)
    subject = subject_of(module, train=mode == "train")
    before, weights, arguments = state_of(module), subject.weights(), Arguments((X,))
    error = None
    try:
        if mode == "record":
            subject.substituted(weights, arguments, [X], {})
        elif mode in ("eager", "float64", "train"):
            subject.run(weights, arguments, [X], dtype="float64" if mode == "float64" else None)
        else:
            subject.run(weights, arguments, [X], mode=mode)
    except (KeyboardInterrupt, ModuleFailedError, CannotPromoteError) as caught:
        error = caught
    assert state_of(module) == before
    expected = {fail: (ModuleFailedError, CannotPromoteError), interrupt: KeyboardInterrupt}.get(then, type(None))
    if then is interrupt_later:
        expected = KeyboardInterrupt
    assert isinstance(error, expected)
    if then is fail:
        assert str(error).startswith("torch module Trouble raised LookupError: planned (")
    np.testing.assert_array_equal(X, np.random.default_rng(0).normal(size=X.shape).astype(np.float32))


def test_eight_threads_get_the_results_of_one():
    import concurrent.futures

    subjects = [subject_of(Stack(how)) for how in (None, True, False, None)] * 2
    options = [{"dtype": "float64"}, {}] * 4
    wanted = [run(subject, **one) for subject, one in zip(subjects, options, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(run, subject, **one) for subject, one in zip(subjects, options, strict=True)]
        for job, expected in zip(jobs, wanted, strict=True):
            assert_same(job.result(), expected)
    assert torch.get_default_dtype() == torch.float32


def test_weights_read_during_a_run_are_the_modules():
    import concurrent.futures

    read = []

    class Reading(nn.Linear):
        def forward(self, x):
            read.append(pool.submit(subject.weights))
            with contextlib.suppress(concurrent.futures.TimeoutError):
                read[0].result(timeout=0.3)  # it waits for the run's end, or reads at once
            return super().forward(x)

    module = Reading(6, 2)
    subject = subject_of(module)
    moved = {name: array + 1.0 for name, array in subject.weights().items()}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        subject.run(moved, Arguments((X,)), dtype="float64")
        found = read[0].result()
    assert {array.dtype.name for array in found.values()} == {"float32"}
    np.testing.assert_array_equal(found["weight"], module.weight.detach().numpy())


def test_a_run_seeds_no_device_that_is_not_in_use(monkeypatch):
    """torch would keep the seed for the device's first use, long after the comparison."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use")
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("CUDA was seeded"))
    subject = subject_of(nn.Linear(3, 2))
    subject.run(subject.weights(), Arguments((np.ones((1, 3), np.float32),), {}))


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_do_not_import_sympy(accumulate):
    program = (
        "import sys, torch\n"
        "from attn_parity.frameworks.torch.running.execution import gradients_of\n"
        "x = torch.ones(2, requires_grad=True)\n"
        f"(got,) = gradients_of([x * 3], [torch.tensor([2.0, 5.0])], [x], {accumulate}, lambda _, one: one.numpy())\n"
        "print(got.tolist(), 'sympy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[6.0, 15.0] False\n"


def test_weights_that_were_read_do_not_follow_the_module():
    linear = nn.Linear(6, 2)
    found = subject_of(linear).weights()
    before = {name: array.copy() for name, array in found.items()}
    with torch.no_grad():
        linear.weight.add_(1.0)
    for name, array in before.items():
        np.testing.assert_array_equal(found[name], array)
