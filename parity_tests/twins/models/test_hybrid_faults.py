"""Faults in decoders with several kinds of layers: each gives other logits than `transformers`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_attn
from attn_bridge import masks, specs
from torch_attn.backend import to_numpy

from ...support.models.decoder_oracle import run

Config, Fault = specs.DecoderConfig, Callable[[Any], Any]


def in_blocks(**changes: Any) -> Fault:
    """Return a fault of every block: fields and their values, or functions of the block."""

    def change(config: Config) -> Config:
        return dataclasses.replace(config, blocks=tuple(_replaced(block, changes) for block in config.blocks))

    return change


def in_attention(kind: type, **changes: Any) -> Fault:
    """Return a fault of every attention of a kind."""
    return in_blocks(
        attention=lambda block: (
            _replaced(block.attention, changes) if isinstance(block.attention, kind) else block.attention
        )
    )


def in_recurrent(**changes: Any) -> Fault:
    """Return a fault of every recurrent layer next to attention."""
    return in_blocks(recurrent=lambda block: _replaced(block.recurrent, changes))


def _replaced(part: Any, changes: dict[str, Any]) -> Any:
    values = {name: value(part) if callable(value) else value for name, value in changes.items()}
    return dataclasses.replace(part, **values)


def of(path: str, **changes: Any) -> Callable[[Any], Any]:
    """Return a function from a part to the part below a path, changed."""
    return lambda part: _replaced(getattr(part, path), changes)


def swapped(first: str, second: str) -> Fault:
    """Return a fault of weights: parameters whose names have either part are swapped."""

    def change(state: dict[str, Any]) -> dict[str, Any]:
        pairs = {name: name.replace(first, second) for name in state if first in name}
        return {**state, **{one: state[other] for name, other in pairs.items() for one, other in _both(name, other)}}

    return change


def _both(one: str, other: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return (one, other), (other, one)


def changed(part: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Return a fault of weights: parameters whose names have the part are replaced."""
    return lambda state: {name: function(one) if part in name else one for name, one in state.items()}


def routed(**changes: Any) -> Callable[[Any], Any]:
    """Return a function from a block to its feed-forward layers, with another router where they are experts."""

    def change(block: Any) -> Any:
        layers = block.feed_forward
        is_sparse = isinstance(layers, specs.MixtureOfExpertsConfig)
        return dataclasses.replace(layers, router=layers.router.replace(**changes)) if is_sparse else layers

    return change


def turned(**changes: Any) -> Fault:
    """Return a fault of every attention with rotary positions."""

    def change(block: Any) -> Any:
        attention = block.attention
        return attention if attention.position is None else _replaced(attention, changes)

    return in_blocks(attention=change)


def unturned(**changes: Any) -> Fault:
    """Return a fault of every attention without positions."""

    def change(block: Any) -> Any:
        attention = block.attention
        return _replaced(attention, changes) if attention.position is None else attention

    return in_blocks(attention=change)


def mixed(**changes: Any) -> Fault:
    """Return a fault of all experts."""

    def change(block: Any) -> Any:
        layers = block.feed_forward
        return _replaced(layers, changes) if isinstance(layers, specs.MixtureOfExpertsConfig) else layers

    return in_blocks(feed_forward=change)


HEADS, STATES, DELTA = specs.GroupedQueryAttentionConfig, specs.Mamba2Config, specs.GatedDeltaNetConfig
KIMI, LATENT = specs.KimiDeltaAttentionConfig, specs.MultiHeadLatentAttentionConfig
SELECTIVE, LIGHTNING, ZEROS, NEGATIVE = specs.MambaConfig, specs.LightningAttentionConfig, torch.zeros_like, torch.neg
OFF_BY_ONE = changed("conv1d.weight", lambda taps: taps.roll(1, -1))

FAULTS: dict[str, dict[str, Fault]] = {
    "qwen3.5": {
        "norms without 1": in_blocks(norm=of("norm", unit_offset=False)),
        "all channels turn": in_attention(HEADS, position=of("position", dim=None, axes=None, layout="sections")),
        "beta and alpha": swapped("W_beta", "W_alpha"),
        "sign of A": changed("A_log", NEGATIVE),
        "convolution off by one": OFF_BY_ONE,
    },
    "qwen3.5-moe": {
        "weights of experts": in_blocks(
            feed_forward=of("feed_forward", router=specs.Router(normalise=False)),
        ),
        "gate of shared layers": changed("shared_gate", ZEROS),
        "bias of steps": changed("dt_bias", ZEROS),
    },
    "mamba2": {
        "groups of the norm": in_attention(STATES, norm_groups=1),
        "steps": in_attention(STATES, max_step=0.5),
        "gate and value": swapped("W_gate", "W_value"),
        "key and query": swapped("W_key", "W_query"),
        "bias of steps": changed("dt_bias", ZEROS),
        "sign of A": changed("A_log", NEGATIVE),
        "no D": changed("linear_att.D", ZEROS),
        "convolution off by one": OFF_BY_ONE,
    },
    "mamba": {
        "norms of steps, keys and queries": in_attention(SELECTIVE, latent_norms="plain"),
        "gate and value": swapped("W_gate", "W_value"),
        "key and query": swapped("W_key", "W_query"),
        "bias of the convolution": changed("conv1d.bias", ZEROS),
        "bias of steps": changed("dt_bias", ZEROS),
        "sign of A": changed("A_log", NEGATIVE),
        "no D": changed("linear_att.D", ZEROS),
        "convolution off by one": OFF_BY_ONE,
    },
    "lfm2": {
        "gates before and after": swapped("linear_att.W_query", "linear_att.W_value"),
        "convolution off by one": OFF_BY_ONE,
        "epsilon of norms of heads": in_attention(HEADS, qk_norm=specs.QKNorm()),
        "gate of feed-forward layers": swapped("ff.fc1", "ff.fc2"),
        "base of positions": in_attention(HEADS, position=specs.Rotary()),
    },
    "lfm3": {
        "gates before and after": swapped("linear_att.W_query", "linear_att.W_value"),
        "convolution off by one": OFF_BY_ONE,
        "epsilon of norms of heads": in_attention(HEADS, qk_norm=specs.QKNorm()),
        "base of positions": in_attention(HEADS, position=specs.Rotary()),
        "window in no layer": in_attention(HEADS, mask=masks.causal()),
        "softplus of the gate": in_attention(HEADS, gate_activation="softplus"),
        "norms exchanged": swapped(".norm1", ".norm2"),
    },
    "mimo": {
        "factor of values": in_attention(HEADS, value_scale=1.0),
        "window in no layer": in_attention(HEADS, mask=masks.causal()),
        "sinks": changed("sinks", ZEROS),
        "base of positions": in_attention(HEADS, position=specs.Rotary(500.0, 4)),
        "bias of experts": changed("correction_bias", ZEROS),
        "gates of feed-forward layers": swapped(".fc1", ".fc2"),
    },
    "modernbert": {
        "gates exchanged": swapped("ff.fc1", "ff.fc2"),
        "window in no layer": in_attention(HEADS, mask=masks.causal()),
        "positions of layers with a window everywhere": in_attention(HEADS, position=specs.Rotary(100.0)),
        "activation": in_blocks(feed_forward=of("feed_forward", activation="silu")),
        "no layer before the head": changed("head_linear.bias", ZEROS),
    },
    "lfm2-moe": {
        "weights of experts": in_blocks(feed_forward=routed(normalise=False, sum_eps=0.0)),
        "constant of their sum": in_blocks(feed_forward=routed(sum_eps=0.1)),
        "factor of experts": in_blocks(feed_forward=routed(scale=1.0)),
        "softmax of experts": in_blocks(feed_forward=routed(scores="softmax")),
        "bias of experts": changed("correction_bias", ZEROS),
        "gates of feed-forward layers": swapped(".fc1", ".fc2"),
    },
    "falcon-mamba": {
        "no norms of steps, keys and queries": in_attention(SELECTIVE, latent_norms="none"),
        "epsilon of these norms": in_attention(SELECTIVE, eps=1e-6),
        "gate and value": swapped("W_gate", "W_value"),
        "key and query": swapped("W_key", "W_query"),
        "bias of steps": changed("dt_bias", ZEROS),
        "convolution off by one": OFF_BY_ONE,
    },
    "jamba": {
        "scale of keys": changed("k_norm", torch.ones_like),
        "scale of steps": changed("step_norm", torch.ones_like),
        "epsilon of norms": in_attention(SELECTIVE, eps=1e-6),
        "positions": in_attention(HEADS, position=specs.Rotary()),
        "window": in_attention(HEADS, mask=masks.sliding_window(5)),
        "weights of experts": in_blocks(feed_forward=routed(normalise=True)),
        "gate of experts": swapped("experts.0.fc1", "experts.0.fc2"),
    },
    "bamba": {
        "all channels turn": in_attention(HEADS, position=of("position", dim=None)),
        "epsilon of norms": in_blocks(norm=of("norm", eps=1e-2)),
        "no D": changed("linear_att.D", ZEROS),
    },
    "falcon-h1": {
        "gate before the norm": in_recurrent(norm_order="gate_first"),
        "factors of the projections": in_recurrent(projection_scales=(1.0,) * 5),
        "factors of key and query": in_recurrent(
            projection_scales=lambda layer: tuple(layer.projection_scales[at] for at in (0, 1, 3, 2, 4))
        ),
        "factors of the mixers": in_blocks(mixer_scales=lambda block: block.mixer_scales[::-1]),
        "factors of the feed-forward layers": in_blocks(feed_forward=of("feed_forward", scales=(1.0, 1.0))),
        "factor of scores": in_attention(HEADS, scale=0.5),
        "factor of embeddings": lambda config: dataclasses.replace(config, embedding_scale=1.0),
        "gate and value": swapped("W_gate", "W_value"),
        "no D": changed("linear_att.D", ZEROS),
    },
    "falcon-h1-without-norms": {
        "no factors": in_recurrent(projection_scales=(1.0,) * 5),
        "bias of steps": changed("dt_bias", ZEROS),
        "convolution off by one": OFF_BY_ONE,
    },
    "nemotron-h": {
        "steps": in_attention(STATES, min_step=0.9),
        "positions": in_attention(HEADS, position=specs.Rotary()),
        "activation": in_blocks(
            feed_forward=lambda block: block.feed_forward and block.feed_forward.replace(activation="relu")
        ),
        "epsilon of norms": in_blocks(norm=of("norm", eps=1e-5)),
        "groups of the norm": in_attention(STATES, norm_groups=1),
        "gate and value": swapped("W_gate", "W_value"),
        "key and query": swapped("linear_att.W_key", "linear_att.W_query"),
    },
    "llama4": {
        "no norms behind the rotation": turned(qk_norm=None),
        "norms of full layers": unturned(qk_norm=specs.QKNorm("head", 1e-3, rotated=True, affine=False)),
        "epsilon of the norms of heads": turned(qk_norm=specs.QKNorm("head", 0.3, rotated=True, affine=False)),
        "halves turn": turned(position=of("position", pairing="half")),
        "positions of full layers": unturned(position=specs.Rotary(500000.0, pairing="interleaved")),
        "no positions": turned(position=None),
        "windows": turned(mask=masks.sliding_window(4)),
        "all of the text": turned(mask=masks.causal()),
        "chunks off by one": turned(mask=masks.chunked(5)),
        "chunks of full layers": unturned(mask=masks.chunked(4)),
        "no temperature": unturned(temperature=None),
        "positions of the temperature": unturned(temperature=of("temperature", offset=0)),
        "temperature of chunks": turned(temperature=specs.Temperature(0.7, 3, 1)),
        "weighed outputs": mixed(weighs="outputs"),
        "weights by softmax": mixed(router=of("router", scores="softmax")),
        "normalised weights": mixed(router=of("router", normalise=True)),
        "fewer experts": mixed(top_k=1),
        "shared layers are gated by others": swapped("shared.fc1", "shared.fc2"),
        "gate of dense layers": swapped("ff.fc1", "ff.fc2"),
    },
    "cohere2-moe": {
        "norms": in_blocks(norm=lambda block: specs.RMSNormConfig(24)),
        "halves turn": turned(position=of("position", pairing="half")),
        "positions of full layers": unturned(position=specs.Rotary(pairing="interleaved")),
        "window off by one": turned(mask=lambda attention: masks.sliding_window((attention.mask.reach or 12) - 1)),
        "sum of experts and shared layers": mixed(router=of("router", scale=1.0)),
        "shared layers in full": mixed(shared=of("shared", scales=(1.0, 1.0))),
        "weights by softmax": mixed(router=of("router", scores="softmax")),
        "weights that are not normalised": mixed(router=of("router", normalise=False)),
        "factor of logits": lambda config: dataclasses.replace(config, logit_scale=1.0),
        "gate of experts": swapped("experts.0.fc1", "experts.0.fc2"),
    },
    "granite-4": {
        "factor of sums": in_blocks(residual_scale=1.0),
        "factor of scores": in_attention(HEADS, scale=6**-0.5),
        "positions": in_attention(HEADS, position=specs.Rotary()),
        "gate of shared layers": swapped("shared.fc1", "shared.fc2"),
    },
    "granite-4-dense": {
        "no positions": in_attention(HEADS, position=None),
        "gate of feed-forward layers": swapped("ff.fc1", "ff.fc2"),
        "bias of steps": changed("dt_bias", ZEROS),
    },
    "kimi-linear": {
        "beta and gate": swapped("W_decay_down", "W_gate_down"),
        "bias of the decay": changed("dt_bias", ZEROS),
        "sign of A": changed("A_log", NEGATIVE),
        "kernels of query and key": changed("conv1d.weight", lambda taps: torch.roll(taps, 15, 0)),
        "convolution off by one": OFF_BY_ONE,
        "epsilon of the norm behind the heads": in_attention(KIMI, eps=1e-6),
        "positions": in_attention(LATENT, position=specs.Rotary()),
        "scale": in_attention(LATENT, scale=6**-0.5),
        "epsilon of the norms of latents": in_attention(LATENT, norm_eps=1e-3),
        "weights of experts": in_blocks(feed_forward=routed(normalise=False)),
        "factor of experts": in_blocks(feed_forward=routed(scale=1.0)),
        "groups of experts": in_blocks(feed_forward=routed(groups=None)),
        "softmax of experts": in_blocks(feed_forward=routed(scores="softmax")),
        "bias of experts": changed("correction_bias", ZEROS),
        "gate of shared layers": swapped("shared.fc1", "shared.fc2"),
    },
    "olmo-hybrid": {
        "beta up to 1": in_attention(DELTA, negative=False),
        "epsilon of the norm behind the heads": in_attention(DELTA, eps=1e-3),
        "norms behind sums": in_blocks(norms=lambda block: "residual" if block.norms == "post" else block.norms),
        "sums with norms": in_blocks(norms=lambda block: "stream" if block.norms == "pre" else block.norms),
        "beta and alpha": swapped("W_beta", "W_alpha"),
        "sign of A": changed("A_log", NEGATIVE),
        "convolution off by one": OFF_BY_ONE,
        "positions": in_attention(HEADS, position=specs.Rotary()),
        "epsilon of norms of query and key": in_attention(HEADS, qk_norm=specs.QKNorm("full")),
        "norms of sublayers": swapped("norm1", "norm2"),
    },
    "olmo-hybrid-with-positions": {
        "beta up to 2": in_attention(DELTA, negative=True),
        "no positions": in_attention(HEADS, position=None),
        "window": in_attention(HEADS, mask=masks.sliding_window(5)),
    },
    "minimax": {
        "norms": in_blocks(norms="pre", stream_scales=(1.0, 1.0)),
        "factors of the stream": in_blocks(stream_scales=lambda block: block.stream_scales[::-1]),
        "window off by one": in_attention(HEADS, mask=masks.sliding_window(5)),
        "the same decay in all layers": in_attention(LIGHTNING, decay_rates=None),
        "gate of experts": swapped("experts.0.fc1", "experts.0.fc2"),
    },
}
"""Decoder of the oracle -> fault -> its change of the config, or of the weights by name."""

OF_WEIGHTS = {changed.__name__, swapped.__name__}


@functools.lru_cache(maxsize=1)
def loaded(name: str) -> Any:
    """Return the decoder as it is read."""
    return torch_attn.DecoderModel.from_pretrained(run(name, "left").folder)


@torch.no_grad()
def relative_error(name: str, fault: Fault | None = None) -> float:
    oracle = run(name, "left")
    config, right = loaded(name).config, loaded(name).state_dict()
    state = right
    if fault is not None and fault.__qualname__.partition(".")[0] in OF_WEIGHTS:
        state = fault(right)
        assert any(not torch.equal(one, right[key]) for key, one in state.items())
    elif fault is not None:
        config = fault(config)
        assert config != loaded(name).config
    model = torch_attn.DecoderModel(config, dtype=torch.float64).eval()
    model.load_state_dict(state)
    given = {"attention_mask": torch.tensor(oracle.mask), "positions": torch.tensor(oracle.positions)}
    wanted = oracle.logits[oracle.mask]
    return np.abs(to_numpy(model(torch.tensor(oracle.ids), **given))[oracle.mask] - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_changes_the_logits(name):
    assert relative_error(name) <= 1e-10
    missed = [fault for fault, change in FAULTS[name].items() if relative_error(name, change) <= 1e-4]
    assert missed == []
