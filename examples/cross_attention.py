"""What a decoder asks of an encoder: the cross attention of BART or Whisper in Flax, held against `transformers`.

python examples/cross_attention.py [bart|whisper]

A tiny random model is made with `transformers`. The arrays of the attention of one layer go into the Flax module, which
projects the context once, keeps it in a cache, and answers token by token what `transformers` answers at once.
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

SIZES = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 11,
    "pad_token_id": 0,
}
LAYER, LIMIT = 1, 1e-12


def run_transformers(family: str, x: Any, context: Any, mask: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return the config, the arrays of the attention, and what it gives, in float64."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(family, **SIZES, attn_implementation="eager")
    model = transformers.AutoModel.from_config(config).eval().double()
    attention = model.get_submodule(f"decoder.layers.{LAYER}.encoder_attn")
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape) + 0.1)
        hidden = torch.where(torch.from_numpy(mask), 0.0, -torch.inf)[:, None, None]
        output = attention(torch.from_numpy(x), key_value_states=torch.from_numpy(context), attention_mask=hidden)[0]
    prefix = f"model.decoder.layers.{LAYER}.encoder_attn."
    state = {prefix + name: tensor.numpy() for name, tensor in attention.state_dict().items()}
    return config.to_dict(), state, output.numpy()


def main(family: str = "whisper") -> None:
    """Print whether Flax gives what `transformers` gives."""
    if family not in ("bart", "whisper"):
        sys.exit(f"error: family ({family}) must be bart or whisper")
    random = np.random.default_rng(0)
    x, context = random.normal(size=(2, 5, 32)), random.normal(size=(2, 9, 32))
    mask = np.arange(9) < np.array([9, 6])[:, None]
    config, state, wanted = run_transformers(family, x, context, mask)
    with jax.enable_x64(True):
        module = jax_attn.from_hf(config, LAYER, state)
        step = jax.jit(lambda x, cache: module(x, cache=cache))  # compiled once for all tokens
        cache = module.init_cache(2, capacity=9)
        first, cache = module(jnp.asarray(x[:, :1]), context=jnp.asarray(context), attention_mask=mask, cache=cache)
        pieces = [first]
        for i in range(1, x.shape[1]):
            piece, cache = step(jnp.asarray(x[:, i : i + 1]), cache)
            pieces.append(piece)
        found = np.concatenate(pieces, axis=1)
        back = jax_attn.to_hf(config, LAYER, module)
    apart = np.abs(found - wanted).max() / np.abs(wanted).max()
    same = back.keys() == state.keys() and all(back[name].tobytes() == state[name].tobytes() for name in state)
    holds = same and apart <= LIMIT
    print(
        f"{family}: {len(state)} tensors in Flax and back {'bit for bit' if same else 'with OTHER bits'}, "
        f"5 tokens one by one from a cached context {apart:.0e} from transformers: {'equal' if holds else 'NOT equal'}"
    )
    sys.exit(not holds)


if __name__ == "__main__":
    main(*sys.argv[1:])
