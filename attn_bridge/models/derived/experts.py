"""Experts of described families: which blocks have them, their config, and the keys that both are written under."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

from ...printable import printable
from ...specs.blocks.feed_forward import Activation, ClampedGate, FeedForwardConfig
from ...specs.blocks.mixture_of_experts import ExpertGroups, MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderConfig
from ...specs.rms_norm import RMSNormConfig
from ..reading.model_config import ConfigFile

Values = Mapping[str, Any]
"""Field of ours -> its value."""

KINDS = ("dense", "sparse")
"""Kinds of feed-forward layers in a config: without experts, and with them."""


_AVERAGE = "average"

METHODS = ("greedy", "group_limited_greedy")
"""Values of DeepSeek V2's key of groups: without, and with them."""


def is_sparse(config: ConfigFile, layer: int, values: Values) -> bool:
    """Return whether a block has experts.

    Args:
        config: the model's.
        layer: index of the block.
        values: ``types``, a kind per block, which takes precedence where it is given; ``first`` and ``last`` block with
            experts (-1 is the last block); ``step``, every how many-th block has them; ``dense``, blocks without;
            ``listed``, those with experts, which takes precedence over these three;
            ``recurs``, whether it is the block of its interval that has them; a ``count`` of experts that must be
            ``above`` a number.

    Raises:
        TypeError: ``dense`` is not a list of integers.
        ValueError: ``types`` has no known kind for the block, or ``step`` is below 1.
    """
    kinds = values.get("types")
    if not values.get("recurs", True) or values.get("count", 1) <= values.get("above", 0):
        return False
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or len(kinds) <= layer or kinds[layer] not in KINDS:
            excerpt = printable(repr(kinds), 60)
            raise ValueError(
                f"kinds of feed-forward layers ({excerpt}) of {config.model_type} must be a list with 'dense' or "
                f"'sparse' for layer {layer}"
            )
        return bool(kinds[layer] == KINDS[True])
    listed = values.get("listed")
    if listed is not None:
        if not isinstance(listed, list) or not all(type(index) is int for index in listed):
            raise TypeError(f"moe_layers of {config.model_type} must be a list of integers, got {listed!r:.60}")
        return layer in listed
    dense, last, step = values.get("dense") or (), values.get("last", -1), values.get("step", 1)
    if not isinstance(dense, list | tuple) or not all(type(index) is int for index in dense):
        raise TypeError(f"layers without experts of {config.model_type} must be a list of integers, got {dense!r:.60}")
    if step < 1:
        raise ValueError(f"step between layers with experts ({step}) of {config.model_type} must be at least 1")
    is_inside = layer >= values.get("first", 0) and (last == -1 or layer <= last)
    return is_inside and (layer + 1) % step == 0 and layer not in dense


def read_experts(
    width: int, activation: Activation, values: Values, router: Values, groups: Values, norm: RMSNormConfig | None
) -> MixtureOfExpertsConfig:
    """Return the experts of a block.

    Args:
        width: of the model.
        activation: of every expert.
        values: ``num_experts``, ``top_k``, ``hidden_dim`` of an expert; ``shared``, the width of what every token goes
            to (0 for nothing, where ``may_lack_shared``), with ``shared_bias`` and ``shared_gate``; whether both are
            averaged (``combined``); ``bias`` of an expert, and ``clamp_limit`` and ``clamp_alpha`` of a clipped gate.
        router: arguments of `Router` other than groups; whether softmax is ``over_chosen`` experts alone.
        groups: arguments of `ExpertGroups`; empty for no groups.
        norm: of the input of the router and of that of the experts, if they have separate norms (Gemma 4).

    Raises:
        ValueError: no shared layers in a family whose models all have them.
    """
    shared = values.get("shared", 0)
    if "shared" in values and not shared and not values.get("may_lack_shared"):
        raise ValueError(f"shared layers of width {shared} are not supported there, only of at least 1")
    bias, share = bool(values.get("shared_bias")), 0.5 if shared and values.get("combined") == _AVERAGE else 1.0
    scale = router.get("scale", share)
    router = {**router, "scale": 1.0 if scale is None else scale}
    if router.pop("over_chosen", False) and router["scores"] == "softmax":
        router["normalise"] = True
    if not router.get("normalise", True):
        router.pop("sum_eps", None)
    clamp = ClampedGate(values["clamp_limit"], values["clamp_alpha"]) if "clamp_limit" in values else None
    return MixtureOfExpertsConfig(
        FeedForwardConfig(width, values["hidden_dim"], activation, bias=bool(values.get("bias")), clamp=clamp),
        values["num_experts"],
        values["top_k"],
        Router(**router, groups=ExpertGroups(**groups) if groups else None, norm=norm),
        shared=FeedForwardConfig(width, shared, activation, bias=bias, scales=(1.0, share)) if shared else None,
        shared_gate=bool(shared and values.get("shared_gate")),
        norm=norm,
        weighs=values.get("weighs", "outputs"),
    )


def period(layers: Sequence[bool]) -> dict[str, int]:
    """Return the ``interval`` and the ``offset`` in it of the layers with a part; those of none where they differ."""
    numbers = [number for number, has_part in enumerate(layers) if has_part]
    offset = numbers[0] if numbers else len(layers)
    interval = numbers[1] - offset if len(numbers) > 1 else len(layers) + 1
    return {"interval": interval, "offset": offset}


def written_parts(config: DecoderConfig) -> dict[str, object]:
    """Return part -> an object with a value per field, of feed-forward layers and experts."""
    layers = [block.feed_forward for block in config.blocks]
    beside = (one for block in config.blocks for one in (block.dense, block.feed_forward))
    dense = next((one for one in beside if isinstance(one, FeedForwardConfig)), None)
    mixture = next((one for one in layers if isinstance(one, MixtureOfExpertsConfig)), None)
    sparse = [isinstance(one, MixtureOfExpertsConfig) for one in layers]
    kinds = types.SimpleNamespace(
        switch=any(sparse),
        types=[KINDS[is_one] for is_one in sparse],
        listed=[layer for layer, is_one in enumerate(sparse) if is_one],
        dense=[layer for layer, is_one in enumerate(sparse) if not is_one],
        first=sparse.index(True) if any(sparse) else len(sparse),
        last=-1,
        step=1,
        **period(sparse),
    )
    if mixture is None:
        return {"feed_forward": dense, "sparse": kinds}
    shared, groups = mixture.shared, mixture.router.groups
    return {
        "sparse": kinds,
        "feed_forward": types.SimpleNamespace(activation=mixture.expert.activation) if dense is None else dense,
        "experts": types.SimpleNamespace(
            num_experts=mixture.num_experts,
            top_k=mixture.top_k,
            hidden_dim=mixture.expert.hidden_dim,
            clamp_limit=getattr(mixture.expert.clamp, "limit", None),
            clamp_alpha=getattr(mixture.expert.clamp, "alpha", None),
            shared=0 if shared is None else shared.hidden_dim,
            shared_bias=None if shared is None else shared.bias,
            combined="sum" if mixture.router.scale == 1.0 else _AVERAGE,
        ),
        "router": mixture.router,
        "groups": types.SimpleNamespace(
            number=None if groups is None else groups.number,
            chosen=None if groups is None else groups.chosen,
            method=METHODS[groups is not None],
        ),
    }
