"""``python -m benchmarks.judged_models``: blocks of the width of a 70B Llama judged, their memory and their seconds.

A folder with few blocks of the true width and random weights in bfloat16 is written; the memory of the judge is that of
one block, whatever their number. With ``--fault`` the other side has a fault in the last block.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

SIZES: dict[str, dict[str, int]] = {
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Name -> sizes of a Llama's blocks."""

VOCABULARY = 1024
FAULTS = ("key", "rotary")


def write(folder: Path, size: str, blocks: int) -> None:
    """Write a Llama of random weights, one file per block."""
    folder.mkdir(parents=True)
    sizes = SIZES[size]
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY,
        "num_hidden_layers": blocks, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, **sizes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    ends = {"model.embed_tokens": (VOCABULARY, width), "model.norm": (width,), "lm_head": (VOCABULARY, width)}
    files = {"ends.safetensors": ends}
    for number in range(blocks):
        named = {f"model.layers.{number}.{name}": shape for name, shape in shapes.items()}
        files[f"block-{number}.safetensors"] = named
    index: dict[str, str] = {}
    for number, (file, named) in enumerate(files.items()):
        arrays = {f"{name}.weight": _drawn(shape, (number, place)) for place, (name, shape) in enumerate(named.items())}
        index |= dict.fromkeys(arrays, file)
        save_file(arrays, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _drawn(shape: tuple[int, ...], seed: tuple[int, int]) -> np.ndarray:
    random = np.random.default_rng(seed)
    if len(shape) == 1:
        return random.uniform(0.5, 1.5, shape).astype(ml_dtypes.bfloat16)
    drawn = random.standard_normal(shape, dtype=np.float32)
    drawn *= np.float32(shape[-1] ** -0.5)
    return drawn.astype(ml_dtypes.bfloat16)


def plant(folder: Path, target: Path, size: str, block: int, fault: str) -> None:
    """Make a folder that shares all files but that of one block, in which something is wrong."""
    from safetensors.numpy import load_file

    target.mkdir()
    for path in folder.iterdir():
        if path.name != f"block-{block}.safetensors":
            os.link(path, target / path.name)
    arrays = load_file(folder / f"block-{block}.safetensors")
    name = f"model.layers.{block}.self_attn.{'k' if fault == 'key' else 'q'}_proj.weight"
    if fault == "key":
        arrays[name] = (arrays[name].astype(np.float32) * np.float32(1.01)).astype(ml_dtypes.bfloat16)
    else:
        heads, width = SIZES[size]["num_attention_heads"], arrays[name].shape[-1]
        apart = arrays[name].reshape(heads, 2, -1, width)
        arrays[name] = np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(-1, width)
    save_file(arrays, target / f"block-{block}.safetensors")


def main() -> None:
    """Write the folder, judge it, and print time and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="70b")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--folder", type=Path, help="where the model is, or is written to; a temporary one by default")
    options = parser.parse_args()
    from attn_bridge.parity import check_model

    made = options.folder is None
    home = Path(tempfile.mkdtemp(prefix="whole-model-")) if made else options.folder
    folder, wrong = home / "model", home / "wrong"
    try:
        if not folder.exists():
            write(folder, options.size, options.blocks)
        if options.fault is not None:
            shutil.rmtree(wrong, ignore_errors=True)
            plant(folder, wrong, options.size, options.blocks - 1, options.fault)
        start, before = time.perf_counter(), _peak()

        def progress(name: str, done: int, total: int) -> None:
            at = time.perf_counter() - start
            print(f"{at:7.1f} s  {_peak():5.1f} GiB  {name} ({done} of {total})", file=sys.stderr, flush=True)

        report = check_model(folder, None if options.fault is None else wrong, progress=progress)
        print("\n".join(report.lines()))
        seconds = max(part.seconds for part in report.parts)
        print(f"{options.size}: {seconds:.0f} s for the slowest part, peak {_peak():.1f} GiB (before: {before:.1f})")
    finally:
        if made:
            shutil.rmtree(home)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
