"""Modules of Equinox, Haiku and Keras are sides as they are, in every door."""

from __future__ import annotations

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch import nn

from attn_bridge.parity import compare, laws
from attn_parity import factories
from attn_parity.dumps.recording import dump
from attn_parity.dumps.replay import compare_dumps
from attn_parity.sides.libraries import as_side

from . import libraries

X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)


def equinox_linear():
    return libraries.EquinoxLinear(jnp.ones((4, 8)), jnp.zeros(4))


def haiku_linear():
    transformed = libraries.haiku_linear()
    return transformed, transformed.init(None, X)


def real_equinox():
    library = pytest.importorskip("equinox")
    return library.nn.Sequential([library.nn.Linear(8, 4, key=jax.random.key(0)), library.nn.Dropout(0.5)])


def real_haiku():
    library = pytest.importorskip("haiku")
    transformed = library.transform(lambda x: library.Linear(4)(x))
    return transformed, transformed.init(jax.random.key(0), X)


def real_keras():
    library = pytest.importorskip("keras")
    return library.Sequential([library.Input((3, 8)), library.layers.Dense(4), library.layers.Dropout(0.5)])


SIDES = [equinox_linear, haiku_linear, libraries.KerasDense, real_equinox, real_haiku, real_keras]


@pytest.fixture(autouse=True)
def _stand_ins(request, monkeypatch):
    """Have the packages be stand-ins, but for tests that take a real one."""
    side = request.node.callspec.params.get("side") if hasattr(request.node, "callspec") else None
    if side is None or not side.__name__.startswith("real"):
        libraries.install(monkeypatch, libraries.fake_equinox())
        libraries.install(monkeypatch, libraries.fake_keras())


@pytest.mark.parametrize("side", SIDES)
def test_a_module_of_a_library_is_a_side(side):
    report = compare(nn.Linear(8, 4), side(), X, seeds=1)
    assert report.verdict == "equal"
    assert len(report.pairing) == 2


def test_inputs_that_are_an_example_and_a_batch_are_refused_with_what_settles_it():
    side = libraries.UncheckedLinear(jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), jnp.float32))
    linear = nn.Linear(8, 8, bias=False)
    assert compare(linear, side, X[0], seeds=1).verdict == "equal"
    square = np.concatenate([X[0], X[1], X[0, :2]])
    with pytest.raises(ValueError, match=r"one example and as a batch, .*eqx\.filter_vmap\(module\)"):
        compare(linear, side, square, seeds=1)
    assert compare(linear, libraries.VmapWrapper(side), square, seeds=1).verdict == "equal"


@pytest.mark.parametrize(
    "second",
    [lambda: libraries.EquinoxNet(libraries.EquinoxNorm(jnp.ones(8), jnp.zeros(8))), libraries.KerasNorm],
    ids=["equinox", "keras"],
)
def test_an_eps_of_a_layer_inside_is_the_hint(second):
    report = compare(nn.Sequential(nn.LayerNorm(8)), second(), X, seeds=1)
    assert report.first_divergence.hint.startswith("eps of 0 is 1e-05 in torch and 0.001 in Flax")
    same = compare(nn.Sequential(nn.LayerNorm(8, eps=1e-3)), second(), X, seeds=1)
    assert (same.verdict, [note for note in same.notes if "eps" in note]) == ("equal", [])


@pytest.mark.parametrize(("supports_masking", "status"), [(True, "holds"), (False, "not tried")])
def test_a_mask_of_keras_counts_where_the_layers_take_one(supports_masking, status):
    x = np.random.default_rng(1).normal(size=(3, 6, 8)).astype(np.float32)
    report = laws(libraries.KerasModel(supports_masking), x, only=["padding", "dtype"])
    # It computes in the dtype that it was made for, so bfloat16 is not tried.
    assert [(law.status, law.why) for law in report.laws][1] == ("holds", "outputs of weights in float32")
    assert report.laws[0].status == status


def test_a_fault_in_it_is_seen():
    report = compare(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), equinox_linear(), X, seeds=1)
    assert report.verdict == "different"


def test_state_of_a_haiku_function_is_carried():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.register_buffer("mean", self.linear.weight.detach()[0].clone())

        def forward(self, x):
            return self.linear(x - self.mean)

    transformed = libraries.haiku_shifted()
    report = compare(Shifted(), (transformed, transformed.init(None, X)), X, seeds=1)
    assert report.verdict == "equal"
    assert len(report.pairing) == 3


def test_the_weights_of_an_equinox_module_are_a_plain_tree():
    """A report's bundle makes the tree again, with other arrays; a module's constructor takes none."""
    side = as_side(equinox_linear())
    assert set(side.weights) == {"weight", "bias"}
    assert type(side.weights) is dict


def test_it_is_dumped(tmp_path):
    dump(nn.Linear(8, 4), X, tmp_path / "first", seeds=1)
    dump(equinox_linear(), None, tmp_path / "second", like=tmp_path / "first")
    assert compare_dumps(tmp_path / "first", tmp_path / "second").verdict == "equal"


FACTORIES = """
from parity_tests.twins.comparison.compare import libraries
from parity_tests.twins.comparison.compare.test_sides_of_libraries import equinox_linear

model = equinox_linear()


def alone():
    return libraries.haiku_linear()


def unbuilt():
    layer = libraries.KerasDense()
    layer.built = False
    return layer
"""


def built(name: str, folder: Path):
    (folder / "sides.py").write_text(FACTORIES)
    with factories.workspace():
        return factories.load(f"{folder / 'sides.py'}:{name}").build()


def test_a_model_at_the_top_of_a_file_is_not_called(tmp_path):
    assert compare(nn.Linear(8, 4), built("model", tmp_path), X, seeds=1).verdict == "equal"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("alone", r"a Haiku Transformed is a side with its parameters: give \(transformed, transformed.init"),
        ("unbuilt", r"the Keras model KerasDense has no weights yet: call it once, or model.build\(shape\)"),
    ],
)
def test_a_side_without_weights_says_how_it_gets_some(name, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        built(name, tmp_path)


def test_keras_on_another_backend_is_refused(monkeypatch):
    libraries.install(monkeypatch, libraries.fake_keras("tensorflow"))
    with pytest.raises(ValueError, match="must run on JAX or torch, not tensorflow: set KERAS_BACKEND=jax"):
        compare(nn.Linear(8, 4), libraries.KerasDense(), X, seeds=1)


def test_no_library_is_imported_for_other_sides(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", None)
    module, array = nn.Linear(8, 4), jnp.ones(3)
    for value in (module, array, (module, {}), (), None, nn.Linear):
        assert as_side(value) is value
