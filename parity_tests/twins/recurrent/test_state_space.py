"""Mamba and Mamba-2: both forms and frameworks, `transformers` and the formula give the same, cached and not."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

import jax_attn
import torch_attn
from attn_bridge import backends, parity, transfer
from attn_bridge.models import families
from attn_bridge.reference import mamba, mamba2
from attn_bridge.specs import Config, Mamba2Config, MambaConfig, find_variant
from attn_parity.frameworks.torch.running.promotion import promoted

from .recurrent import call, decode, gradients_of_torch, left_and_right, run_hugging_face, tokens

CONFIGS = {
    "Mamba": MambaConfig(10, 6, 4, 3, 7, conv_size=3, bias=True, latent_norms="scaled", eps=1e-3),
    "Mamba2": Mamba2Config(10, 6, 3, 4, 2, d_out=7, conv_size=3, bias=True, eps=1e-3, min_step=0.05, max_step=2.0),
}
REFERENCES = {"Mamba": mamba.reference, "Mamba2": mamba2.reference}
CHUNK = {"Mamba": 16, "Mamba2": 64}
"""Class -> tokens of a chunk."""

SIZES = {"state_size": 5, "time_step_rank": 3}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-3}
HF = {
    "mamba": (MambaMixer, "backbone.layers.1.mixer.", {**SIZES, "use_bias": True}),
    "falcon_mamba": (FalconMambaMixer, "backbone.layers.1.mixer.", {**SIZES, "mixer_rms_eps": 1e-3}),
    "jamba": (
        JambaMambaMixer,
        "model.layers.1.mamba.",
        {**HEADS, "mamba_d_state": 5, "mamba_dt_rank": 3, "mamba_d_conv": 3, "mamba_conv_bias": False},
    ),
    "mamba2": (
        Mamba2Mixer,
        "backbone.layers.1.mixer.",
        {"num_heads": 6, "head_dim": 4, "n_groups": 2, "state_size": 5, "layer_norm_epsilon": 1e-3},
    ),
    "bamba": (
        BambaMixer,
        "model.layers.1.mamba.",
        {
            **HEADS,
            "mamba_n_heads": 6,
            "mamba_d_head": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 5,
            "mamba_proj_bias": True,
            "attn_layer_indices": [0],
            "time_step_limit": (0.1, 1.5),
        },
    ),
}
"""Model type -> its layer, the prefix of its tensors, sizes of a tiny model."""

OLDER = ("mamba", "falcon_mamba")
"""Those whose layers draw their weights when they are made, unless told otherwise."""

every_class = pytest.mark.parametrize("name", CONFIGS)


def draw_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {row.rule.torch: random.normal(size=row.shape) * 0.7 + 0.1 for row in config.parameters}


def twins(name: str, config: Config | None = None, dtype: str = "float64"):
    config = config or CONFIGS[name]
    ours, theirs = (backends.load(framework).build_blank(name, config, dtype) for framework in ("torch", "flax"))
    ours.load_state_dict({name: torch.from_numpy(array) for name, array in draw_weights(config).items()})
    transfer(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize(
    ("name", "length"), [(name, length) for name, size in CHUNK.items() for length in (1, 6, size, 2 * size + 3)]
)
@pytest.mark.usefixtures("x64")
def test_both_forms_of_both_twins_are_the_formula(name, length):
    x = tokens(3, length, 10)
    mask = left_and_right(length) if length > 4 else None
    expected, _ = REFERENCES[name](CONFIGS[name], draw_weights(CONFIGS[name]), x, mask)
    for form in (None, "chunked", "recurrent"):
        for module in twins(name):
            got = call(module, x, attention_mask=mask, form=form)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


@every_class
@pytest.mark.usefixtures("x64")
def test_padding_on_the_left_gives_the_rows_own_result(name):
    """The projections have biases: without its mask behind them, the convolution would read them."""
    x, mask = tokens(3, 9, 10), left_and_right(9)
    for module in twins(name):
        shown = np.asarray(call(module, x, attention_mask=mask))
        np.testing.assert_allclose(shown[1:2, 3:], call(module, x[1:2, 3:]), rtol=0, atol=1e-14)
        other = np.where(mask[..., None], x, 1e3)
        np.testing.assert_array_equal(call(module, other, attention_mask=mask), shown)


@pytest.mark.parametrize(
    ("name", "steps"),
    [(name, steps) for name, size in CHUNK.items() for steps in ((1, 1, 2, 5), (size + 2, 1, 5))],
    ids=str,
)
@pytest.mark.usefixtures("x64")
def test_cached_decoding_is_the_full_pass(name, steps):
    x = tokens(3, sum(steps), 10)
    for mask in (None, left_and_right(sum(steps))):
        for module in twins(name):
            full = decode(module, x, (sum(steps),), mask)
            np.testing.assert_allclose(decode(module, x, steps, mask), full, rtol=0, atol=1e-13)


# ---- against transformers


@functools.cache
def hugging_face(model_type: str):
    """Return the config.json, the config, and layer 1 of a tiny model, with weights that hide nothing."""
    kind, prefix, sizes = HF[model_type]
    config = transformers.AutoConfig.for_model(model_type, hidden_size=12, num_hidden_layers=2, **sizes)
    with promoted():
        options = {"initialize_mixer_weights": False} if model_type in OLDER else {}
        layer = kind(config, 1, **options).eval().double()
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in layer.parameters():
                spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5
                parameter.copy_(spread * torch.randn(parameter.shape, generator=draw) + 0.1)
    state = {prefix + name: array.numpy() for name, array in layer.state_dict().items()}
    return json.loads(config.to_json_string()), config, layer, state


@pytest.mark.parametrize("steps", [(11,), "chunks", (5, 1, 1)], ids=str)
@pytest.mark.parametrize("model_type", HF)
@pytest.mark.usefixtures("x64")
def test_transformers_gives_the_same(model_type, steps):
    """A step of transformers' cache knows no ``time_step_limit``, so that Bamba runs whole."""
    if steps == "chunks":  # Mamba-2 of transformers has chunks of 256 tokens
        steps = (300,) if model_type in ("mamba2", "bamba") else (40,)
    steps = (sum(steps),) if model_type == "bamba" else steps
    raw, config, layer, state = hugging_face(model_type)
    x = tokens(3, sum(steps), 12)
    # With biases, the convolution of transformers reads those of padding on the left.
    mask = left_and_right(sum(steps)) if model_type not in ("mamba", "bamba") and len(steps) == 1 else None
    expected = run_hugging_face(layer, config, x, mask, steps)
    for backend in (torch_attn, jax_attn):
        got = decode(backend.from_hf(raw, 1, state), x, steps, mask)
        assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("model_type", HF)
def test_the_way_back_to_transformers_is_bit_exact(model_type):
    raw, _, _, state = hugging_face(model_type)
    back = torch_attn.to_hf(raw, 1, torch_attn.from_hf(raw, 1, state))
    assert back.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act ('gelu') of mamba2 is not supported, only 'silu' or 'swish'"),
        ({"time_step_limit": 0.1}, "time_step_limit (0.1) must be two numbers"),
        ({"expand": 3}, "num_heads * head_dim (24) must be expand * hidden_size (36)"),
    ],
    ids=str,
)
def test_a_config_that_can_not_be_right_is_refused(changes, message):
    raw, _, _, _ = hugging_face("mamba2")
    with pytest.raises(ValueError, match=next(iter(changes))) as caught:
        families.find_layer({**raw, **changes}, 1)
    assert str(caught.value) == message


# ---- gradients and precision


@every_class
@pytest.mark.usefixtures("x64")
def test_gradients_of_both_forms_agree(name):
    ours, _ = twins(name)
    x = tokens(2, CHUNK[name] + 6, 10)
    chunked, recurrent = (gradients_of_torch(ours, x, form) for form in ("chunked", "recurrent"))
    for path, gradient in chunked.items():
        scale = np.abs(recurrent[path]).max()
        assert scale > 0, path
        np.testing.assert_allclose(gradient, recurrent[path], rtol=0, atol=1e-12 * max(scale, 1.0), err_msg=path)


@every_class
def test_the_judge_finds_the_twins_equal(name):
    example = find_variant(name).examples[0].config
    ours, theirs = twins(name, example, "float32")
    report = parity.compare(ours, theirs, tokens(2, 9, example.d_in).astype(np.float32), dtypes=("bfloat16",))
    assert report.verdict == "equal", report


@every_class
def test_gradients_stay_finite_where_nothing_is_left(name):
    """Decays that underflow, padding, zero vectors and huge ones."""
    unlimited = CONFIGS[name].replace(max_step=None) if name == "Mamba2" else CONFIGS[name]
    ours, _ = twins(name, unlimited, "float32")
    with torch.no_grad():
        ours.A_log.fill_(8.0)
        ours.dt_bias.fill_(30.0)
    x = tokens(2, 6, 10).astype(np.float32)
    x[0] = 0.0
    x[1, 2] = 1e4
    for path, gradient in gradients_of_torch(ours, x, "chunked").items():
        assert np.isfinite(gradient).all(), path


# ---- initial weights


@pytest.mark.parametrize(("name", "config"), [("Mamba", MambaConfig(64, 256, 5)), ("Mamba2", Mamba2Config(64, 256, 1))])
def test_initial_steps_and_decays_are_as_published(name, config):
    module = getattr(torch_attn, name)(config)
    steps = torch.nn.functional.softplus(module.dt_bias)
    assert 0.001 <= steps.min() < 0.0015 < 0.07 < steps.max() <= 0.1
    if name == "Mamba":
        torch.testing.assert_close(module.A_log.exp(), torch.arange(1.0, 6.0).expand(256, 5))
    else:
        assert 0.0 <= module.A_log.min() < 0.2 < 2.7 < module.A_log.max() <= np.log(16.0)
    assert (module.D == 1.0).all()


@every_class
@pytest.mark.optimized
def test_both_twins_start_alike_from_the_numbers_of_jax(name):
    kind, config = getattr(torch_attn, name), CONFIGS[name]
    theirs = getattr(jax_attn, name)(config, rngs=nnx.Rngs(5))
    ours, copy = kind(config, rngs=torch_attn.random.JaxRngs(5)), kind(config)
    transfer(theirs, copy)
    for path, array in copy.state_dict().items():
        # The logarithms and exponentials of the two frameworks round differently.
        tolerance = 1e-6 if path in ("A_log", "dt_bias") else 0.0
        np.testing.assert_allclose(ours.state_dict()[path], array, rtol=tolerance, atol=tolerance)
