"""Draw the test vectors with the frameworks that own them: ``python -m parity_tests.goldens.make_random_vectors``.

Run it again after a framework has changed a stream on purpose; the tests then say what else has to follow. It takes a
processor with arithmetic in float16, which XLA is told to use and not to use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge import rng

from .random_vectors import jax_cases, streams, torch_cases


def draw_with_jax(case: Mapping[str, Any]) -> np.ndarray:
    """Draw one case with `jax.random`, or with `nnx.Rngs`."""
    import jax
    from flax import nnx

    with jax.enable_x64(case["x64"]), jax.default_device(jax.devices("cpu")[0]):  # a GPU rounds uniform numbers once
        key = jax.random.key(case["seed"])
        arguments = {name: value for name, value in case.items() if name not in ("function", "seed", "x64")}
        if "shape" in arguments:
            arguments["shape"] = tuple(arguments["shape"])
        if case["function"] == "key":
            return np.asarray(jax.random.key_data(key))
        if case["function"] == "streams":
            return np.stack(streams(lambda **s: nnx.Rngs(**s, params=case["seed"]), jax.random.key_data))
        result = getattr(jax.random, case["function"])(key, **arguments)
        return np.asarray(jax.random.key_data(result) if case["function"] in ("fold_in", "split") else result)


def draw_with_torch(case: Mapping[str, Any]) -> np.ndarray:
    """Draw one case with torch."""
    import torch

    torch.manual_seed(case["seed"])
    function = case["function"]
    if function == "linear":
        layer = torch.nn.Linear(case["d_in"], case["d_out"])
        return torch.cat([layer.weight.detach().flatten(), layer.bias.detach()]).numpy()
    if function == "bernoulli":
        return (torch.empty(case["shape"]).bernoulli_(case["p"]) == 1).numpy()
    if function == "randn":
        return torch.randn(case["shape"]).numpy()
    dtype = getattr(torch, case["dtype"])
    drawn = torch.rand(case["shape"], dtype=dtype) if function == "rand" else torch.empty(case["shape"], dtype=dtype)
    if function == "uniform":
        drawn.uniform_(case["low"], case["high"])
    return drawn.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).numpy()


def jax_bytes(instructions: str) -> list[str]:
    """Draw all cases with JAX in a process of its own, where XLA uses no newer instructions than these."""
    code = f"from {__name__} import *; print(json.dumps([draw_with_jax(case).tobytes().hex() for case in jax_cases()]))"
    command = [sys.executable, "-c", code.replace("__main__", "parity_tests.goldens.make_random_vectors")]
    flags = {"XLA_FLAGS": f"--xla_cpu_max_isa={instructions}"}
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, check=True)
    drawn: list[str] = json.loads(done.stdout)
    return drawn


def write(name: str, versions: Mapping[str, str], cases: list[dict[str, Any]]) -> None:
    """Write one file, a case a line."""
    lines = ",\n".join(map(json.dumps, cases))
    text = f'{{\n"versions": {json.dumps(versions)},\n"cases": [\n{lines}\n]\n}}\n'
    Path(__file__).with_name(f"random_{name}.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Write both files."""
    import flax
    import jax
    import torch

    if not rng.fused.COMPUTES_FLOAT16:
        sys.exit("this processor has no arithmetic in float16, and what others draw with it would be lost")
    cases = []
    for case, plain, fused in zip(jax_cases(), jax_bytes("AVX2"), jax_bytes("AMX_FP16"), strict=True):
        cases.append({"draw": case, "bytes": plain, **({} if plain == fused else {"bytes with float16": fused})})
    write("jax", {"jax": jax.__version__, "flax": flax.__version__}, cases)
    cases = [{"draw": case, "bytes": draw_with_torch(case).tobytes().hex()} for case in torch_cases()]
    write("torch", {"torch": torch.__version__.partition("+")[0]}, cases)


if __name__ == "__main__":
    main()
