"""Settings of JAX that need a word of their own: those of a thread, flags of XLA, what a GPU reads, effects."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_parity.frameworks.jax import precision
from attn_parity.settings.doctor import PRODUCT_ERROR
from attn_parity.settings.precision import hold_safe, product_errors

from ...contract.judge.jax_precision import ON_CPU, SWITCHES, UNSAFE, assert_safe, row_of, values


class PlannedError(Exception):
    """Raised by a test itself."""


@pytest.fixture(autouse=True)
def _leave_no_trace():
    before = values()
    yield
    assert values() == before


@pytest.fixture
def _as_jax_comes():
    """Without the precision that `make accelerator` asks for."""
    with jax.default_matmul_precision(None):
        yield


def in_a_context(name, value):
    """Return a context of this thread alone, as a user writes it."""
    return getattr(jax, name)(value)


@pytest.mark.parametrize("name", ["default_matmul_precision", "threefry_partitionable", "default_prng_impl"])
def test_a_context_of_this_thread_is_overruled_and_restored(name):
    with in_a_context(name, UNSAFE[name]):
        before = values()
        assert before[name] != before[f"other {name}"]
        with hold_safe(precision):
            assert_safe()
        assert values() == before
        with pytest.raises(PlannedError), hold_safe(precision):
            raise PlannedError
        assert values() == before


def test_strict_takes_back_what_is_changed_inside():
    with hold_safe(precision):
        for name, value in UNSAFE.items():
            jax.config.update(f"jax_{name}", value)
        with hold_safe(precision):
            assert_safe()
        assert values()["other default_prng_impl"] == "rbg"


@pytest.mark.usefixtures("_as_jax_comes")
@pytest.mark.parametrize("name", ["default_matmul_precision"])
def test_jax_defaults_on_gpus_are_unsafe_until_strict(name, monkeypatch):
    monkeypatch.setattr(precision, "kinds", lambda: {"cpu", "gpu"})
    assert (row_of(name).value, row_of(name).state) == ("None", "unsafe")
    with hold_safe(precision):
        assert row_of(name).state == "safe"
    for accepted in ("float32", "F32_F32_F32"):
        with jax.default_matmul_precision(accepted):
            assert row_of(name).state == "safe"


def test_strict_leaves_users_choices_unchanged():
    with jax.enable_x64(True), hold_safe(precision):
        assert jnp.zeros(1).dtype == jnp.float64
    with jax.disable_jit():
        assert row_of("disable_jit").state == "note"
        with hold_safe(precision):
            assert jax.config.jax_disable_jit


XLA_FLAGS = [
    ("", "xla_allow_excess_precision", "true", "note"),
    ("--xla_allow_excess_precision=false", "xla_allow_excess_precision", "false", "safe"),
    ("--xla_allow_excess_precision=0", "xla_allow_excess_precision", "false", "safe"),
    ("--xla_allow_excess_precision", "xla_allow_excess_precision", "true", "note"),
    (
        "--xla_allow_excess_precision=true --xla_allow_excess_precision=False",
        "xla_allow_excess_precision",
        "false",
        "safe",
    ),
    ("--xla_cpu_enable_fast_math=true", "xla_cpu_enable_fast_math", "true", "unsafe"),
    ("--xla_cpu_enable_fast_math=1  --xla_dump_to='/a b'", "xla_cpu_enable_fast_math", "true", "unsafe"),
    ("/no/such/file", "xla_cpu_enable_fast_math", "false", "safe"),
]


@pytest.mark.parametrize(("flags", "name", "value", "state"), XLA_FLAGS)
def test_the_flags_of_xla_are_read(flags, name, value, state, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert (row_of(name).value, row_of(name).state) == (value, state)
    assert row_of(name).advice == f"add --{name}=false to XLA_FLAGS before Python starts"
    assert not row_of(name).held


def test_a_file_of_flags_is_read(monkeypatch, tmp_path):
    path = tmp_path / "flags"
    path.write_text("--xla_cpu_enable_fast_math=true\n--xla_allow_excess_precision=false\n", encoding="utf-8")
    monkeypatch.setenv("XLA_FLAGS", str(path))
    assert row_of("xla_cpu_enable_fast_math").value == "true"
    assert row_of("xla_allow_excess_precision").value == "false"


# ---- effects that can be measured


def precisions_of(function, *arguments):
    """Return the precision of every product in a function."""
    equations = jax.make_jaxpr(function)(*arguments).eqns
    return [equation.params["precision"] for equation in equations if equation.primitive.name == "dot_general"]


@pytest.mark.usefixtures("_as_jax_comes")
def test_products_inside_strict_ask_for_the_highest_precision():
    x = jnp.ones((2, 2))
    highest = jax.lax.Precision.HIGHEST
    assert precisions_of(lambda x: x @ x, x) == [None]
    with hold_safe(precision):
        assert precisions_of(lambda x: x @ x, x) == [(highest, highest)]
        found = []
        thread = threading.Thread(target=lambda: found.extend(precisions_of(lambda x: x @ x, x)))
        thread.start()
        thread.join()
        assert found == [(highest, highest)]
    assert precisions_of(lambda x: x @ x, x) == [None]


@pytest.mark.parametrize("name", sorted(ON_CPU))
def test_random_numbers_inside_strict_are_those_of_the_defaults(name):
    def draw():
        return np.asarray(jax.random.uniform(jax.random.key(0), (3,)))

    default = draw()
    with SWITCHES[name].hold(UNSAFE[name]):
        assert not np.array_equal(draw(), default)
        with hold_safe(precision):
            np.testing.assert_array_equal(draw(), default)
        assert not np.array_equal(draw(), default)
    np.testing.assert_array_equal(draw(), default)


def test_a_float32_product_is_float32():
    assert product_errors(precision)["cpu"] < 2e-6


def test_devices_and_versions_name_what_is_here():
    assert len(precision.devices()) == len(jax.local_devices())
    assert precision.versions()["jax"] == jax.__version__
    assert {"jaxlib", "flax"} <= precision.versions().keys()
    assert precision.kinds() >= {"cpu"}


def test_a_compiled_jacobian_is_right_without_fused_reductions():
    code = "from attn_parity.frameworks.jax import precision; print(precision.compiled_error())"
    old = jax.__version_info__ < (0, 12)  # newer ones are right, and end the process at a flag that they don't know
    flags = "--xla_cpu_experimental_ynn_fusion_type=-reduce" if old else ""
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert 0 < float(done.stdout) < PRODUCT_ERROR
