"""Implementations of attention that a module, or a context, chooses."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from attn_bridge import specs

from .. import backends
from ..modules import RECURRENT, draw

backend = backends.fixture(backends.adapters("backend"))

SIZES = {"d_in": 4, "d_out": 4}
CLASSES = {
    "SelfAttention_v1": SIZES,
    "SelfAttention_v2": SIZES,
    "CausalAttention": {**SIZES, "context_length": 6},
    "MultiHeadAttentionWrapper": {**SIZES, "context_length": 6, "num_heads": 2},
    "MultiHeadAttention": {**SIZES, "context_length": 6, "num_heads": 2},
    "GroupedQueryAttention": {"config": specs.GroupedQueryAttentionConfig(4, num_heads=2)},
    "MultiHeadLatentAttention": {
        "config": specs.MultiHeadLatentAttentionConfig(
            4, num_heads=2, latent_dim=3, nope_dim=3, rope_dim=2, value_dim=2, query_dim=None
        )
    },
    "DifferentialAttention": {"config": specs.DifferentialAttentionConfig(4, num_heads=2, head_dim=2)},
    "CrossAttention": {"config": specs.CrossAttentionConfig(4, num_heads=2)},
}


@pytest.fixture
def names(backend, monkeypatch):
    """The names by which attention is chosen from now on."""
    implementations, seen = backend.package.functional.implementations, []
    right = implementations.choose

    def choose(call, name=None):
        seen.append(name)
        return right(call, name)

    monkeypatch.setattr(implementations, "choose", choose)
    return seen


def call(backend, name, module):
    x = backend.as_argument(draw(2, 5, 4))
    return module(x, context=x) if name == "CrossAttention" else module(x)


@pytest.mark.parametrize("name", CLASSES)
def test_a_module_computes_by_the_implementation_it_was_given(backend, names, name):
    call(backend, name, backend.build(name, **CLASSES[name], implementation="reference"))
    assert set(names) == {"reference"}
    with pytest.raises(ValueError, match=r"^implementation \('flashy'\) must be one of 'c"):
        backend.build(name, **CLASSES[name], implementation="flashy")


@pytest.mark.parametrize("name", RECURRENT)
def test_a_module_with_a_state_computes_in_the_form_it_was_given(backend, monkeypatch, name):
    config, seen = specs.find_variant(name).examples[0].config, []
    rooms = {
        "GatedConvolution": "gated_convolution",
        "LightningAttention": "recurrent.decayed",
        "Mamba": "recurrent.selective",
        "Mamba2": "recurrent.decayed",
    }
    recurrence = importlib.import_module(f"{backend.package.__name__}.{rooms.get(name, 'recurrent.recurrence')}")
    right = recurrence.choose_form
    monkeypatch.setattr(recurrence, "choose_form", lambda form, *rest: seen.append(form) or right(form, *rest))
    module, x = backend.build(name, config=config, implementation="recurrent"), draw(2, 5, config.d_in)
    module(backend.as_argument(x))
    module(backend.as_argument(x), form="chunked")
    backend.build(name, config=config)(backend.as_argument(x))
    assert seen == ["recurrent", "chunked", None]
    for wrong in ("reference", "flashy"):
        with pytest.raises(ValueError, match="implementation") as caught:
            backend.build(name, config=config, implementation=wrong)
        assert str(caught.value) == f"implementation ({wrong!r}) must be one of 'chunked', 'recurrent' or None"


@pytest.mark.parametrize(("name", "kind"), [("LinearAttention", "linear"), ("GatedDeltaNet", "delta")])
def test_each_form_runs_code_of_its_own(backend, monkeypatch, name, kind):
    config, seen = specs.find_variant(name).examples[0].config, []
    recurrence = importlib.import_module(f"{backend.package.__name__}.recurrent.recurrence")

    def spy(way):
        """Note the call, and return the values and the state for the context and the new state."""
        monkeypatch.setattr(recurrence, f"_{kind}_{way}", lambda *given: seen.append(way) or (given[2], given[-2]))

    spy("tokens")
    spy("chunks")
    module, x = backend.build(name, config=config), draw(2, 5, config.d_in)
    module(backend.as_argument(x), form="recurrent")
    module(backend.as_argument(x), form="chunked")
    module(backend.as_argument(x[:, :1]))
    assert seen == ["tokens", "chunks", "tokens"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_context_chooses_for_the_modules_inside_it(backend, names, name):
    module, functional = backend.build(name, **CLASSES[name]), backend.package.functional
    with functional.use_implementation("reference"):
        call(backend, name, module)
        with functional.use_implementation(None):
            call(backend, name, module)
    assert set(names) == {"reference", None}
    assert names[0] == "reference"
    assert names[-1] is None


def test_a_modules_own_implementation_comes_before_the_contexts(backend, names):
    module = backend.build("MultiHeadAttention", **CLASSES["MultiHeadAttention"], implementation="reference")
    with backend.package.functional.use_implementation("cpu_flash"):
        call(backend, "MultiHeadAttention", module)
    assert names == ["reference"]


def test_a_context_with_a_wrong_name_is_refused(backend):
    with pytest.raises(ValueError, match="flashy"), backend.package.functional.use_implementation("flashy"):
        pass


@pytest.mark.parametrize("other", [0, 1, 2], ids=["query", "key", "value"])
def test_kernels_take_query_key_and_value_of_one_dtype(backend, other):
    dtypes = ["float16" if place == other else "float32" for place in range(3)]
    arrays = [backend.as_argument(draw(1, 3, 2, 4, dtype=dtype)) for dtype in dtypes]
    assert backend.package.functional.explain(*arrays)["cpu_flash"] == (
        f"query, key and value must all be one of float32, bfloat16, float16, got {', '.join(dtypes)}"
    )


def test_a_named_implementation_that_does_not_serve_a_call_says_why(backend):
    module = backend.build("MultiHeadAttention", **CLASSES["MultiHeadAttention"], implementation="cpu_flash")
    x = backend.as_argument(draw(2, 5, 4))
    with pytest.raises(NotImplementedError, match=r"^implementation 'cpu_flash' does not support this call: "):
        module(x, return_weights=True)
    assert np.isfinite(
        np.asarray(
            call(
                backend,
                "MultiHeadAttention",
                backend.build("MultiHeadAttention", **CLASSES["MultiHeadAttention"], implementation="reference"),
            )
            .sum()
            .item()
        )
    )
