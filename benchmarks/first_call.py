"""The cost of the first call of a module, in a process that compiles and in one that loads machine code from disk.

    python -m benchmarks.first_call [--tokens 512] [--rounds 5]

Each round starts two processes per framework with a new folder for `ATTN_KERNELS_CACHE`: the first compiles, the second
loads. Each makes a module, calls it and differentiates it. The table shows the median over the rounds of
processor time, which does not depend on what else runs, and of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from . import machine

CODE = {
    "torch": """
import torch
import torch_attn
module = torch_attn.MultiHeadAttention(512, 512, {tokens}, num_heads=8)
x = torch.randn(1, {tokens}, 512)
call = lambda: module(x)
differentiate = lambda: module(x).sum().backward()
""",
    "jax": """
import jax
from flax import nnx
import jax_attn
module = jax_attn.MultiHeadAttention(512, 512, {tokens}, num_heads=8, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (1, {tokens}, 512))
run, slopes = nnx.jit(lambda module: module(x)), nnx.jit(nnx.grad(lambda module: module(x).sum()))
call = lambda: jax.block_until_ready(run(module))
differentiate = lambda: jax.block_until_ready(jax.tree.leaves(slopes(module)))
""",
}
MEASURE = """
import json
import time
seconds = {{}}
for name, way in (("call", call), ("gradient", differentiate), ("next call", call), ("next gradient", differentiate)):
    begin = time.process_time(), time.perf_counter()
    way()
    seconds[name] = time.process_time() - begin[0], time.perf_counter() - begin[1]
print(json.dumps(seconds))
"""


def measured(framework: str, tokens: int, folder: str) -> dict[str, tuple[float, float]]:
    """Return processor and wall seconds of the first calls in a new process that keeps machine code in a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"ATTN_KERNELS_CACHE": folder, "OMP_WAIT_POLICY": "PASSIVE"}
    code = (CODE[framework] + MEASURE).format(tokens=tokens)
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    seconds: dict[str, tuple[float, float]] = json.loads(run.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    facts = machine.describe()
    print(f"{facts['cpu']}, {facts['cores']} cores, {arguments.tokens} tokens, load {facts['load_average_before']}")
    print("framework  code    call                      processor s   wall s")
    for framework in CODE:
        rounds: dict[str, list[dict[str, tuple[float, float]]]] = {"cold": [], "warm": []}
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as folder:
                for kind in rounds:
                    rounds[kind].append(measured(framework, arguments.tokens, folder))
        for kind, results in rounds.items():
            for name in results[0]:
                processor, wall = (statistics.median(one[name][at] for one in results) for at in range(2))
                print(f"{framework:<10} {kind:<7} {name:<25} {processor:11.3f} {wall:8.3f}")


if __name__ == "__main__":
    main()
