"""GatedDeltaNet: both forms, both frameworks, `transformers` and the formula say the same, with a cache and without."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import jax_attn
import torch_attn
from attn_bridge import backends, parity, transfer
from attn_bridge.models import families
from attn_bridge.reference.gated_delta_net import reference
from attn_bridge.specs import GatedDeltaNetConfig
from attn_parity.frameworks.torch.running.promotion import promoted
from parity_tests.support.models.hf_oracle import judge_roundings
from torch_attn.backend import to_numpy

from ..attention.compiled import in_jit
from .recurrent import (
    call,
    check_masks_over_other_tokens,
    decode,
    gradients_of_torch,
    left_and_right,
    run_hugging_face,
    tokens,
)

CONFIG = GatedDeltaNetConfig(
    d_in=10, num_heads=2, num_value_heads=6, head_dim=4, value_head_dim=5, d_out=7, conv_size=3, eps=1e-3
)
HF_SIZES = {
    "vocab_size": 11,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,
}
HF = {"qwen3_next": Qwen3NextGatedDeltaNet, "qwen3_5_text": Qwen3_5GatedDeltaNet}


def draw_weights(config: GatedDeltaNetConfig, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {row.rule.torch: random.normal(size=row.shape) * 0.7 + 0.1 for row in config.parameters}


def twins(config: GatedDeltaNetConfig = CONFIG, seed: int = 0, dtype: str = "float64"):
    ours = torch_attn.GatedDeltaNet(config, dtype=getattr(torch, dtype)).eval()
    ours.load_state_dict({name: torch.from_numpy(array) for name, array in draw_weights(config, seed).items()})
    theirs = backends.load("flax").build_blank("GatedDeltaNet", config, dtype)
    transfer(ours, theirs)
    return ours, theirs


# ---- against the formula


@pytest.mark.parametrize("length", [1, 6, 64, 130])
def test_both_forms_of_both_twins_are_the_formula(length, x64):
    """6 tokens are as many as value heads: what swaps the two axes would not crash there."""
    ours, theirs = twins()
    x = tokens(3, length, 10)
    mask = left_and_right(length) if length > 4 else None
    expected, _ = reference(CONFIG, draw_weights(CONFIG), x, mask)
    for form in (None, "chunked", "recurrent"):
        for module in (ours, theirs):
            got = call(module, x, attention_mask=mask, form=form)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


def test_a_sequence_without_a_batch(x64):
    x = tokens(5, 10)
    expected, _ = reference(CONFIG, draw_weights(CONFIG), x)
    for module in twins():
        np.testing.assert_allclose(call(module, x), expected, atol=1e-13)


def test_positions_change_nothing(x64):
    x, positions = tokens(2, 4, 10), np.array([[7, 3, 3, 0], [0, 1, 2, 3]])
    for module in twins():
        np.testing.assert_array_equal(call(module, x, positions=positions), call(module, x))


def test_padding_gives_zeros_and_changes_no_other_token(x64):
    ours, _ = twins()
    x = tokens(3, 9, 10)
    mask = left_and_right(9)
    shown = ours(torch.from_numpy(x), attention_mask=torch.from_numpy(mask)).detach().numpy()
    assert (shown[~mask] == 0.0).all()
    x[~mask] = np.nan
    hidden = ours(torch.from_numpy(x), attention_mask=torch.from_numpy(mask)).detach().numpy()
    np.testing.assert_array_equal(hidden, shown)
    alone = ours(torch.from_numpy(x[1:2, 3:])).detach().numpy()
    np.testing.assert_allclose(shown[1:2, 3:], alone, atol=1e-14)


class _Transposed(torch_attn.GatedDeltaNet):
    """A public bug (rasbt/LLMs-from-scratch, PR 1033): heads and tokens of the decay swapped."""

    def forward(self, x, **kwargs):
        true = torch_attn.recurrent.recurrence.log_decay
        torch_attn.recurrent.recurrence.log_decay = lambda *args: true(*args).mT
        try:
            return super().forward(x, **kwargs)
        finally:
            torch_attn.recurrent.recurrence.log_decay = true


def test_a_transposed_gate_crashes_or_is_caught():
    ours, theirs = twins(dtype="float32")
    faulty = _Transposed(CONFIG)
    faulty.load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="log_decay"):
        faulty(torch.ones(1, 5, 10))
    x = tokens(2, CONFIG.num_value_heads, 10).astype(np.float32)
    faulty(torch.from_numpy(x))
    assert parity.compare(faulty, theirs, x, seeds=2, localise=False).verdict == "different"


# ---- against transformers


@functools.cache
def hugging_face(model_type: str, dtype: str):
    """Return a config.json, and the first layer of a tiny model with weights that hide nothing."""
    config = transformers.AutoConfig.for_model(model_type, **HF_SIZES)
    with promoted() if dtype == "float64" else contextlib.nullcontext():
        layer = HF[model_type](config, 0).eval().to(getattr(torch, dtype))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in layer.parameters():
                spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator) + 0.1)
    return json.loads(config.to_json_string()), config, layer


def build(model_type: str, backend):
    config, _, layer = hugging_face(model_type, "float64")
    prefix = "model.layers.0.linear_attn."
    return backend.from_hf(config, 0, {prefix + name: array.numpy() for name, array in layer.state_dict().items()})


@pytest.mark.parametrize("steps", [(11,), (70,), (5, 1, 1, 4)], ids=str)
@pytest.mark.parametrize("model_type", HF)
def test_transformers_says_the_same_with_padding_and_through_a_cache(model_type, steps, x64):
    length = sum(steps)
    x, mask = tokens(3, length, 12), left_and_right(length)
    mask[:, -2:] = True  # single tokens are never padding in transformers
    _, config, layer = hugging_face(model_type, "float64")
    expected = run_hugging_face(layer, config, x, mask, steps)
    ours, theirs = build(model_type, torch_attn), build(model_type, jax_attn)
    for got in (decode(ours, x, steps, mask), decode(theirs, x, steps, mask)):
        assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("framework", ["torch", "flax"])
@pytest.mark.parametrize("model_type", HF)
def test_ours_loses_no_more_than_transformers(model_type, framework, dtype):
    config, _, wide = hugging_face(model_type, "float64")
    layer = copy.deepcopy(wide).to(getattr(torch, dtype))
    state = {name: to_numpy(tensor) for name, tensor in layer.state_dict().items()}
    module = (torch_attn if framework == "torch" else jax_attn).from_hf(config, 0, state)
    calls = []
    for seed in range(3):
        x = torch.from_numpy(tokens(3, 70, 12, seed=seed)).to(getattr(torch, dtype))
        with torch.no_grad():
            theirs = to_numpy(layer(x))
            ours = to_numpy(module(x)) if framework == "torch" else np.asarray(in_jit(module, to_numpy(x), {}))
        with promoted(), torch.no_grad():
            exact = copy.deepcopy(layer).double()(x.double()).numpy()
        calls.append((theirs, ours, exact))
    verdict = judge_roundings(calls, dtype)
    assert verdict.verdict == "equal", verdict


@pytest.mark.parametrize("model_type", HF)
def test_the_way_back_to_transformers_is_bit_exact(model_type):
    config, _, layer = hugging_face(model_type, "float64")
    state = {f"model.layers.0.linear_attn.{name}": array.numpy() for name, array in layer.state_dict().items()}
    back = torch_attn.to_hf(config, 0, torch_attn.from_hf(config, 0, state))
    assert back.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)


def test_grouped_rows_are_split_like_qwen3_next():
    """Every row of the fused tensors is told from every other one, and from where its head is."""
    table = families.find_layer({"model_type": "qwen3_next", **HF_SIZES}, 0)
    qkvz = np.arange(2 * (4 + 4 + 15 + 15))[:, None] * np.ones((1, 12))
    ba = np.arange(12)[:, None] * np.ones((1, 12))
    state = {"in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": ba, "conv1d.weight": np.ones((46, 1, 4))}
    state |= {
        "dt_bias": np.ones(6),
        "A_log": np.ones(6),
        "norm.weight": np.ones(5),
        "out_proj.weight": np.ones((12, 30)),
    }
    rows = {name: array[:, 0].astype(int).tolist() for name, array in table.to_ours(state).items() if array.ndim == 2}
    assert rows["W_query.weight"] == [*range(4), *range(38, 42)]
    assert rows["W_key.weight"] == [*range(4, 8), *range(42, 46)]
    assert rows["W_value.weight"] == [*range(8, 23), *range(46, 61)]
    assert rows["W_gate.weight"] == [*range(23, 38), *range(61, 76)]
    assert rows["W_beta.weight"] == [0, 1, 2, 6, 7, 8]
    assert rows["W_alpha.weight"] == [3, 4, 5, 9, 10, 11]


def test_another_activation_is_refused():
    with pytest.raises(ValueError, match="hidden_act") as caught:
        families.find_layer({"model_type": "qwen3_next", **HF_SIZES, "hidden_act": "gelu"}, 0)
    assert str(caught.value) == "hidden_act ('gelu') of qwen3_next is not supported, only 'silu' or 'swish'"


# ---- through a cache


@pytest.mark.parametrize("steps", [(1, 1, 2, 5), (66, 1, 5)], ids=str)
def test_cached_decoding_is_the_full_pass(steps, x64):
    x = tokens(3, sum(steps), 10)
    for mask in (None, left_and_right(sum(steps))):
        for module in twins():
            full = decode(module, x, (sum(steps),), mask)
            np.testing.assert_allclose(decode(module, x, steps, mask), full, rtol=0, atol=1e-13)


def test_a_step_compiles_once_and_uses_its_slots_mask(x64):
    _, theirs = twins()
    x, mask = tokens(3, 7, 10), left_and_right(7)
    graph, state = nnx.split(theirs)
    traced = []

    @jax.jit
    def step(state, x, cache):
        traced.append(1)
        return nnx.merge(graph, state)(x, attention_mask=mask, cache=cache)

    cache, outputs = theirs.init_cache(3, 7), []
    for at in range(7):
        out, cache = step(state, x[:, at : at + 1], cache)
        outputs.append(out)
    np.testing.assert_allclose(np.concatenate(outputs, 1), call(theirs, x, attention_mask=mask), rtol=0, atol=1e-13)
    assert len(traced) == 1


def test_a_cache_takes_no_more_than_its_capacity(x64):
    message = "tokens in the cache (3) and new ones (2) must be at most capacity (4)"
    x = tokens(2, 3, 10)
    for module in twins():
        _, cache = call(module, x, cache=module.init_cache(2, 4))
        with pytest.raises(ValueError, match="capacity") as caught:
            module(torch.from_numpy(x[:, :2]) if isinstance(module, torch.nn.Module) else x[:, :2], cache=cache)
        assert str(caught.value) == message
        assert int(cache.length) == 3
        _, cache = call(module, x[:, :1], cache=cache)
        assert int(cache.length) == 4


def test_a_full_cache_is_seen_by_a_compiled_step(x64):
    _, theirs = twins()
    graph, state = nnx.split(theirs)
    step = jax.jit(lambda state, x, cache: nnx.merge(graph, state)(x, cache=cache))
    x = tokens(1, 2, 10)
    out, cache = step(state, x, theirs.init_cache(1, 3))
    assert np.isfinite(out).all()
    message = r"tokens in the cache \(2\) and new ones \(2\) must be at most capacity \(3\)"
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(step(state, x, cache))


def test_rows_of_a_cache_are_reordered_and_forgotten(x64):
    x = tokens(3, 5, 10)
    order = np.array([2, 0, 0])
    for module in twins():
        convert = torch.from_numpy if isinstance(module, torch.nn.Module) else np.asarray
        full = np.asarray(call(module, x[order]))
        _, cache = call(module, x[:, :4], cache=module.init_cache(3, 9))
        out, cache = call(module, x[order, 4:], cache=cache.reorder(convert(order)))
        np.testing.assert_allclose(out, full[:, 4:], rtol=0, atol=1e-13)
        assert int(cache.trim(5).length) == 5
        with pytest.raises(ValueError, match="length") as caught:
            cache.trim(4)
        assert str(caught.value) == "length (4) must be 0 or 5: a state does not tell what it was before"
        with pytest.raises(ValueError, match="indices") as caught:
            cache.reorder(convert(order[:2]))
        assert str(caught.value) == "indices must have shape (B,) = (3,), got (2,)"
        out, _ = call(module, x[order], cache=cache.trim(0))
        np.testing.assert_allclose(out, full, rtol=0, atol=1e-13)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("length", [3, 99, -1])
def test_a_compiled_trim_refuses_what_a_plain_one_does(monkeypatch, length, known, x64):
    _, theirs = twins()
    _, cache = call(theirs, tokens(2, 6, 10), cache=theirs.init_cache(2, 9))

    def run():  # traced anew each time, as a check may have been silenced
        return jax.jit(lambda cache, n: cache.trim(length if known else n))(cache, length)

    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"length \({length}\) must be 0 or 6: a state does not tell"):
        jax.block_until_ready(run())
    monkeypatch.setattr("jax_attn.decoding.running.raise_unless", lambda holds, *_: holds)
    trimmed = run()
    assert np.isnan(trimmed.state).all()
    assert np.isnan(trimmed.conv_state).all()


def test_a_compiled_trim_does_what_a_plain_one_does(x64):
    _, theirs = twins()
    _, cache = call(theirs, tokens(2, 6, 10), cache=theirs.init_cache(2, 9))
    for length in (0, 6):
        trimmed = jax.jit(lambda cache, n: cache.trim(n))(cache, length)
        jax.tree.map(np.testing.assert_array_equal, trimmed, cache.trim(length))
        assert int(trimmed.length) == length
        assert (np.asarray(trimmed.state) == 0).all() == (length == 0)


@pytest.mark.parametrize("index", [3, 7, -1])
def test_rows_that_a_cache_does_not_have_are_refused(monkeypatch, index, x64):
    message = rf"index \({index}\) must be at least 0 and below the batch of the cache \(3\)"
    ours, theirs = twins()
    order = np.array([2, index, 0])
    with pytest.raises(ValueError, match=message):
        ours.init_cache(3, 9).reorder(torch.from_numpy(order))
    cache = theirs.init_cache(3, 9)
    with pytest.raises(ValueError, match=message):
        cache.reorder(order)

    def run():  # traced anew each time, as a check may have been silenced
        return jax.jit(lambda cache, order: cache.reorder(order))(cache, order)

    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(run())
    monkeypatch.setattr("jax_attn.decoding.running.raise_unless", lambda holds, *_: holds)
    for array in (run().state, run().conv_state):
        assert np.isnan(array[1]).all()
        assert np.isfinite(array[::2]).all()


def test_a_mask_of_wrong_length_is_refused(monkeypatch, x64):
    check_masks_over_other_tokens(monkeypatch, *twins())


# ---- gradients and precision


@pytest.mark.parametrize("length", [1, 70])
def test_gradients_of_both_forms_agree(length, x64):
    ours, _ = twins()
    x = tokens(2, length, 10)
    one, two = (gradients_of_torch(ours, x, form) for form in ("chunked", "recurrent"))
    for name, gradient in one.items():
        scale = np.abs(two[name]).max()
        assert scale > 0 or length == 1, name
        np.testing.assert_allclose(gradient, two[name], rtol=0, atol=1e-12 * max(scale, 1.0), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_judge_finds_the_twins_equal(dtype):
    ours, theirs = twins(dtype="float32")
    report = parity.compare(ours, theirs, tokens(2, 9, 10).astype(np.float32), dtypes=(dtype,))
    assert report.verdict == "equal", report


def test_gradients_stay_finite_where_nothing_is_left():
    """Zero vectors, padding, decays that underflow and gates that are shut."""
    ours, theirs = twins(dtype="float32")
    with torch.no_grad():
        ours.A_log.fill_(8.0)
        ours.dt_bias.fill_(30.0)
    transfer(ours, theirs)
    x = tokens(2, 6, 10).astype(np.float32)
    x[0] = 0.0
    x[1, 2] = 1e4
    for name, gradient in gradients_of_torch(ours, x, "chunked").items():
        assert np.isfinite(gradient).all(), name
    graph, state = nnx.split(theirs)
    differentiate = jax.jit(jax.grad(lambda state, x: nnx.merge(graph, state)(x, form="chunked").sum(), (0, 1)))
    found = differentiate(state, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_initial_weights_are_those_of_transformers_in_kind():
    module = torch_attn.GatedDeltaNet(CONFIG)
    assert (module.dt_bias == 1.0).all()
    assert ((module.A_log >= np.log(0.01)) & (module.A_log <= np.log(16.0))).all()
    assert module.conv1d.weight.abs().max() <= 3**-0.5


@pytest.mark.optimized
def test_both_twins_start_alike_from_the_numbers_of_jax():
    theirs = jax_attn.GatedDeltaNet(CONFIG, rngs=nnx.Rngs(5))
    ours = torch_attn.GatedDeltaNet(CONFIG, rngs=torch_attn.random.JaxRngs(5))
    copy = torch_attn.GatedDeltaNet(CONFIG)
    transfer(theirs, copy)
    for name, array in copy.state_dict().items():
        # The logarithms of the two frameworks round differently.
        np.testing.assert_allclose(ours.state_dict()[name], array, rtol=0, atol=3e-7 if name == "A_log" else 0.0)


# ---- the example


def run_example(capsys) -> tuple[int, list[str]]:
    main = runpy.run_path(str(Path(families.__file__).parents[3] / "examples" / "recurrent_attention.py"))["main"]
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code), capsys.readouterr().out.splitlines()


def test_the_example_fails_for_a_forgetful_cache(capsys, monkeypatch):
    status, lines = run_example(capsys)
    assert status == 0
    assert [line.split(":")[0] for line in lines] == ["GatedDeltaNet", "LinearAttention"]
    assert all(line.endswith("every bit back: equal") for line in lines)

    advance = jax_attn.decoding.recurrent_cache.RecurrentCache.advance
    monkeypatch.setattr(
        jax_attn.decoding.recurrent_cache.RecurrentCache,
        "advance",
        lambda cache, state, conv_state, tokens: advance(cache, 0.5 * state, conv_state, tokens),
    )
    status, lines = run_example(capsys)
    assert status == 1
    # What is divided by its own sum does not see that both have shrunk, but for the newest token.
    assert all(line.endswith("every bit back: NOT equal") for line in lines)
