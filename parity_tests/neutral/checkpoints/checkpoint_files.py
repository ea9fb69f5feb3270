"""Checkpoints in files, for the tests of conversions: written, interrupted on their way, and compared."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.models import layouts

from .checkpoints import SIZES, attention, bert, gpt, llama, whole

WHOLE = {"hf-gpt2": gpt, "nanogpt": gpt, "hf-bert": bert, "flax-bert": bert, "hf-llama": llama}


def made(name, dtype="float32", seed=0):
    """Return tensors of that layout, what it drops among them."""
    if name in WHOLE:
        canonical = WHOLE[name](2, seed=seed)
    else:
        canonical = whole(name, 2, seed=seed) if layouts.find(name).whole else attention("net.att.", seed=seed)
    theirs = layouts.find(name).from_canonical(canonical, **SIZES)
    theirs = {key: array.astype(np.dtype(dtype)) for key, array in theirs.items()}
    extra = {
        "hf-gpt2": {"transformer.h.0.attn.bias": np.tri(7, dtype=np.uint8)[None, None]},
        "nanogpt": {"transformer.h.0.attn.bias": np.tri(7, dtype=np.float32)[None, None]},
        "hf-bert": {"embeddings.position_ids": np.arange(9)[None], "pooler.dense.bias": np.float32([1, 2])},
        "hf-llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": np.float32([0.5, 0.25])},
        "hf-qwen3-next": {"mtp.fc.weight": np.float32([[1, 2], [3, 4]])},
        "meta-llama": {"rope.freqs": np.float32([0.5, 0.25])},
        "book": {"net.att.mask": np.triu(np.ones((5, 5), np.float32), 1)},
        "fused-qkv": {"net.att.mask": np.triu(np.ones((5, 5), bool), 1)},
    }
    return theirs | extra.get(name, {})


def write(path, arrays, metadata=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(arrays, path, metadata)
    return path


def folder(path, name="hf-gpt2", dtype="float32", seed=0):
    write(path / "model.safetensors", made(name, dtype, seed), {"format": "pt"})
    (path / "config.json").write_text('{"n_head": 3, "num_attention_heads": 2}')
    return path


def sharded(path, count=4, seed=0, layers=4, width=6):
    """Write a GPT-2 in several files with an index, as the hub has it."""
    arrays = layouts.find("hf-gpt2").from_canonical(gpt(layers, seed=seed, width=width))
    weights = {
        name: f"model-{i * count // len(arrays) + 1:05d}-of-{count:05d}.safetensors" for i, name in enumerate(arrays)
    }
    for file in set(weights.values()):
        write(path / file, {name: arrays[name] for name in arrays if weights[name] == file}, {"format": "pt"})
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return path


def bits(arrays):
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


def tree(path):
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def interrupted(source, target, is_killed=False, **options):
    """Convert more than half of it; a run that is killed can't clean up behind it."""
    staging = target.parent / f".{target.name}.partial"
    aside = target.parent / "aside"

    def stop(done, total, name):
        if done > total * 0.6:
            shutil.copytree(staging, aside)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        checkpoints.convert(source, target, progress=stop, **options)
    if is_killed:
        shutil.rmtree(staging, ignore_errors=True)
        aside.rename(staging)
    else:
        shutil.rmtree(aside)


NEWER = '{"attn-bridge": 9, "layout": "flax", "dtype": "", "source": {}, "tensors": {}, "restore": {}}'
"""A manifest of a later version."""

MEMORY = """
import sys
import numpy as np
from attn_bridge import checkpoints
import attn_bridge.checkpoints.accompanying, attn_bridge.models.layouts

def peak():  # exec does not reset what getrusage says
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

idle = peak()
checkpoints.convert(sys.argv[1], sys.argv[2], max_memory=int(sys.argv[3]) or None)
print(peak() - idle)
"""
