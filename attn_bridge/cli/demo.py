"""``attn-bridge demo``: small files to try the other commands with."""

from __future__ import annotations

import json
import shlex
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray]

FILES = {
    "pairs.py": "layers of torch and ports of them to Flax, right and wrong",
    "inputs.npz": "an input for them",
    "gpt2/": "a tiny GPT-2, as transformers saves one",
    "bert/": "a tiny BERT",
    "llama/": "a tiny Llama",
    "own.safetensors": "a checkpoint with names of its own",
    "rules.toml": "the rules that convert it to Flax, with --set heads=4",
}
"""File -> its description."""

COMMANDS = (
    "attn-bridge compare {demo}/pairs.py:torch_norm {demo}/pairs.py:flax_norm --inputs {demo}/inputs.npz",
    "attn-bridge convert {demo}/gpt2 gpt2-flax",
    "attn-bridge check --weights {demo}/bert --layout hf-bert",
    "attn-bridge check --model {demo}/llama",
)
"""Commands to try next."""

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 50,
    "n_positions": 32,
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 2,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Folder to write; it must be empty or not there.")
    ] = Path("demo"),
) -> int:
    """Write small files to try the other commands with: a port with a fault, and checkpoints. No framework is needed.

    Example: attn-bridge demo

    Exit status: 0 = written, 2 = bad usage.
    """
    from ..whole_folders import check_new

    check_new(folder, "FOLDER")
    write(folder)
    typer.echo(f"wrote {folder}")
    width = max(map(len, FILES))
    for name, meaning in FILES.items():
        typer.echo(f"  {name:<{width}}  {meaning}")
    typer.echo("try next")
    for command in COMMANDS:
        typer.echo(f"  {command.format(demo=shlex.quote(str(folder)))}")
    return 0


def write(folder: Path) -> None:
    """Write the files into a folder, which is made if need be; the bytes are the same every time."""
    import numpy as np

    folder.mkdir(exist_ok=True)
    data = resources.files(__package__) / "demo_files"
    (folder / "pairs.py").write_bytes((data / "pairs.py.txt").read_bytes())
    (folder / "rules.toml").write_bytes((data / "rules.toml").read_bytes())
    random = np.random.default_rng(0)
    np.savez(folder / "inputs.npz", random.normal(size=(2, 7, 16)).astype(np.float32))
    for name, config, shapes in (("gpt2", GPT2, _gpt2_shapes()), ("bert", BERT, _bert_shapes())):
        _save_model(folder / name, config, _draw(random, shapes))
    own = _draw(random, _own_shapes())
    masks = {f"blocks.{i}.mask": np.tri(5, dtype=np.bool_) for i in range(3)}
    _save(own | masks, folder / "own.safetensors")
    _save_model(folder / "llama", LLAMA, _draw(random, _llama_shapes()))


def _draw(random: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Return arrays in which no bias is 0 and no scale of a norm is 1."""
    import numpy as np

    def mean(name: str) -> float:
        return float(len(shapes[name]) == 1 and name.endswith("weight"))

    return {name: random.normal(mean(name), 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def _save_model(folder: Path, config: dict[str, object], arrays: Arrays) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _save(arrays, folder / "model.safetensors")


def _save(arrays: Arrays, file: Path) -> None:
    from safetensors.numpy import save_file

    save_file(arrays, file, {"format": "pt"})  # transformers asks for this


def _with_bias(name: str, *shape: int, bias: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": (bias,)}


def _gpt2_shapes() -> dict[str, tuple[int, ...]]:
    d = 16
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (50, d), "transformer.wpe.weight": (32, d)}
    for i in range(2):
        block = f"transformer.h.{i}"
        shapes |= _with_bias(f"{block}.ln_1", d, bias=d)
        shapes |= _with_bias(f"{block}.attn.c_attn", d, 3 * d, bias=3 * d)  # matrices are [in, out]
        shapes |= _with_bias(f"{block}.attn.c_proj", d, d, bias=d)
        shapes |= _with_bias(f"{block}.ln_2", d, bias=d)
        shapes |= _with_bias(f"{block}.mlp.c_fc", d, 4 * d, bias=4 * d)
        shapes |= _with_bias(f"{block}.mlp.c_proj", 4 * d, d, bias=d)
    return shapes | _with_bias("transformer.ln_f", d, bias=d)


def _bert_shapes() -> dict[str, tuple[int, ...]]:
    d, hidden = 16, 32
    sizes = {"word": 50, "position": 32, "token_type": 2}
    shapes: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (size, d) for name, size in sizes.items()
    }
    shapes |= _with_bias("embeddings.LayerNorm", d, bias=d)
    for i in range(2):
        layer = f"encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _with_bias(f"{layer}.attention.{name}", d, d, bias=d)
        shapes |= _with_bias(f"{layer}.attention.output.LayerNorm", d, bias=d)
        shapes |= _with_bias(f"{layer}.intermediate.dense", hidden, d, bias=hidden)
        shapes |= _with_bias(f"{layer}.output.dense", d, hidden, bias=d)
        shapes |= _with_bias(f"{layer}.output.LayerNorm", d, bias=d)
    return shapes | _with_bias("pooler.dense", d, d, bias=d)


def _llama_shapes() -> dict[str, tuple[int, ...]]:
    d, hidden, keys = 16, 24, 8
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (50, d)}
    for i in range(2):
        layer = f"model.layers.{i}"
        sizes = {"q_proj": (d, d), "k_proj": (keys, d), "v_proj": (keys, d), "o_proj": (d, d)}
        shapes |= {f"{layer}.self_attn.{name}.weight": size for name, size in sizes.items()}
        sizes = {"gate_proj": (hidden, d), "up_proj": (hidden, d), "down_proj": (d, hidden)}
        shapes |= {f"{layer}.mlp.{name}.weight": size for name, size in sizes.items()}
        shapes |= {f"{layer}.{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (d,), "lm_head.weight": (50, d)}


def _own_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a small model that no layout knows: a checkpoint for a rules file."""
    shapes = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "out": (8, 8), "gate": (12, 8), "up": (20, 8), "norm": (8,)}
    return {"embed.weight": (11, 8)} | {
        f"blocks.{i}.{name}.weight": shape for i in range(3) for name, shape in shapes.items()
    }
