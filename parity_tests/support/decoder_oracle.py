"""The oracle of whole decoders: tiny random `transformers` models, what they give, and folders that hold them.

Models are built and run in `_parity.running.promotion.promoted`, in float64 throughout.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from torch_attn._parity.running.promotion import promoted
from torch_attn.backend import to_numpy

from .hf_oracle import LLAMA3, SIZES, padding

VOCABULARY, TOKENS = 31, 13
WHOLE = {**SIZES, "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**WHOLE, "mlp_bias": True, "attention_bias": True, "rope_theta": 500.0}),
    "llama-3.2": ("llama", {**WHOLE, "head_dim": 8, "rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**WHOLE, "sliding_window": 4, "hidden_act": "gelu"}),
    "qwen2": ("qwen2", {**WHOLE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**WHOLE, "head_dim": 6, "rms_norm_eps": 1e-3}),
}
"""Name -> ``model_type`` and keys of a config.json."""


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A model of `transformers` in float64, and what it gives.

    Attributes:
        model: the model.
        folder: what its `save_pretrained` wrote.
        ids: the tokens, ``(B, T)``.
        mask: which of them count, bool ``(B, T)``.
        positions: theirs, ``(B, T)``.
        hidden: what goes into each block, and what comes out of the norm behind the last, ``(B, T, D)`` each.
        logits: ``(B, T, V)``.
    """

    model: Any
    folder: Path
    ids: np.ndarray
    mask: np.ndarray
    positions: np.ndarray
    hidden: tuple[np.ndarray, ...]
    logits: np.ndarray


def build(name: str, seed: int = 0) -> Any:
    """Return a model with weights that hide nothing: no zeros, no ones."""
    model_type, sizes = DECODERS[name]
    config = transformers.AutoConfig.for_model(model_type, **sizes, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in [*model.parameters(), *_learned_buffers(model)]:
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + 0.1)
    return model


def _learned_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    return [one for name, one in model.named_buffers() if name.endswith("correction_bias")]


@functools.cache
def run(name: str, padded: str = "none", seed: int = 0) -> Oracle:
    """Return what a model gives for a batch without padding, or with padding on the ``left`` or ``right``."""
    with promoted(), torch.no_grad():
        model, generator = build(name, seed), torch.Generator().manual_seed(seed + 1)
        ids = torch.randint(1, VOCABULARY, (3, TOKENS), generator=generator)
        mask = torch.from_numpy(padding(padded, TOKENS).copy())
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        at = {} if DECODERS[name][0] == "bloom" else {"position_ids": positions}
        found = model(ids, attention_mask=mask.long(), **at, output_hidden_states=True, use_cache=False)
    folder = Path(tempfile.mkdtemp(prefix="decoder-")) / name
    model.save_pretrained(folder)
    hidden = tuple(map(to_numpy, found.hidden_states))
    return Oracle(model, folder, ids.numpy(), mask.numpy(), positions.numpy(), hidden, to_numpy(found.logits))
