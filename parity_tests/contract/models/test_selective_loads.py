"""`load` of checkpoints that hold more than a module, or hold it by other names, in every backend."""

from __future__ import annotations

import re

import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import WeightsMismatchError

from .. import backends

backend = backends.fixture(backends.adapters("backend"))


@pytest.fixture
def module(backend):
    return backend.build("MultiHeadAttention", d_in=4, d_out=6, context_length=5, num_heads=2, dropout=0.0)


def drawn(module):
    """Return weights by torch names, all drawn."""
    random = np.random.default_rng(0)
    rows = module.config.parameters
    return {row.rule.torch: random.normal(size=row.shape).astype(np.float32) for row in rows}


def check_loaded(backend, module, weights):
    for name, array in weights.items():
        np.testing.assert_array_equal(backend.parameter(module, name), array)


def test_a_prefix_is_stripped(backend, module, tmp_path):
    weights, path = drawn(module), tmp_path / "own.safetensors"
    others = {"step": np.array([3])}
    safetensors.numpy.save_file({f"model.{name}": array for name, array in weights.items()} | others, path)
    backend.package.load(path, module, strip="model.")
    check_loaded(backend, module, weights)


def test_a_prefix_in_front_of_all_names_is_named(backend, module, tmp_path):
    path = tmp_path / "own.safetensors"
    safetensors.numpy.save_file({f"net.{name}": array for name, array in drawn(module).items()}, path)
    with pytest.raises(WeightsMismatchError, match=re.escape("are there below net. (strip='net.')")):
        backend.package.load(path, module)


def test_dropped_tensors_are_left_out(backend, module, tmp_path):
    weights, path = drawn(module), tmp_path / "own.safetensors"
    safetensors.numpy.save_file({**weights, "my.extra": np.ones(3, np.float32)}, path)
    with pytest.raises(ValueError, match=re.escape("drop=['my.*']")):
        backend.package.load(path, module)
    backend.package.load(path, module, drop="my.*")
    check_loaded(backend, module, weights)


def test_a_pattern_that_fits_no_name_is_refused(backend, module, tmp_path):
    path = tmp_path / "own.safetensors"
    safetensors.numpy.save_file(drawn(module), path)
    with pytest.raises(ValueError, match=r"^drop \(other\.\*\) fits no name"):
        backend.package.load(path, module, drop=["other.*"])


def test_rules_lead_to_the_names_of_the_module(backend, module, tmp_path):
    weights, path, rules = drawn(module), tmp_path / "own.safetensors", tmp_path / "rules.toml"
    own = {row.rule.torch: row.rule for row in module.config.parameters}
    names = {name: name if "jax" in backend.OTHERS else rule.flax for name, rule in own.items()}
    safetensors.numpy.save_file({f"x.{name}": array for name, array in weights.items()}, path)
    is_turned = "torch" in backend.OTHERS
    lines = [
        f'[[rule]]\ntorch = "x.{name}"\nflax = "{names[name]}"\n'
        + (f'pattern = "{own[name].pattern}"\n' if is_turned else "")
        for name in weights
    ]
    rules.write_text("".join(lines))
    backend.package.load(path, module, rules=rules)
    check_loaded(backend, module, weights)


def test_settings_are_named_as_arguments(backend, module, tmp_path):
    with pytest.raises(ValueError, match=r"^settings") as caught:
        backend.package.save(module, tmp_path / "x", to_layout="same", settings={"heads": 2})
    assert "--" not in str(caught.value)
