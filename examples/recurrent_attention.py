"""Attention that keeps a state of one size, in Flax: Qwen3-Next's gated delta net, and linear attention.

The arrays of a tiny random Qwen3-Next layer of `transformers` go into the Flax module, which gets what went into the
layer, and has to give what came out: at once, and token by token with a cache; then they go back to their names, bit
for bit. No model of `transformers` has linear attention; its weights come from the torch twin.

python examples/recurrent_attention.py    needs both frameworks, and: pip install transformers
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
import transformers
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import transfer
from attn_bridge.specs import LinearAttentionConfig
from attn_parity.frameworks.torch.running.promotion import promoted

TOKENS, WIDTH, LIMIT = 9, 12, 1e-12
SIZES = {
    "vocab_size": 11,
    "hidden_size": WIDTH,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "experts_implementation": "eager",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
}


def main() -> None:
    """Print a line for each proof; exit with status 1 if one fails."""
    transformers.utils.logging.set_verbosity_error()
    with jax.enable_x64(True):
        proofs = [prove_qwen3_next(), prove_linear_attention()]
    raise SystemExit(not all(proofs))


def prove_qwen3_next() -> bool:
    """Compare a layer of Qwen3-Next with ours, on a batch padded on the left."""
    seen: list[np.ndarray] = []
    mask = np.arange(TOKENS) >= np.array([0, 3])[:, None]
    with promoted(), torch.no_grad():  # transformers computes decays, norms and the state in float32 otherwise
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model("qwen3_next", **SIZES)
        model = transformers.AutoModel.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        layer = model.layers[0].linear_attn
        layer.register_forward_hook(
            lambda _, args, kwargs, output: seen.extend((kwargs["hidden_states"].numpy(), output.numpy())),
            with_kwargs=True,
        )
        model(inputs_embeds=torch.randn(2, TOKENS, WIDTH), attention_mask=torch.from_numpy(mask).long())
    state = {f"model.layers.0.linear_attn.{name}": tensor.numpy() for name, tensor in layer.state_dict().items()}

    ours = jax_attn.from_hf(config.to_dict(), 0, state)
    back = jax_attn.to_hf(config.to_dict(), 0, ours)
    same = back.keys() == state.keys() and all(np.array_equal(back[name], state[name]) for name in state)
    return report("transformers", ours, *seen, mask, same)


def prove_linear_attention() -> bool:
    """Compare linear attention with its twin in torch."""
    torch.manual_seed(0)
    config = LinearAttentionConfig(WIDTH, 3, qkv_bias=True)
    theirs, back = (torch_attn.LinearAttention(config, dtype=torch.float64) for _ in range(2))
    ours = jax_attn.LinearAttention(config, rngs=nnx.Rngs(0), param_dtype=np.float64)
    transfer(theirs, ours)
    transfer(ours, back)
    same = all(torch.equal(array, theirs.state_dict()[name]) for name, array in back.state_dict().items())
    hidden, mask = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64), np.ones((2, TOKENS), np.bool_)
    with torch.no_grad():
        return report("torch", ours, hidden.numpy(), theirs(hidden).numpy(), mask, same)


def report(whose: str, ours: Any, hidden: np.ndarray, expected: np.ndarray, mask: np.ndarray, same: bool) -> bool:
    """Run ours at once and token by token, print how far it is from what is expected, and say whether that holds."""
    step = nnx.jit(lambda module, x, cache: module(x, attention_mask=mask, cache=cache))
    cache, pieces = ours.init_cache(2, TOKENS), []
    for at in range(TOKENS):
        piece, cache = step(ours, hidden[:, at : at + 1], cache)
        pieces.append(piece)
    whole = step(ours, hidden, None)
    scale = np.abs(expected).max()
    apart = [np.abs(one - expected).max() / scale for one in (np.asarray(whole), np.concatenate(pieces, 1))]
    holds = same and max(apart) <= LIMIT
    print(
        f"{type(ours).__name__}: {apart[0]:.0e} from {whose}, {apart[1]:.0e} with a cache of {cache.state[0].size} "
        f"numbers, {'every bit' if same else 'NOT every bit'} back: {'equal' if holds else 'NOT equal'}"
    )
    return bool(holds)


if __name__ == "__main__":
    main()
