"""Stock linear layers in place of projections: another width of the input, or of the bias, is refused by name."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attn_bridge import specs
from attn_bridge.sharding import linear_layers

from ...support.calls.bad_calls import D_IN, MODULES
from ...support.models import drawn_decoders
from .. import backends, modules

backend = backends.fixture(backends.adapters("backend"))

EXAMPLES = {variant.name: variant.examples[0].config for variant in specs.VARIANTS if variant.examples}
LINEAR = [name for name in (*MODULES, *EXAMPLES) if name not in ("SelfAttention_v1", "LayerNorm")]
"""Classes with linear layers, `W_query` and others."""


def make(backend: ModuleType, name: str) -> tuple[Any, Any, dict[str, Any], tuple[int, int]]:
    """Return a module, an input, arguments of its call, and the widths of its query's output and input."""
    module = backend.build(name, **(MODULES[name] if name in MODULES else {"config": EXAMPLES[name]}))
    width = D_IN if name in MODULES else EXAMPLES[name].d_in
    context = modules.draw(2, 5, EXAMPLES[name].d_context) if name == "CrossAttention" else None
    options = {} if context is None else {"context": backend.as_argument(context)}
    shape = next(row.shape for row in module.config.parameters if row.rule.torch.endswith("W_query.weight"))
    return module, backend.as_argument(modules.draw(2, 5, width)), options, shape


def replace(module: Any, path: str, layer: Any) -> None:
    """Put a layer at a path, in which numbers are places in a list."""
    *parents, name = path.split(".")
    for key in parents:
        module = module[int(key)] if key.isdigit() else getattr(module, key)
    setattr(module, name, layer)


@pytest.mark.parametrize("name", LINEAR)
def test_another_width_of_the_input_is_refused(backend, name):
    module, x, options, (outputs, inputs) = make(backend, name)
    path = "heads.1.W_query" if name == "MultiHeadAttentionWrapper" else "W_query"
    replace(module, path, backend.stock_linear(inputs + 1, outputs, outputs))
    message = f"width of the input of {path} ({inputs + 1}) must be {inputs}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(x, **options)


@pytest.mark.parametrize("is_single", [True, False])
@pytest.mark.parametrize("name", LINEAR)
def test_a_bias_of_another_width_is_refused(backend, name, is_single):
    """A single number would be added to every channel."""
    module, x, options, (outputs, inputs) = make(backend, name)
    path, shown = ("heads.1.W_query", "a head") if name == "MultiHeadAttentionWrapper" else ("W_query", "W_query")
    bias = 1 if is_single else outputs - 1
    replace(module, path, backend.stock_linear(inputs, outputs, bias))
    message = f"width of the bias of {shown} ({bias}) must be that of its output ({outputs})"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(x, **options)


@pytest.mark.parametrize(("width", "bias", "message"), [
    (33, 20, "width of the input of {}layers.0 (33) must be 32"),
    (32, 1, "width of the bias of {}layers.0 (1) must be that of its output (20)"),
])  # fmt: skip
def test_a_layer_of_a_model_is_named(backend, width, bias, message):
    model = backend.build("DecoderModel", config=drawn_decoders.draw("gpt2", 0))
    model.trf_blocks[0].ff.layers[0] = backend.stock_linear(width, 20, bias)
    prefixes = "|".join(re.escape(message.format(prefix)) for prefix in ("", "ff."))
    with pytest.raises(ValueError, match=f"^({prefixes})$"):
        model(backend.as_argument(np.array([[1, 2, 3]], np.int32)))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("shapes cannot be multiplied (10x8 and 4x8)", "width of the input of out_proj (4) must be 8"),
        ("shapes cannot be multiplied (10x3 and 5x8)", None),  # of a hook
    ],
)
def test_a_module_with_a_part_of_its_heads_is_named_for_its_own_sizes_alone(message, reason):
    config = specs.GroupedQueryAttentionConfig(8, 4, num_kv_heads=4)
    assert linear_layers.misfit(config, {"W_query": (8, 4, None), "out_proj": (4, 8, 8)}, message) == reason
