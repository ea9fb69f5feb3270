"""The oracle of encoders and decoders: tiny random `transformers` models, what they give, and folders that hold them.

Models are built and run in `promoted` of the judge, in float64 throughout.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from attn_parity.frameworks.torch.running.promotion import promoted
from torch_attn.backend import to_numpy

from ..files.folders import new_folder
from .hf_oracle import padding

VOCABULARY, TOKENS, SOURCE = 31, 7, 11
POSITIONS = 288
"""Of the decoder: for the longest run of drawn tokens."""

_SIDES = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 14,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
_BART = {**_SIDES, "max_position_embeddings": POSITIONS, "scale_embedding": True}
_WHISPER = {**_SIDES, "num_mel_bins": 5, "max_source_positions": SOURCE, "max_target_positions": POSITIONS}

_T5 = {
    **{key: _SIDES[key] for key in ("vocab_size", "d_model", "pad_token_id", "decoder_start_token_id", "eos_token_id")},
    "d_kv": 5,
    "d_ff": 14,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "layer_norm_epsilon": 1e-3,
    "attn_implementation": "eager",
}

MODELS: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "bart-untied": {**_BART, "scale_embedding": False, "tie_word_embeddings": False, "activation_function": "relu"},
    "whisper": _WHISPER,
    "whisper-untied": {**_WHISPER, "tie_word_embeddings": False, "activation_function": "gelu_new"},
    "t5": _T5,
    "t5-untied": {**_T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
    "mt5": _T5,
    "umt5": _T5,
    "umt5-untied": {**_T5, "feed_forward_proj": "silu"},
}
"""Name, which begins with the ``model_type`` -> keys of a config.json."""


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A model of `transformers` in float64, and what it gives.

    Attributes:
        model: the model.
        folder: what its `save_pretrained` wrote.
        source: token ids ``(B, S)``, or features ``(B, mels, frames)``.
        source_mask: which of the source count, bool ``(B, S)``; None for features.
        ids: the decoder's tokens, ``(B, T)``.
        mask: which of them count, bool ``(B, T)``.
        encoder_hidden: what goes into each block of the encoder, and what comes out of it, ``(B, S, D)`` each.
        decoder_hidden: the same of the decoder, ``(B, T, D)`` each.
        logits: ``(B, T, V)``.
    """

    model: Any
    folder: Path
    source: np.ndarray
    source_mask: np.ndarray | None
    ids: np.ndarray
    mask: np.ndarray
    encoder_hidden: tuple[np.ndarray, ...]
    decoder_hidden: tuple[np.ndarray, ...]
    logits: np.ndarray

    def call(self, tokens: Any = None, **options: Any) -> dict[str, Any]:
        """Return the arguments of a call of the model; `options` are added."""
        name = "input_ids" if self.source_mask is not None else "input_features"
        masks = {} if self.source_mask is None else {"attention_mask": torch.tensor(self.source_mask).long()}
        given = torch.tensor(self.ids) if tokens is None else tokens
        return {name: torch.tensor(self.source), **masks, "decoder_input_ids": given, **options}


def build(name: str, seed: int = 0) -> Any:
    """Return a model with weights that hide nothing: no zeros, no ones, in what is added to the logits either."""
    kind = name.partition("-")[0]
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(MODELS[name]))
    auto = transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config).eval().double()
    if kind.endswith("t5") and name.endswith("untied"):  # whatever the config says, a head is tied unless it is loaded
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(model.shared.weight.shape, dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    buffers = [one for one_name, one in model.named_buffers() if one_name == "final_logits_bias"]
    with torch.no_grad():
        for tensor in [*model.parameters(), *buffers]:
            spread = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
            tensor.copy_(spread * torch.randn(tensor.shape, generator=generator, dtype=torch.float64) + 0.1)
    return model


@functools.cache
def run(name: str, padded: str = "none", seed: int = 0) -> Oracle:
    """Return what a model gives for a batch whose sources and tokens have padding on a side, or ``none``."""
    with promoted(), torch.no_grad():
        model, generator = build(name, seed), torch.Generator().manual_seed(seed + 1)
        ids = torch.randint(1, VOCABULARY, (3, TOKENS), generator=generator)
        mask = torch.from_numpy(padding(padded, TOKENS).copy())
        if name.startswith("whisper"):
            source = torch.randn(3, 5, 2 * SOURCE, generator=generator, dtype=torch.float64)
            given, source_mask = {"input_features": source}, None
        else:
            source = torch.randint(1, VOCABULARY, (3, SOURCE), generator=generator)
            source_mask = torch.from_numpy(padding(padded, SOURCE).copy())
            given = {"input_ids": source, "attention_mask": source_mask.long()}
        masks = {"decoder_attention_mask": mask.long(), "output_hidden_states": True, "use_cache": False}
        found = model(**given, decoder_input_ids=ids, **masks)
    folder = new_folder("encoder-decoder-") / name
    model.save_pretrained(folder)
    if name.endswith("t5-untied"):  # as in published files; transformers 5 saves true for every head
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**document, "tie_word_embeddings": False}))
    return Oracle(
        model,
        folder,
        source.numpy(),
        None if source_mask is None else source_mask.numpy(),
        ids.numpy(),
        mask.numpy(),
        tuple(map(to_numpy, found.encoder_hidden_states)),
        tuple(map(to_numpy, found.decoder_hidden_states)),
        to_numpy(found.logits),
    )
