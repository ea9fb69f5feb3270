"""Take a GPT-2 of transformers to Flax and back, and prove on the way that nothing is lost.

python examples/gpt2.py [FOLDER]    FOLDER holds a GPT-2; where there is none, a tiny random one is written there

Needs both frameworks, and: pip install transformers
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import checkpoints

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])
NEW_TOKENS = 8


def main(folder: str | None = None) -> None:
    """Print a line for each proof; exit with status 1 if one fails."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as work:
        source, flax, back = Path(folder or f"{work}/gpt2"), Path(work, "flax"), Path(work, "back")
        if not source.exists():
            write_random(source)
        checkpoints.convert(source, flax)
        checkpoints.convert(flax, back, to_layout="hf-gpt2")
        there, again = checkpoints.verify(source, flax), checkpoints.verify(flax, back)
        proofs = [there.passed and again.passed]
        print(f"{there.tensors} tensors in Flax, {again.tensors} back in GPT-2: every bit is {said(proofs[-1])}")

        model = torch_attn.GPTModel.from_pretrained(source)
        twin = jax_attn.GPTModel.from_pretrained(flax, rngs=nnx.Rngs(0))
        wanted = model.generate_greedy(PROMPT, NEW_TOKENS)
        with jax.default_matmul_precision("highest"):
            tokens = twin.generate_greedy(PROMPT.numpy(), NEW_TOKENS)
        proofs.append(np.array_equal(wanted.numpy(), tokens))
        print(f"{PROMPT[0].tolist()} goes on, in torch, {wanted[0, PROMPT.shape[1] :].tolist()}")
        print(f"{PROMPT[0].tolist()} goes on, in Flax,  {tokens[0, PROMPT.shape[1] :].tolist()}: {said(proofs[-1])}")

        loaded = [transformers.GPT2LMHeadModel.from_pretrained(path).eval() for path in (source, back)]
        with torch.no_grad():
            before, after = (one(wanted).logits for one in loaded)
        proofs.append(torch.equal(before, after))
        print(f"{before.numel()} logits of transformers before and after: {said(proofs[-1])}")
    raise SystemExit(not all(proofs))


def write_random(folder: Path) -> None:
    """Write a tiny GPT-2 in which no bias is 0 and no scale 1."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_head": 2, "n_layer": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("ln_" in name), std=0.5)
    model.save_pretrained(folder)


def said(holds: bool) -> str:
    """Say whether a proof holds."""
    return "the same" if holds else "NOT the same"


if __name__ == "__main__":
    main(*sys.argv[1:])
