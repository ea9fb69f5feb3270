"""Keywords of other libraries, and configs in place of sizes, are refused in a line that names what to use."""

from __future__ import annotations

import inspect

import pytest

from attn_bridge import foreign_names, specs

from ...support.calls.bad_calls import MODULES
from .. import backends
from ..modules import NAMES, draw, make, make_example

backend = backends.fixture(backends.adapters("backend"))

MODERN = [variant.name for variant in specs.VARIANTS if variant.group == "modern" and variant.examples]
COMMON = (
    *("attn_mask", "is_causal", "key", "key_padding_mask", "kv_cache", "mask", "need_weights", "output_attentions"),
    *("past_key_values", "position_ids", "use_cache", "value"),
)


def error_of(call, *arguments, **options):
    with pytest.raises(TypeError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def call_of(module):
    return getattr(module, "forward", module)


@pytest.mark.parametrize("name", [*NAMES, *MODERN])
def test_every_class_names_its_own_keywords(backend, name):
    module, x = make_example(backend, name) if name in MODERN else (make(backend, name), draw(2, 5, 4))
    taken = inspect.signature(call_of(module)).parameters
    for keyword in sorted(set(foreign_names.OURS) - set(taken)):
        message = error_of(module, backend.as_argument(x), **{keyword: None})
        assert message.startswith(f"{name} takes no {keyword}=")
        named = message.partition("; give ")[2].partition("=")[0]
        assert not named or named in taken
        assert named or not set(foreign_names.OURS[keyword][0]) & set(taken)


@pytest.mark.parametrize("keyword", COMMON)
def test_attention_with_a_cache_has_a_keyword_for_each_common_one(backend, keyword):
    module, x = make_example(backend, "GroupedQueryAttention")
    message = error_of(module, backend.as_argument(x), **{keyword: None})
    assert message.startswith(f"GroupedQueryAttention takes no {keyword}=; give ")


def test_the_function_names_its_own_keywords(backend):
    array = backend.as_argument(draw(2, 5, 2, 4))
    call = backend.package.functional.dot_product_attention
    for keyword in sorted(set(foreign_names.OURS) - set(inspect.signature(call).parameters)):
        message = error_of(call, array, array, array, **{keyword: None})
        assert message.startswith(f"dot_product_attention takes no {keyword}=")
    assert error_of(call, array, array, array, is_causal=True) == (
        "dot_product_attention takes no is_causal=; give mask= (attn_bridge.masks.causal(), where the class or the "
        "mask of its config is not causal)"
    )


MODELS = {
    "DecoderModel": {"past_key_values": "cache", "position_ids": "positions", "use_cache": "cache"},
    "GPTModel": {"mask": "attention_mask"},
    "BertEncoder": {"mask": "attention_mask"},
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_name_their_own_keywords(backend, name):
    kind = getattr(backend.package, name)
    for keyword, ours in MODELS[name].items():
        assert f"; give {ours}=" in error_of(kind.__call__, object.__new__(kind), **{keyword: None})


def test_an_unknown_keyword_is_left_to_python(backend):
    message = error_of(make(backend, "MultiHeadAttention"), backend.as_argument(draw(2, 5, 4)), attention_masc=None)
    assert "got an unexpected keyword argument 'attention_masc'" in message  # Python 3.13 adds what it may mean


# ---- configs in place of sizes


def build(backend, name, *arguments, **options):
    return error_of(getattr(backend.package, name), *arguments, **options)


@pytest.mark.parametrize("name", MODULES)
def test_a_config_in_place_of_sizes_is_refused(backend, name):
    config = specs.find_variant(name).config(**MODULES[name])
    kind = type(config).__name__
    for message in (build(backend, name, config), build(backend, name, config=config)):
        start = f"{name} takes sizes, not a {kind}; use {name}("
        assert message.startswith(start)
        assert eval(f"specs.{kind}({message.removeprefix(start)}") == config


@pytest.mark.parametrize("name", MODULES)
def test_a_dict_in_place_of_sizes_is_refused(backend, name):
    assert build(backend, name, dict(MODULES[name])) == f"{name} takes sizes, not a dict; use {name}(**config)"
    needed = ", ".join(
        f"{field}=..."
        for field, row in inspect.signature(specs.find_variant(name).config).parameters.items()
        if row.default is inspect.Parameter.empty
    )
    assert build(backend, name, {"n_heads": 2}) == f"{name} takes sizes, not a dict; use {name}({needed})"


def test_a_config_of_another_class_fills_in_what_it_has(backend):
    config = specs.GroupedQueryAttentionConfig(8, 2)
    assert build(backend, "MultiHeadAttention", config) == (
        "MultiHeadAttention takes sizes, not a GroupedQueryAttentionConfig; use MultiHeadAttention(d_in=8, d_out=8, "
        "context_length=..., num_heads=2)"
    )
