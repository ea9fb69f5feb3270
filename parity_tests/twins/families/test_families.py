"""Families against `transformers` in Flax, the twins of a layer against each other, and weights there and back."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import parity
from attn_bridge.models import families
from jax_attn.backend import precision

from ...support.calls import cover
from ...support.calls.interpreted import run_by_numpy
from ...support.models.hf_oracle import CASES, LAYERS, judge_layer, run
from ..attention.compiled import in_jit

FIRST = list({name: (name, index) for name, index in reversed(LAYERS)}.values())
LAST = list(dict(LAYERS).items())
"""A layer of each case; those of some cases differ in their masks and positions."""


def interpreted(module, hidden, at):
    """Call a module without compiling anything, which would take most of the time."""
    return run_by_numpy(operator.call, module, hidden, **at)


def outputs(layer, dtype="float64", how=interpreted):
    """Return what our module makes of every call, as arrays; with a cache where there are several."""
    with precision(dtype):
        module = jax_attn.from_hf(
            layer.config, layer.index, {name: array.astype(dtype) for name, array in layer.state.items()}
        )
        rows, total = layer.steps[-1].mask.shape
        cached = {"cache": module.init_cache(rows, total)} if len(layer.steps) > 1 else {}
        found = []
        for step in layer.steps:
            rest = ((0, 0), (0, total - step.mask.shape[1]))  # a mask up to the capacity keeps its shape
            at = {"attention_mask": np.pad(step.mask, rest), "positions": step.positions.astype(np.int32)}
            out = how(module, jnp.asarray(step.hidden.astype(dtype)), {**at, **cached})
            if cached:
                out, cached["cache"] = out
            assert out.dtype == dtype
            found.append(np.asarray(out))
        return found


def assert_close(layer, found, limit=1e-10):
    for step, one in zip(layer.steps, found, strict=True):
        assert one.shape == step.output.shape
        apart = np.abs(one - step.output)[step.rows].max(initial=0.0)
        assert apart <= limit * np.abs(step.output[step.rows]).max(initial=1e-300)


@cover.rotated(("name", "index", "padded"), LAYERS, ["left", "right"])
def test_a_batch_matches_transformers(name, index, padded):
    layer = run(name, index, padded=padded, start=0 if name == "bloom" else 100_000, seed=3)
    assert_close(layer, outputs(layer))


@cover.rotated(("name", "index", "padded"), LAYERS, ["right", "left"], always=FIRST)
def test_decoding_with_a_cache_matches_transformers(name, index, padded):
    layer = run(name, index, padded=padded, tokens=10, steps=(6, 1, 1, 2), seed=4)
    assert_close(layer, outputs(layer))


@cover.some("name", ["llama-3.1", "gemma2"], always=["gemma2"])
def test_compiled_decoding_matches_transformers(name):
    layer = run(name, dict(LAYERS)[name], padded="left", tokens=9, steps=(6, 1, 1, 1), seed=5)
    assert_close(layer, outputs(layer, how=in_jit))


@cover.rotated(("name", "index", "dtype"), LAYERS, ["float32", "bfloat16"], always=LAST)
def test_rounding_errors_do_not_exceed_those_of_transformers(name, index, dtype):
    verdict = judge_layer(name, index, dtype, lambda layer: outputs(layer, dtype, in_jit))
    assert verdict.verdict == "equal", verdict.message


@pytest.mark.parametrize(("name", "index"), LAYERS)
def test_weights_go_there_and_back_through_both_twins(name, index):
    layer = run(name, index, dtype="bfloat16")
    assert {array.dtype.name for array in layer.state.values()} == {"bfloat16"}
    state = torch.random.get_rng_state()
    one = torch_attn.from_hf(layer.config, layer.index, layer.state)
    two = jax_attn.from_hf(layer.config, layer.index, layer.state)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not one.training
    assert {parameter.dtype for parameter in one.parameters()} == {torch.bfloat16}
    assert one.config == two.config
    attn_bridge.transfer(one, two)
    bare = {key.rpartition(f".{CASES[name].attention}.")[2] for key in layer.state}
    for package, module in ((torch_attn, one), (jax_attn, two)):
        back = package.to_hf(layer.config, layer.index, module)
        assert {key: array.tobytes() for key, array in back.items()} == {
            (key if name not in ("bloom", "gpt2") else key.replace("model.", "transformer.", 1)): array.tobytes()
            for key, array in layer.state.items()
        }
        assert package.to_hf(layer.config, layer.index, module, prefix="").keys() == bare


@pytest.mark.parametrize("name", ["qwen3-next"])
def test_the_twins_of_a_layer_are_equal_by_the_judge(name):
    index = dict(LAYERS)[name]
    layer = run(name, index, dtype="float32", padded="left")
    one = torch_attn.from_hf(layer.config, layer.index, layer.state)
    two = jax_attn.from_hf(layer.config, layer.index, layer.state)
    (step,) = layer.steps
    inputs = {"x": step.hidden, "attention_mask": step.mask}
    report = parity.compare(one, two, inputs)
    assert report.verdict == "equal", report
    assert report.unexercised == []


@pytest.mark.parametrize("package", [torch_attn, jax_attn])
def test_the_messages_are_those_of_the_families(package):
    known = ", ".join(families.known_model_types())
    with pytest.raises(ValueError, match=rf"^model_type \(lama\) must be one of {known}; attn-bridge derive FOLDER "):
        package.from_hf({"model_type": "lama"}, 0, {})
    layer = run("llama", 1, dtype="float32")
    state = {key: array for key, array in layer.state.items() if "q_proj.weight" not in key}
    with pytest.raises(
        ValueError, match=r"^weights do not match: missing: model\.layers\.1\.self_attn\.q_proj\.weight$"
    ):
        package.from_hf(layer.config, 1, state)


def test_float64_needs_jaxs_64_bits():
    layer = run("llama", 1)
    assert not jax.config.jax_enable_x64
    with pytest.raises(TypeError, match="enable jax_enable_x64 first"):
        jax_attn.from_hf(layer.config, 1, layer.state)
