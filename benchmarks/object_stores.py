"""How conversions from a store to a store scale with workers, against a store that is slow per connection.

    python -m benchmarks.object_stores --rate 0.5 --mib 256 --workers 1 8

The store is a process of this machine (parity_tests/support/object_store.py), so its rate has to be low enough that
the processor is idle most of the time: that is what a real store would be waited for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from attn_bridge import checkpoints


def main() -> None:
    """Measure, and print a line per number of workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=0.5, help="MB/s of a connection")
    parser.add_argument("--latency", type=float, default=20.0, help="ms of a request")
    parser.add_argument("--mib", type=int, default=256, help="size of the checkpoint")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args()
    options = ["--rate", str(given.rate), "--latency", str(given.latency)]
    server = subprocess.Popen(
        [sys.executable, "-m", "parity_tests.support.object_store", *options], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        os.environ |= {
            "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with tempfile.TemporaryDirectory() as folder:
            random = np.random.default_rng(0)
            tensors = {f"t{i:03d}": random.standard_normal((512, 1024), np.float32) for i in range(given.mib // 2)}
            np.savez(Path(folder) / "x.npz", **tensors)
            checkpoints.convert(Path(folder) / "x.npz", "s3://bucket/x.safetensors", to_layout="same", workers=8)
            seconds = {}
            for count in given.workers:
                begin = time.monotonic()
                result = checkpoints.convert(
                    "s3://bucket/x.safetensors", f"s3://bucket/{count}.safetensors", to_layout="same", workers=count
                )
                seconds[count] = time.monotonic() - begin
                print(
                    f"{count} workers: {seconds[count]:.1f} s, {seconds[given.workers[0]] / seconds[count]:.1f} times "
                    f"as fast; {len(result.digests)} tensors, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
