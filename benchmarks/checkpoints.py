"""How fast a checkpoint is converted, and with how much memory, next to copying it and to going through JAX and Orbax.

python -m benchmarks.checkpoints [--gib 1.2] [--rounds 5] [--json FILE]

Everything is measured alternately in one run, each in a process of its own, and the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SHARDS = 6
WIDTH, HIDDEN = 2048, 5632

COPY = """
import os, shutil, sys
os.mkdir(sys.argv[2])
for name in sorted(os.listdir(sys.argv[1])):
    target = os.path.join(sys.argv[2], name)
    shutil.copyfile(os.path.join(sys.argv[1], name), target)
    with open(target, "rb+") as handle:
        os.fsync(handle.fileno())
"""

CONVERT = """
import sys
from attn_bridge import checkpoints
checkpoints.convert(sys.argv[1], sys.argv[2])
"""

ORBAX = """
import os, sys
import jax, jax.numpy as jnp
import orbax.checkpoint as ocp
from safetensors import safe_open
arrays = {}
for name in sorted(os.listdir(sys.argv[1])):
    if name.endswith(".safetensors"):
        with safe_open(os.path.join(sys.argv[1], name), "flax") as file:
            for key in file.keys():
                array = file.get_tensor(key)
                arrays[key] = jnp.transpose(array) if array.ndim == 2 and "emb" not in key else array
jax.block_until_ready(arrays)
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(os.path.abspath(sys.argv[2]), arrays)
"""

IDLE = "import numpy, ml_dtypes, attn_bridge.checkpoints.execution, attn_bridge.models.layouts"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        # Ours is compiled once, as pip does it for what it installs; a working tree need not be.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(root / "compiled")
        source = root / "source"
        size, largest = make(source, options.gib)
        idle = memory(IDLE)
        ways = {"copy and fsync": COPY, "attn-bridge convert": CONVERT, "through JAX and Orbax": ORBAX}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        peaks: dict[str, int] = {}
        for _ in range(options.rounds):
            for name, code in ways.items():
                os.sync()  # what others wrote is not waited for
                target = root / "target"
                start = time.perf_counter()
                peaks[name] = max(peaks.get(name, 0), memory(code, str(source), str(target)))
                seconds[name].append(time.perf_counter() - start)
                shutil.rmtree(target)
    base = statistics.median(seconds["copy and fsync"])
    print(f"{size / 2**30:.2f} GiB of bfloat16 in {SHARDS} shards, largest tensor {largest / 2**20:.0f} MiB")
    print(f"{'':24}{'seconds':>9}{'spread':>14}{'x copy':>9}{'GiB/s':>8}{'peak MiB over idle':>21}")
    for name, found in seconds.items():
        middle = statistics.median(found)
        spread = f"{min(found):.2f} - {max(found):.2f}"
        over = (peaks[name] - idle) / 2**20
        print(f"{name:24}{middle:9.2f}{spread:>14}{middle / base:9.2f}{size / 2**30 / middle:8.2f}{over:21.0f}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "peaks": peaks, "idle": idle, "bytes": size}, indent=1))


def make(folder: Path, gib: float) -> tuple[int, int]:
    """Write a llama-like checkpoint under our torch names; return its bytes and those of its largest tensor."""
    import ml_dtypes
    from safetensors.numpy import save_file

    folder.mkdir()
    random = np.random.default_rng(0)
    shapes = {
        **{f"att.{name}.weight": (WIDTH, WIDTH) for name in ("W_query", "W_key", "W_value", "out_proj")},
        "ff.fc1.weight": (HIDDEN, WIDTH),
        "ff.fc2.weight": (HIDDEN, WIDTH),
        "ff.fc3.weight": (WIDTH, HIDDEN),
        "norm1.scale": (WIDTH,),
        "norm2.scale": (WIDTH,),
    }
    block = 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    blocks = max(SHARDS, round(gib * 2**30 / block))
    weights, total, largest = {}, 0, 0
    for shard in range(SHARDS):
        arrays = {}
        for i in range(shard * blocks // SHARDS, (shard + 1) * blocks // SHARDS):
            for name, shape in shapes.items():
                bits = random.integers(0, 1 << 16, size=shape, dtype=np.uint16)
                arrays[f"trf_blocks.{i}.{name}"] = bits.view(ml_dtypes.bfloat16)
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file(arrays, folder / file)
        weights |= dict.fromkeys(arrays, file)
        total += sum(array.nbytes for array in arrays.values())
        largest = max(largest, *(array.nbytes for array in arrays.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total, largest


def memory(code: str, *arguments: str) -> int:
    """Run Python code in a process of its own; return the most memory that it had resident, in bytes."""
    # What getrusage says is not reset by exec, so a child would have its parent's peak.
    after = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    done = subprocess.run([sys.executable, "-c", code + after, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(done.stdout.split()[-1]) * 1024


if __name__ == "__main__":
    main()
