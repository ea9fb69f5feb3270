"""Attention of Hugging Face models in Flax, held against `transformers`.

python examples/hugging_face.py [FAMILY ...]

A tiny random model of the family is made with `transformers` and run in float64, on a batch padded on the left. The
arrays of a layer's attention go into the Flax module, which gets what went into the layer, and has to give what came
out of it, at once and token by token with a cache; then they go back to their names, bit for bit.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import jax_attn
from attn_parity.frameworks.torch.running.promotion import promoted

SIZES = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS = {"num_experts_per_tok": 1, "experts_implementation": "eager"}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}},
    "mistral": {"sliding_window": 4},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 4},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4, "sliding_window_pattern": 2},
    "gpt_oss": {"head_dim": 16, "sliding_window": 4, "num_local_experts": 2, **EXPERTS},
    "olmo3": {"sliding_window": 4},
    "diffllama": {},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 4},
}
"""Family -> what its config says beyond `SIZES`."""

LAYER, TOKENS = 2, 9
LIMIT = 1e-12


def run_transformers(family: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the config, the attention's arrays, and what goes in and comes out, in float64."""
    seen: dict[str, np.ndarray] = {}

    def look(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.update(x=(args[0] if args else kwargs["hidden_states"]).numpy(), output=output[0].numpy())

    with promoted(), torch.no_grad():  # transformers computes positions, norms and softmax in float32 otherwise
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]}, attn_implementation="eager")
        model = transformers.AutoModel.from_config(config).eval()
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape) + 0.1)
        attention = model.layers[LAYER].self_attn
        attention.register_forward_hook(look, with_kwargs=True)
        mask = torch.arange(TOKENS) >= torch.tensor([0, 3])[:, None]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(inputs_embeds=torch.randn(2, TOKENS, 32), attention_mask=mask.long(), position_ids=positions)
    state = {
        f"model.layers.{LAYER}.self_attn.{name}": tensor.numpy() for name, tensor in attention.state_dict().items()
    }
    return config.to_dict(), state, {**seen, "mask": mask.numpy(), "positions": positions.numpy()}


def run_flax(module: Any, seen: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return what the module gives for all tokens at once, and one by one with a cache."""
    x, mask, positions = (jnp.asarray(seen[name]) for name in ("x", "mask", "positions"))

    @jax.jit  # compiled once for all tokens: a mask may cover the slots that are not filled yet
    def step(x: Any, positions: Any, cache: Any = None) -> Any:
        return module(x, attention_mask=mask, positions=positions, cache=cache)

    cache, pieces = module.init_cache(len(x), TOKENS), []
    for i in range(TOKENS):
        piece, cache = step(x[:, i : i + 1], positions[:, i : i + 1], cache)
        pieces.append(piece)
    return [np.asarray(step(x, positions)), np.concatenate(pieces, axis=1)]


def prove(family: str) -> bool:
    """Print what holds for a family; return whether all does."""
    config, state, seen = run_transformers(family)
    with jax.enable_x64(True):
        module = jax_attn.from_hf(config, LAYER, state)
        whole, pieces = (one[seen["mask"]] for one in run_flax(module, seen))
        back = jax_attn.to_hf(config, LAYER, module)
    wanted = seen["output"][seen["mask"]]
    apart = [np.abs(one - wanted).max() / np.abs(wanted).max() for one in (whole, pieces)]
    same = back.keys() == state.keys() and all(back[name].tobytes() == state[name].tobytes() for name in state)
    holds = same and max(apart) <= LIMIT
    print(
        f"{family}: {type(module).__name__}, {apart[0]:.0e} from transformers, {apart[1]:.0e} with a cache, "
        f"{len(back)} tensors back {'bit for bit' if same else 'with OTHER bits'}: {'equal' if holds else 'NOT equal'}"
    )
    return holds


def main(*families: str) -> None:
    """Prove what holds for some families, by default all."""
    transformers.logging.set_verbosity_error()
    unknown = [family for family in families if family not in FAMILIES]
    if unknown:
        sys.exit(f"error: FAMILY ({unknown[0]}) must be one of {', '.join(FAMILIES)}")
    results = [prove(family) for family in families or FAMILIES]
    sys.exit(not all(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
