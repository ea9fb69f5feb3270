"""Running a side leaves the user's process unchanged: after errors, interrupts, and among threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core

from attn_parity.frameworks.jax.running.promotion import promoted
from attn_parity.frameworks.jax.subject import subject_of
from attn_parity.sides.patching import original, replaced
from attn_parity.sides.subject import Arguments, CannotPromoteError, ModuleFailedError

from .modules import Layer, X, normal


def test_no_barrier_aborts_the_process():
    """XLA ends the process where a barrier asks a batched product for a layout that it can't have."""
    code = """
        import jax, jax.numpy as jnp, numpy as np
        from attn_parity.frameworks.jax.running.execution import barred

        def heads(x, w):
            return jnp.einsum("bhi,hij->bhj", x.reshape(2, 3, 4), w)

        def both(x, w, c):
            y, pull = jax.vjp(heads, x, w)
            return y, *pull(c)

        operands = [np.ones(shape, np.float32) for shape in ((2, 12), (3, 4, 4), (2, 3, 4))]
        closed = jax.make_jaxpr(both)(*operands)
        found = jax.jit(barred(closed))(*operands)
        assert float(found[0][0, 0, 0]) == 4.0

        sizes = dict(a=2, b=2, h=3, i=4, j=5, q=3, k=4, d=2)
        for text in ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", "bij,bkj->kbi", "bhi,hij->jhb", "abhi,ahij->bajh"):
            shapes = [[sizes[one] for one in word] for word in text.split("->")[0].split(",")]

            def program(*flat):
                operands = [jnp.sin(one).reshape(shape) for one, shape in zip(flat, shapes)]
                return jnp.tanh(jnp.einsum(text, *operands)).T

            flat = [np.ones((2, int(np.prod(shape)) // 2), np.float32) for shape in shapes]
            closed = jax.make_jaxpr(lambda *flat: jax.vjp(program, *flat)[1](program(*flat)))(*flat)
            jax.jit(barred(closed))(*flat)
        print("done")
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert found.stdout.strip() == "done", found.stderr[-500:]


def test_another_thread_keeps_its_precision():
    began, checked = threading.Event(), threading.Event()
    seen = SimpleNamespace(dtype=None, bits=None)

    def user():
        began.wait(60)
        seen.dtype = jnp.exp(jnp.ones(3, jnp.bfloat16)).dtype
        seen.bits = float(jax.random.bernoulli(jax.random.key(0), 0.5, (64,)).mean())
        checked.set()

    thread = threading.Thread(target=user)
    thread.start()
    bind = core.Primitive.bind
    with promoted(), replaced(jax.random, "bernoulli", lambda _: lambda *args, **kwargs: 1 / 0):
        began.set()
        assert checked.wait(60)
        assert jnp.exp(jnp.ones(3, jnp.bfloat16)).dtype == jnp.float64
    thread.join()
    assert seen.dtype == jnp.bfloat16
    assert 0 < seen.bits < 1
    assert core.Primitive.bind is bind


def test_patches_of_several_threads_end_in_any_order():
    class Home:
        """A place with one function."""

        @staticmethod
        def value():
            return "own"

    own = vars(Home)["value"]
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    seen = []

    def first():
        with replaced(Home, "value", lambda before: lambda: "first of " + before()):
            seen.append(Home.value())
            first_in.set()
            second_in.wait(60)
        first_out.set()

    def second():
        first_in.wait(60)
        with replaced(Home, "value", lambda before: lambda: "second of " + before()):
            second_in.set()
            first_out.wait(60)
            seen.append(Home.value())
            with replaced(Home, "value", lambda before: lambda: "inner of " + before()):
                seen.append(Home.value())
            seen.append(Home.value())

    threads = [threading.Thread(target=one) for one in (first, second)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == ["first of own", "second of own", "inner of own", "second of own"]
    assert vars(Home)["value"] is own
    assert original(Home, "value") is Home.value


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_run_restores_all_state(error):
    class Raising(nnx.Module):
        """It raises inside a submodule's call."""

        def __init__(self):
            self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.raises = False

        def __call__(self, x):
            x = self.inner(x)
            if self.raises:
                raise error("stop")
            return x

    def state():
        return (
            core.Primitive.bind,
            vars(nnx.Linear)["__call__"],
            jax.random.bernoulli,
            jax.config.jax_enable_x64,
            jax.config.jax_disable_jit,
        )

    module = Raising()
    before = state()
    calm = subject_of(module)
    assert calm.substituted(calm.weights(), Arguments((X,)), [normal(2, 3, 4)], {})[1]
    assert state() == before
    module.raises = True
    subject = subject_of(module, train=True)
    expected = KeyboardInterrupt if error is KeyboardInterrupt else (ModuleFailedError, CannotPromoteError)
    for attempt in (
        lambda: subject.substituted(subject.weights(), Arguments((X,)), [normal(2, 3, 4)], {})[1],
        lambda: subject.run(subject.weights(), Arguments((X,)), dtype="float64"),
        lambda: subject.run(subject.weights(), Arguments((X,))),
    ):
        with pytest.raises(expected):
            attempt()
        assert state() == before
    assert "attn_bridge_path" not in vars(module.inner)


def test_sides_are_run_in_several_threads_at_once():
    subjects = [subject_of(Layer(nnx.Rngs(seed))) for seed in range(4)]
    expected = [one.run(one.weights(), Arguments((X,)), [X], dtype="float64") for one in subjects]
    low = [one.run(one.weights(), Arguments((X,)), [X]) for one in subjects]
    failures = []

    def work(number):
        try:
            subject = subject_of(subjects[number].module)
            for _ in range(2):
                found = subject.run(subject.weights(), Arguments((X,)), [X], dtype="float64")
                np.testing.assert_array_equal(found.outputs[0], expected[number].outputs[0])
                assert len(subject.substituted(subject.weights(), Arguments((X,)), [X], {})[1]) == 2
                assert subject.run(subject.weights(), Arguments((X,)), [X]).outputs[0].dtype == np.float32
        except BaseException as error:
            failures.append(error)

    bind = core.Primitive.bind
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failures
    assert core.Primitive.bind is bind
    assert low[0].outputs[0].dtype == np.float32
