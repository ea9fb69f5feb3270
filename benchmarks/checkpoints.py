"""The speed of checkpoint conversion, and the gain of its hand-written parts over a library.

python -m benchmarks.checkpoints [--gib 1.2] [--rounds 5] [--json FILE]            next to copying, and JAX and Orbax
python -m benchmarks.checkpoints by-hand [--gib 0.5] [--rounds 5] [--json FILE]    each part next to the library's

Everything is measured alternately in one run, each in a separate process, and the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
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
TENSOR = 1 << 26
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
checkpoints.convert(sys.argv[1], sys.argv[2], workers={})
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

IDLE = "import numpy, ml_dtypes, attn_bridge.checkpoints.accompanying, attn_bridge.models.layouts"


@dataclasses.dataclass(frozen=True)
class Part:
    """A hand-written part, and its counterpart from a library.

    Attributes:
        name: the job.
        ours: Python code of it; ``timed()`` begins the measurement, `path` is its file and `size` its bytes.
        library: the same with the library.
        by: the library's name.
        format: kind of `path`: a checkpoint in this container, or "" for a file to be created.
    """

    name: str
    ours: str
    by: str
    library: str
    format: str = ""


OPEN = """
from pathlib import Path
from attn_bridge.checkpoints.containers import open_reader
"""

READ_ALL = """
timed()
with open_reader(Path(path)) as reader:
    room = memoryview(bytearray(max(one.nbytes for one in reader.tensors.values())))
    for name, one in reader.tensors.items():
        reader.read_into(name, 0, room[: one.nbytes])
"""

READ_ALL_OFFICIALLY = """
import ml_dtypes
from safetensors import safe_open
timed()
with safe_open(path, "numpy") as file:
    for name in file.keys():
        file.get_tensor(name)
"""

HEADERS = """
timed()
with open_reader(Path(path)) as reader:
    assert len(reader.tensors)
"""

UNPACK = """
import msgpack
timed()
with open(path, "rb") as file:
    unpacker = msgpack.Unpacker(file, ext_hook=lambda kind, data: len(data), max_buffer_size=1 << 31, read_size=1 << 20)
    assert unpacker.unpack()
"""

PARTS_BACKWARDS = """
timed()
with open_reader(Path(path)) as reader:
    for name, one in reader.tensors.items():
        for start in reversed(range(0, one.nbytes, one.nbytes // 8)):
            assert len(reader.read_range(name, start, start + one.nbytes // 8))
"""

PARTS_BACKWARDS_OF_ZIP = """
import zipfile
timed()
with zipfile.ZipFile(path) as archive:
    for one in archive.infolist():
        with archive.open(one) as member:
            for start in reversed(range(0, one.file_size, one.file_size // 8)):
                member.seek(start)
                assert len(member.read(one.file_size // 8))
"""

WRITE = """
import mmap
import numpy as np
from pathlib import Path
from attn_bridge.checkpoints.containers.writing import TargetFile
data = mmap.mmap(-1, 1 << 26)  # whole pages, as a conversion has them
data[:] = np.random.default_rng(0).bytes(1 << 26)
timed()
target = TargetFile(Path(path), size)
for start in range(0, size, len(data)):
    target.write(start, data)
target.sync()
target.close()
"""

WRITE_THROUGH_CACHE = """
import mmap
import os
import numpy as np
data = mmap.mmap(-1, 1 << 26)
data[:] = np.random.default_rng(0).bytes(1 << 26)
timed()
with open(path, "wb") as file:
    for start in range(0, size, len(data)):
        file.write(data)
    file.flush()
    os.fsync(file.fileno())
"""

TRANSPOSE = """
import numpy as np
from attn_bridge.checkpoints.copying import copy
source = np.random.default_rng(0).integers(0, 1 << 16, (size >> 14, 1 << 13), np.uint16)
target = np.ones((1 << 13, size >> 14), np.uint16)
timed()
copy(source.T, target)
"""

TRANSPOSE_BY_NUMPY = """
import numpy as np
source = np.random.default_rng(0).integers(0, 1 << 16, (size >> 14, 1 << 13), np.uint16)
target = np.ones((1 << 13, size >> 14), np.uint16)
timed()
np.copyto(target, source.T)
"""

BY_HAND = (
    Part("safetensors: read every tensor", OPEN + READ_ALL, "safetensors", READ_ALL_OFFICIALLY, "safetensors"),
    Part("msgpack: names, dtypes, shapes", OPEN + HEADERS, "msgpack.Unpacker", UNPACK, "msgpack"),
    Part("npz: read in parts, last part first", OPEN + PARTS_BACKWARDS, "zipfile", PARTS_BACKWARDS_OF_ZIP, "npz"),
    Part("write and flush to disk", WRITE, "file.write", WRITE_THROUGH_CACHE),
    Part("transpose, 2 bytes per element", TRANSPOSE, "NumPy", TRANSPOSE_BY_NUMPY),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("convert", "by-hand"), default="convert")
    parser.add_argument("--gib", type=float, help="bytes of a checkpoint; default: 1.2, or 0.5 for the parts by hand")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        # Ours is compiled once, as pip does it for what it installs; a working tree need not be.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(root / "compiled")
        if options.what == "convert":
            measurements = convert(root, 1.2 if options.gib is None else options.gib, options.rounds)
        else:
            measurements = by_hand(root, 0.5 if options.gib is None else options.gib, options.rounds)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    if options.json:
        options.json.write_text(json.dumps(measurements, indent=1))


def convert(root: Path, gib: float, rounds: int) -> dict[str, object]:
    """Measure whole conversions, print a table, and return the measurements."""
    source = root / "source"
    size, largest = make(source, gib)
    idle = memory(IDLE)
    ways = {"copy and fsync": COPY, "attn-bridge convert": CONVERT.format(None)}
    ways |= {"  --workers 2": CONVERT.format(2), "through JAX and Orbax": ORBAX}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, int] = {}
    for _ in range(rounds):
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
    for name, times in seconds.items():
        middle = statistics.median(times)
        spread = f"{min(times):.2f} - {max(times):.2f}"
        over = (peaks[name] - idle) / 2**20
        print(f"{name:24}{middle:9.2f}{spread:>14}{middle / base:9.2f}{size / 2**30 / middle:8.2f}{over:21.0f}")
    return {"seconds": seconds, "peaks": peaks, "idle": idle, "bytes": size}


def by_hand(root: Path, gib: float, rounds: int) -> dict[str, object]:
    """Measure hand-written parts next to a library, print a table, and return the measurements."""
    size = max(1, round(gib * 2**30 / TENSOR)) * TENSOR
    print(f"{size / 2**30:.2f} GiB, in tensors of {TENSOR / 2**20:.0f} MiB")
    print(f"{'':36}{'by':18}{'seconds':>9}{'spread':>16}{'processor s':>13}{'MiB over idle':>15}")
    results: dict[str, object] = {}
    for part in BY_HAND:
        path = root / f"x.{part.format or 'bin'}"
        if part.format:
            make_one(part.format, path, size)
        runs_by_code: dict[str, list[dict[str, float]]] = {"here": [], part.by: []}
        for _ in range(rounds):
            for by, code in (("here", part.ours), (part.by, part.library)):
                os.sync()
                runs_by_code[by].append(measured(code, path, size))
        path.unlink(missing_ok=True)
        for by, runs in runs_by_code.items():
            seconds = [run["seconds"] for run in runs]
            spread = f"{min(seconds):.3f} - {max(seconds):.3f}"
            processor, over = (statistics.median(run[key] for run in runs) for key in ("processor", "memory"))
            label = part.name if by == "here" else ""
            print(
                f"{label:36}{by:18}{statistics.median(seconds):9.3f}{spread:>16}{processor:13.3f}{over / 2**20:15.0f}"
            )
        results[part.name] = runs_by_code
    return results


def make_one(format: str, path: Path, size: int) -> None:
    """Write a checkpoint of bfloat16 tensors (of float16 where NumPy knows no other) of `TENSOR` bytes each."""
    from attn_bridge.checkpoints.containers import TensorInfo, make_writer

    dtype = "float16" if format == "npz" else "bfloat16"
    infos = [TensorInfo(f"h.{index}", dtype, (TENSOR >> 11, 1 << 10)) for index in range(size // TENSOR)]
    writer = make_writer(format, path, infos, {})
    random = np.random.default_rng(0)
    for info in infos:
        writer.write_range(info.name, 0, random.bytes(TENSOR))
    writer.finish()


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


MEASURED = """
import json, sys, time
path, size = sys.argv[1], int(sys.argv[2])
def resident():
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
def timed():
    global began
    began = resident(), time.process_time(), time.perf_counter()
"""

MEASURED_END = """
seconds, processor = time.perf_counter() - began[2], time.process_time() - began[1]
print(json.dumps({"seconds": seconds, "processor": processor, "memory": resident() - began[0]}))
"""


def measured(code: str, path: Path, size: int) -> dict[str, float]:
    """Run Python code in a separate process; return its costs after its call of ``timed()``."""
    command = [sys.executable, "-c", MEASURED + code + MEASURED_END, str(path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    costs: dict[str, float] = json.loads(done.stdout)
    return costs


def memory(code: str, *arguments: str) -> int:
    """Run Python code in a separate process; return its peak resident memory, in bytes."""
    # What getrusage says is not reset by exec, so a child would have its parent's peak.
    after = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    done = subprocess.run([sys.executable, "-c", code + after, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(done.stdout.split()[-1]) * 1024


if __name__ == "__main__":
    main()
