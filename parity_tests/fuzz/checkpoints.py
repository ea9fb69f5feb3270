"""Damages valid checkpoints: each is either read or refused in one line, within bounded memory.

    python -m parity_tests.fuzz.checkpoints --minutes 10 --formats npz

prints the seed of what fails, and keeps its file. A file that hangs ends the run with a traceback, MAX_SECONDS
after its time, and a process that keeps growing fails it at the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from attn_parity.compare.driver import peak_memory
from parity_tests.support.processes.memory import resident_memory, traced_memory

from . import samples

MAX_MEMORY = 1 << 26
"""Bytes that a damaged file of some thousand bytes may cost."""

MAX_SECONDS = 60
"""Longer is a hang; a damaged file is read or refused within milliseconds."""

WARM_UP = 500
"""Files after which the process has imported and cached what it will."""

MAX_GROWTH = 2 * MAX_MEMORY
"""Bytes that the peak of the process may grow by after that; a leak of 1 KiB per file is beyond it after 131,072."""

FORMATS = ("safetensors", "sharded", "torch", "npz", "msgpack", "orbax", "ocdbt", "dcp")

CONTAINERS = {"sharded": ("safetensors",), "ocdbt": ("orbax", "orbax+ocdbt")}
"""What is damaged -> its format, and that by which it is written."""

NUMBERS = (0, 1, 7, 127, 128, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 36, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)

WORDS = (b"-1", b"1e999", b"NaN", b"{", b"}", b"[[[[", b'"', b"\\u0000", b"\x00", b"..", b"/", b"\xff", b"9" * 40)


def build(format: str, folder: Path) -> Path:
    """Write a small valid checkpoint."""
    held = {"float32", "bfloat16", "bool", "int64"}
    arrays = samples.random_arrays(held, shapes=((2, 3), (), (0,)), format=CONTAINERS.get(format, (format,))[0])
    path = folder / f"valid{samples.ENDINGS.get(format, '')}"
    if format == "sharded":
        files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(arrays)}
        return samples.write("safetensors", path, arrays, files=files)
    return samples.write(CONTAINERS.get(format, (format,))[-1], path, arrays, {"kind": "test"})


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few changes: bits, numbers, words, cuts, and parts twice or moved."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        how = rng.randrange(8)
        if how == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif how == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif how == 2:
            del out[at:]
        elif how == 3:
            del out[at : at + rng.randrange(1, 16)]
        elif how == 4:
            out[at:at] = out[at : at + rng.randrange(1, 64)]
        elif how == 5:
            size = rng.choice("BHIQ")
            number = rng.choice(NUMBERS) & ((1 << 8 * struct.calcsize("<" + size)) - 1)
            packed = struct.pack(rng.choice("<>") + size, number)
            out[at : at + len(packed)] = packed
        elif how == 6:
            word = rng.choice(WORDS)
            out[at : at + rng.choice((0, len(word)))] = word
        else:
            other = rng.randrange(len(out) + 1)
            length = rng.randrange(1, 32)
            out[at : at + length] = out[other : other + length]
    return bytes(out)


def mutate_inside(format: str, data: bytes, rng: random.Random) -> bytes:
    """Damage what the parser reads after its outer shell was found whole: header, pickle or member."""
    if format == "safetensors":
        (length,) = struct.unpack_from("<Q", data)
        header = mutate(data[8 : 8 + length], rng)
        return struct.pack("<Q", len(header)) + header + data[8 + length :]
    if format in ("torch", "npz"):
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
            names = old.namelist()
            victim = rng.choice([name for name in names if name.endswith(".pkl")] or names)
            for name in names:
                held = old.read(name)
                new.writestr(name, mutate(held, rng) if name == victim else held)
        return out.getvalue()
    return mutate(data, rng)


def damage(format: str, valid: Path, target: Path, seed: int) -> None:
    """Write a damaged copy, which depends on the seed alone."""
    rng = random.Random(seed)
    if valid.is_dir():
        shutil.copytree(valid, target)
        files = sorted(path for path in target.rglob("*") if path.is_file())
        headers = ("_METADATA", ".zarray", ".metadata", "manifest.ocdbt")
        named = [path for path in files if path.name in headers or path.name.endswith(".json")]
        victim = rng.choice(named if rng.random() < 0.7 else files)
        if rng.random() < 0.1:
            victim.unlink()
        else:
            victim.write_bytes(mutate(victim.read_bytes(), rng))
        return
    how: Callable[[bytes], bytes] = lambda data: mutate(data, rng)  # noqa: E731
    if rng.random() < 0.6:
        how = lambda data: mutate_inside(format, data, rng)  # noqa: E731
    target.write_bytes(how(valid.read_bytes()))


def outcome(path: Path, format: str) -> str:
    """Return "read" or "refused"; anything else raises.

    Raises:
        AssertionError: the refusal is not one printable line, or it cost too much memory.
    """
    said = ""
    with (resident_memory if "orbax" in CONTAINERS.get(format, (format,)) else traced_memory)() as peak:
        try:
            with open_reader(path, CONTAINERS.get(format, (format,))[0]) as reader:
                for name, info in reader.tensors.items():
                    assert reader.read(name).nbytes == info.nbytes
        except CheckpointError as error:
            said = str(error)
    assert said.isprintable(), f"not one line: {said!r}"
    assert peak.bytes < MAX_MEMORY, f"took {peak.bytes} bytes"
    return "refused" if said else "read"


def try_one(format: str, valid: Path, folder: Path, seed: int) -> str:
    """Damage, read, clean up; a file that fails stays."""
    target = folder / f"{format}-{seed}{valid.suffix}"
    damage(format, valid, target, seed)
    result = outcome(target, format)
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    return result


def main() -> int:
    """Run for a time, over all formats in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-checkpoints-"))
    print(f"what fails or hangs stays in {folder}, with its format and seed in its name", flush=True)
    valid = {}
    for format in arguments.formats:
        (folder / format).mkdir()
        valid[format] = build(format, folder / format)
    until = time.monotonic() + 60 * arguments.minutes
    faulthandler.dump_traceback_later(60 * arguments.minutes + MAX_SECONDS, exit=True)
    tracemalloc.start()  # once: to start and stop it for every file leaks some 2 KiB each time (CPython 3.11)
    counts: dict[tuple[str, str], int] = {}
    seed = first = arguments.seed << 20
    warm = 0
    while time.monotonic() < until:
        seed += 1
        if seed - first == WARM_UP:
            warm = peak_memory()
        for format in arguments.formats:
            try:
                result = try_one(format, valid[format], folder, seed)
            except Exception:
                traceback.print_exc()
                print(f"FAILED: {format} with seed {seed}; the file is in {folder}")
                result = "FAILED"
            counts[format, result] = counts.get((format, result), 0) + 1
    faulthandler.cancel_dump_traceback_later()
    for (format, result), count in sorted(counts.items()):
        print(f"{format:12} {result:8} {count}")
    grown = peak_memory() - warm if seed - first > WARM_UP else 0
    if grown:
        print(f"the process grew by {grown / 2**20:.1f} MiB after the first {WARM_UP} files of each format")
    failed = any(result == "FAILED" for _, result in counts) or grown > MAX_GROWTH
    if not failed:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
