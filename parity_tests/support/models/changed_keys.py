"""A key of a config.json with another value: ours gives the logits of `transformers`, or refuses the config."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import torch_attn
from attn_bridge.models import families
from attn_parity.frameworks.torch.running.promotion import promoted
from torch_attn.backend import to_numpy

from .decoder_oracle import DECODERS, make


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    """Return the name of a test: the oracle's, and the changed keys with their values."""
    return "-".join([case[0], *(f"{key}={str(value)[:40]}" for key, value in case[1].items())])


def refusal(keys: dict[str, Any]) -> str:
    """Return why ours does not read a config; "" if it does."""
    try:
        families.find_decoder(keys)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def check(name: str, changes: dict[str, Any], refused: Collection[str], folder: Path) -> None:
    """Compare the logits of an oracle whose config is changed, or check that it may be refused.

    Args:
        name: a key of `DECODERS`.
        changes: keys and values.
        refused: keys of which some value is refused.
        folder: an empty one.
    """
    model_type, sizes = DECODERS[name]
    sizes = copy.deepcopy({**sizes, **changes})
    reason = refusal({"model_type": model_type, **sizes})
    if reason:
        assert "\n" not in reason
        assert set(changes) & set(refused), reason
        return
    with promoted(), torch.no_grad():
        model = make(model_type, sizes)
        ids = torch.randint(1, 27, (2, 13), generator=torch.Generator().manual_seed(3))
        wanted = to_numpy(model(ids, position_ids=torch.arange(13)[None], use_cache=False).logits)
    model.save_pretrained(folder)
    ours = torch_attn.DecoderModel.from_pretrained(folder)
    assert ours.config == families.find_decoder({"model_type": model_type, **sizes})
    with torch.no_grad():
        found = to_numpy(ours(ids))
    assert np.abs(found - wanted).max() <= 1e-10 * np.abs(wanted).max()


def unchanged(model_type: str, cases: Iterable[dict[str, Any]]) -> set[str]:
    """Return the keys of a class of configs that no case changes."""
    inherited = {*transformers.PreTrainedConfig().to_dict(), "model_type", "bos_token_id", "eos_token_id"}
    return (
        {*transformers.AutoConfig.for_model(model_type).to_dict()} - inherited - {key for one in cases for key in one}
    )
