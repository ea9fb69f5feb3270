"""``python -m benchmarks.laws``: the table of docs/laws.md, which laws our variants and modules of others obey."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np
import torch
import transformers
from flax import linen, nnx
from torch import nn

import torch_attn
from attn_bridge import parity, specs
from attn_parity.laws import LAWS

MARKS = {"holds": "+", "broken": "BROKEN", "not tried": ""}
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 6, 8)).astype(np.float32)
IDS = RANDOM.integers(3, 32, (2, 8))

SIZES = {"d_in": 4, "d_out": 6, "context_length": 8, "dropout": 0.1, "num_heads": 2, "emb_dim": 4}
"""Arguments of our variants that have no example with a config; each takes those that its constructor has."""

Case = tuple[object, object]
"""A side and its inputs."""


def variants() -> Iterator[tuple[str, Case]]:
    """Yield name, side and inputs of each variant in torch, with the config of its first example."""
    for variant in specs.VARIANTS:
        make = getattr(torch_attn, variant.name)
        if variant.is_function:
            yield variant.name, (parity.function(lambda _, x, f=make: f(x), {}, framework="torch"), {"x": X})
        elif variant.examples:
            example = variant.examples[0]
            inputs = {"x": RANDOM.normal(size=(2, 5, example.config.d_in)).astype(np.float32)}
            if example.context is not None:
                inputs["context"] = RANDOM.normal(size=(2, *example.context)).astype(np.float32)
            yield variant.name, (make(config=example.config), inputs)
        else:
            sizes = {name: SIZES[name] for name in make.__init__.__annotations__ if name in SIZES}
            yield variant.name, (make(**sizes), {"x": RANDOM.normal(size=(2, 5, 4)).astype(np.float32)})


def foreign() -> dict[str, Callable[[], Case]]:
    """Return name -> maker of a stock layer of torch or Flax, or of a tiny model of transformers, and inputs."""
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"vocab_size": 32, "max_position_embeddings": 16}
    llama = {**small, "num_key_value_heads": 1, "head_dim": 4}
    t5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    gpt2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    mamba = {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 4, "num_heads": 4, "head_dim": 4, "n_groups": 1}
    mamba |= {"vocab_size": 32, "chunk_size": 4}

    def model(name: str, **config: int) -> Callable[[], Case]:
        made = getattr(transformers, f"{name.removesuffix('Model').removesuffix('ForCausalLM')}Config")
        return lambda: (getattr(transformers, name)(made(**config)), {"input_ids": IDS})

    def linen_attention() -> Case:
        module = linen.MultiHeadDotProductAttention(2)
        return (module, module.init(jax.random.key(0), X)), X

    return {
        "nn.MultiheadAttention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), (X, X, X)),
        "nn.TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), X),
        "nn.LSTM": lambda: (nn.LSTM(8, 4, batch_first=True), X),
        "nnx.MultiHeadAttention": lambda: (nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)), X),
        "linen.MultiHeadDotProductAttention": linen_attention,
        "BertModel": model("BertModel", **small),
        "BloomForCausalLM": model("BloomForCausalLM", hidden_size=8, n_layer=1, n_head=2, vocab_size=32),
        "GPT2Model": model("GPT2Model", **gpt2),
        "LlamaForCausalLM": model("LlamaForCausalLM", **llama),
        "Mamba2Model": model("Mamba2Model", **mamba),
        "MistralForCausalLM": model("MistralForCausalLM", sliding_window=4, **llama),
        "T5EncoderModel": lambda: (transformers.T5EncoderModel(transformers.T5Config(**t5)), {"input_ids": IDS}),
    }


def main() -> None:
    """Print the table and the versions."""
    lines = ["| " + " | ".join(["", *LAWS]) + " |", "|---|" + "---|" * len(LAWS)]
    cases = [*variants(), *((f"{name} (foreign)", make()) for name, make in foreign().items())]
    counts = dict.fromkeys(MARKS, 0)
    environment: dict[str, str] = {}
    for name, (side, inputs) in cases:
        torch.manual_seed(0)
        report = parity.laws(side, inputs)
        environment |= report.environment
        statuses = {law.name: law.status for law in report.laws}
        for status in statuses.values():
            counts[status] += 1
        lines.append("| " + " | ".join([name, *(MARKS[statuses[law]] for law in LAWS)]) + " |")
    versions = {"torch", "jax", "flax"} & environment.keys()
    names = [f"{name} {environment[name]}" for name in sorted(versions)] + [f"transformers {transformers.__version__}"]
    total = ", ".join(f"{count} {status}" for status, count in counts.items())
    sys.stdout.write("\n".join(lines) + f"\n\n{len(cases)} modules: {total} ({', '.join(names)}).\n")


if __name__ == "__main__":
    main()
