"""Scaling of store-to-store conversions with workers, against a store that is slow per connection.

    python -m benchmarks.object_stores --rate 1 --mib 1024 --workers 1 8

The store is a process of this machine (parity_tests/support/files/object_store.py), so its rate has to be low enough
that the processor is idle most of the time, as if waiting for a real store. Each conversion is a separate process, as
the command is; rounds alternate between the numbers of workers. A line shows the total time, and its parts before the
first byte was read, until all was written, and to publish; the load of the processor, in cores of this machine (other
processes included); and the mean number of concurrent requests while bytes were moved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CONVERT = """
import sys
from attn_bridge import checkpoints
checkpoints.convert(sys.argv[1], sys.argv[2], to_layout="same", workers=int(sys.argv[3]))
"""


def busy() -> float:
    """Return the seconds of all cores in which the processor was busy so far."""
    line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _, _, *interrupts = map(int, line.split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def convert(source: str, target: str, workers: int) -> None:
    """Convert in a separate process."""
    subprocess.run([sys.executable, "-c", CONVERT, source, target, str(workers)], check=True)


def measure(count: int, number: int, trace: Path) -> float:
    """Convert once, print a line, and return the seconds it took."""
    seen = trace.stat().st_size
    begin, before = time.time(), busy()
    convert("s3://bucket/x.safetensors", f"s3://bucket/{count}-{number}.safetensors", count)
    seconds, cores = time.time() - begin, (busy() - before) / (time.time() - begin)
    with trace.open(encoding="utf-8") as lines:
        lines.seek(seen)
        requests = [json.loads(line) for line in lines]
    moved: dict[str, list[tuple[float, float]]] = {"read": [], "sent": []}
    for since, until, method, key, what in requests:
        if method == "PUT" and "/parts/" in key:
            moved["sent"].append((since, until))
        elif method == "GET" and key == "bucket/x.safetensors" and what:
            moved["read"].append((since, until))
    first, last = min(one for one, _ in moved["read"]), max(one for _, one in moved["sent"])
    under_way = ", ".join(f"{sum(b - a for a, b in some) / (last - first):.0f} {how}" for how, some in moved.items())
    print(
        f"{count} workers: {seconds:.1f} s (start {first - begin:.1f}, work {last - first:.1f}, publish "
        f"{begin + seconds - last:.1f}), {cores:.1f} cores busy, under way {under_way}, {len(requests)} requests",
        flush=True,
    )
    return seconds


def main() -> None:
    """Measure, and print a line per conversion and one per number of workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=1.0, help="MB/s of a connection")
    parser.add_argument("--latency", type=float, default=20.0, help="ms of a request")
    parser.add_argument("--mib", type=int, default=1024, help="size of the checkpoint")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        options = ["--latency", str(arguments.latency), "--trace", str(trace)]
        random = np.random.default_rng(0)
        source = Path(folder) / "x.npz"
        np.savez(
            source, **{f"t{i:04d}": random.standard_normal((512, 1024), np.float32) for i in range(arguments.mib // 2)}
        )
        server = subprocess.Popen(
            [sys.executable, "-m", "parity_tests.support.files.object_store", "--rate", str(arguments.rate), *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        try:
            os.environ |= {
                "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
                "AWS_ACCESS_KEY_ID": "none",
                "AWS_SECRET_ACCESS_KEY": "none",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            convert(str(source), "s3://bucket/x.safetensors", 8)
            seconds: dict[int, list[float]] = {count: [] for count in arguments.workers}
            for number, count in itertools.product(range(arguments.rounds), arguments.workers):
                seconds[count].append(measure(count, number, trace))
            middle = {count: statistics.median(found) for count, found in seconds.items()}
            for count, median_seconds in middle.items():
                print(
                    f"{count} workers: {median_seconds:.1f} s, {middle[min(middle)] / median_seconds:.1f} times as fast"
                )
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
