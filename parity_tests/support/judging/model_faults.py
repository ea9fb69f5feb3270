"""Faults of whole models, as people made them (facts: double offsets, rotary pairs, routers, scales), on our configs.

A fault changes the weights of a part under our torch names, or its config, and says at which submodule it is; where it
makes no sense for a block it says nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch

import torch_attn
from attn_bridge.checkpoints import configs
from attn_bridge.masks import sliding_window
from attn_bridge.specs import (
    DecoderBlockConfig,
    DecoderConfig,
    GatedDeltaNetConfig,
    MixtureOfExpertsConfig,
    MultiHeadLatentAttentionConfig,
    RMSNormConfig,
)

from ..models import decoder_oracle

Arrays = dict[str, np.ndarray]
Found = tuple[Any, str] | None
"""The config with the fault, and the submodule that it is in; None where the fault makes no sense."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of a block, or of the ends.

    Attributes:
        name: what it is called.
        plant: from the arrays of the part, without prefix, and its config to what comes out; it changes the arrays.
    """

    name: str
    plant: Callable[[Arrays, Any], Found]


def _norm_weight(arrays: Arrays, block: DecoderBlockConfig) -> str | None:
    name = f"{block.norm_names[0]}.scale"
    return name if name in arrays else None


def _key_scaled(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    name = next((one for one in ("att.W_key.weight", "att.W_latent.weight") if one in arrays), None)
    if name is None:
        return None
    arrays[name] *= 1.01
    return block, "att"  # where `transformers` has one matrix for query, key and value, no nearer place is there


def _rotary_pairs(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    """Put rows of the query in halves where they belong in pairs, or the other way round."""
    attention, name = block.attention, "att.W_query.weight"
    if getattr(attention, "position", None) is None or not hasattr(attention.position, "pairing") or name not in arrays:
        return None
    if isinstance(attention, MultiHeadLatentAttentionConfig):
        heads, plain, turned = attention.num_heads, attention.nope_dim, attention.rope_dim
    else:
        heads, plain, turned = attention.num_heads, 0, attention.position.dim or attention.head_dim
    rows = arrays[name].reshape(heads, -1, arrays[name].shape[-1]).copy()
    part = rows[:, plain : plain + turned]
    rows[:, plain : plain + turned] = part.reshape(len(rows), 2, turned // 2, -1).swapaxes(1, 2).reshape(part.shape)
    arrays[name] = rows.reshape(arrays[name].shape)
    return block, "att"


def _heads_turned(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    """Exchange the axis of heads and that of channels, as where a stacked kernel is read the wrong way round."""
    name, heads = "att.W_value.weight", getattr(block.attention, "num_kv_heads", None)
    if name not in arrays or not heads:
        return None
    one = arrays[name]
    arrays[name] = np.ascontiguousarray(one.reshape(heads, -1, one.shape[-1]).swapaxes(0, 1)).reshape(one.shape)
    return block, "att"


def _offset_twice(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    name = _norm_weight(arrays, block)
    if name is None:
        return None
    arrays[name] += 1
    return block, name.removesuffix(".scale")


def _offset_missing(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if not getattr(block.norm, "unit_offset", False):
        return None
    return block.replace(norm=block.norm.replace(unit_offset=False)), block.norm_names[0]


def _eps(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    return block.replace(norm=block.norm.replace(eps=block.norm.eps * 30)), block.norm_names[0]


def _query_scale(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if getattr(block.attention, "scale", None) is None:
        return None
    return block.replace(attention=block.attention.replace(scale=block.attention.scale * 1.05)), "att"


def _soft_cap(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if getattr(block.attention, "softcap", None) is None:
        return None
    return block.replace(attention=block.attention.replace(softcap=None)), "att"


def _clip(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if getattr(block.attention, "clip", None) is None:
        return None
    return block.replace(attention=block.attention.replace(clip=None)), "att"


def _window(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    """Make a local layer of a global one, or a window that counts one token less."""
    if not hasattr(block.attention, "mask"):
        return None
    mask = block.attention.mask
    window = sliding_window(getattr(mask, "size", 5) - 1)
    return block.replace(attention=block.attention.replace(mask=window)), "att"


def _rotary_base(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    position = getattr(block.attention, "position", None)
    if not hasattr(position, "base"):
        return None
    changed = dataclasses.replace(position, base=position.base * 1.1)
    return block.replace(attention=block.attention.replace(position=changed)), "att"


def _positions_missing(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if getattr(block.attention, "position", None) is None:
        return None
    return block.replace(attention=block.attention.replace(position=None)), "att"


def _sinks(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if "att.sinks" not in arrays:
        return None
    arrays["att.sinks"][:] = -1e4
    return block, "att"


def _gate_and_up(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    names = ("ff.fc1.weight", "ff.fc2.weight")
    if not arrays.keys() >= set(names):
        return None
    arrays[names[0]], arrays[names[1]] = arrays[names[1]], arrays[names[0]]
    return block, "ff"


def _expert_order(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if not isinstance(block.feed_forward, MixtureOfExpertsConfig):
        return None
    for name in [one for one in arrays if one.startswith("ff.experts.0.")]:
        other = name.replace("experts.0", "experts.1")
        arrays[name], arrays[other] = arrays[other], arrays[name]
    return block, "ff"


def _router_normalisation(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if not isinstance(block.feed_forward, MixtureOfExpertsConfig):
        return None
    router = block.feed_forward.router
    changed = block.feed_forward.replace(router=router.replace(normalise=not router.normalise))
    return block.replace(feed_forward=changed), "ff"


def _router_scale(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if not isinstance(block.feed_forward, MixtureOfExpertsConfig) or block.feed_forward.router.scale == 1.0:
        return None
    router = block.feed_forward.router.replace(scale=1.0)
    return block.replace(feed_forward=block.feed_forward.replace(router=router)), "ff"


def _residual_scale(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    return None if block.residual_scale == 1.0 else (block.replace(residual_scale=1.0), "")


def _recurrent_decay(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if not isinstance(block.attention, GatedDeltaNetConfig):
        return None
    name = next(one for one in arrays if one.endswith("A_log"))
    arrays[name] += 0.05
    return block, "linear_att"


def _lambda(arrays: Arrays, block: DecoderBlockConfig) -> Found:
    if not hasattr(block.attention, "lambda_init"):
        return None
    return block.replace(attention=block.attention.replace(lambda_init=block.attention.lambda_init + 0.1)), "att"


BLOCK_FAULTS = (
    Fault("a key matrix 1 % too large", _key_scaled),
    Fault("rotary pairs", _rotary_pairs),
    Fault("a stacked axis in the wrong place", _heads_turned),
    Fault("1 + w twice", _offset_twice),
    Fault("1 + w missing", _offset_missing),
    Fault("eps of norms", _eps),
    Fault("scale of the query", _query_scale),
    Fault("soft cap of scores left out", _soft_cap),
    Fault("clip of query, key and value left out", _clip),
    Fault("local and global layers shifted", _window),
    Fault("base of rotary positions", _rotary_base),
    Fault("positions left out", _positions_missing),
    Fault("sinks left out", _sinks),
    Fault("gate and up exchanged", _gate_and_up),
    Fault("order of experts", _expert_order),
    Fault("router normalisation", _router_normalisation),
    Fault("scale of the router left out", _router_scale),
    Fault("scale of what blocks add left out", _residual_scale),
    Fault("decay of the recurrent state", _recurrent_decay),
    Fault("lambda of the layer", _lambda),
)


def _last_norm(arrays: Arrays, config: DecoderConfig) -> Found:
    if "final_norm.scale" not in arrays:
        return None
    arrays["final_norm.scale"][:] = 0 if isinstance(config.norm, RMSNormConfig) and config.norm.unit_offset else 1
    return config, "final_norm"


def _embedding_scale(arrays: Arrays, config: DecoderConfig) -> Found:
    return None if config.embedding_scale == 1.0 else (config.replace(embedding_scale=1.0), "")


def _logit_scale(arrays: Arrays, config: DecoderConfig) -> Found:
    return None if config.logit_scale == 1.0 else (config.replace(logit_scale=1.0), "")


def _logit_softcap(arrays: Arrays, config: DecoderConfig) -> Found:
    return None if config.logit_softcap is None else (config.replace(logit_softcap=None), "")


def _head(arrays: Arrays, config: DecoderConfig) -> Found:
    name = "tok_emb.weight" if config.tie else "out_head.weight"
    arrays[name] *= 1.01
    return config, name.removesuffix(".weight")


def _positions_off(arrays: Arrays, config: DecoderConfig) -> Found:
    if "pos_emb.weight" not in arrays:
        return None
    arrays["pos_emb.weight"] = np.roll(arrays["pos_emb.weight"], 1, 0)
    return config, "pos_emb"


END_FAULTS = (
    Fault("final norm missing", _last_norm),
    Fault("embedding scale", _embedding_scale),
    Fault("logit scale left out", _logit_scale),
    Fault("soft cap of logits left out", _logit_softcap),
    Fault("head 1 % too large", _head),
    Fault("positions off by one", _positions_off),
)


@dataclasses.dataclass(frozen=True)
class Planted:
    """Faults of one folder: one per part at most.

    Attributes:
        faults: part -> the fault's name and the submodule that it is in.
        config: the model's config with them.
        arrays: its weights.
    """

    faults: dict[str, tuple[str, str]]
    config: DecoderConfig
    arrays: Arrays


def right(family: str, home: Path, dtype: str = "float32") -> Path:
    """Write a right model of a family, as `transformers` does, in a precision."""
    import torch

    folder = home / f"{family}-{dtype}"
    folder.mkdir(parents=True)
    source = decoder_oracle.run(family).folder
    tensors = load_file(source / "model.safetensors")
    save_torch({name: one.to(getattr(torch, dtype)) for name, one in tensors.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planted(folder: Path) -> Iterator[Planted]:
    """Yield folders' worth of faults until each that makes sense was in some part; one block of each is right."""
    config = configs.read_config("DecoderModel", folder)
    model = torch_attn.DecoderModel.from_pretrained(folder)
    weights = {name: one.detach().float().numpy() for name, one in model.state_dict().items()}
    waiting, ending = list(BLOCK_FAULTS), list(END_FAULTS)
    number = 0
    while waiting or ending:
        arrays = {name: one.copy() for name, one in weights.items()}
        blocks, faults, whole = list(config.blocks), {}, config
        kept = number % len(blocks)
        for index in range(len(blocks)):
            if index != kept:
                found = _next(waiting, arrays, f"trf_blocks.{index}.", blocks[index])
                if found is not None:
                    faults[f"trf_blocks.{index}"], blocks[index] = found[:2], found[2]
        found = _next(ending, arrays, "", config)
        if found is not None:
            faults["ends"], whole = found[:2], found[2]
        number += 1
        if faults:
            yield Planted(faults, whole.replace(blocks=tuple(blocks)), arrays)
        elif number % len(blocks) == 0:
            return  # what waits makes sense in no block


def _next(waiting: list[Fault], arrays: Arrays, prefix: str, config: Any) -> tuple[str, str, Any] | None:
    """Plant the first waiting fault that makes sense for a part."""
    for fault in waiting:
        part = {name.removeprefix(prefix): one for name, one in arrays.items() if name.startswith(prefix)}
        found = fault.plant(part, config)
        if found is not None:
            waiting.remove(fault)
            arrays.update({prefix + name: one for name, one in part.items()})
            return fault.name, found[1], found[0]
    return None


def write(one: Planted, folder: Path) -> Path:
    """Write a model with faults as a folder of ours."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(configs.own_config("DecoderModel", one.config)))
    arrays = {name: np.ascontiguousarray(array) for name, array in one.arrays.items()}
    if one.config.tie:
        arrays.pop("out_head.weight", None)
    save_file(arrays, folder / "model.safetensors")
    return folder
