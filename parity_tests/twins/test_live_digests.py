"""Digests of live modules: the same for twins, in any layout, and on the command line; of shared ones elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import attn_bridge
from attn_bridge import backends
from attn_bridge.checkpoints import live
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.cli.app import run

from ..support.sharded.sharded_sides import BFLOAT16, Arrays, numbers

NAME = "DecoderModel experts"
FACTORY = """
import torch, torch_attn

def make():
    torch.manual_seed(1)
    return torch_attn.MultiHeadAttention(16, 16, context_length=8, dropout=0.0, num_heads=4)

def other():
    module = make()
    module.W_key.weight.data[3, 5] += 1
    return module
"""


def _twins(arrays: Arrays, config: object) -> list[object]:
    torch, flax = (backends.load(side) for side in ("torch", "flax"))
    one, two = (backend.build_blank("DecoderModel", config, "float32") for backend in (torch, flax))
    torch.set_weights(one, arrays)
    attn_bridge.transfer(one, two)
    return [one, two]


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("layout", ["torch", "flax"])
def test_twins_have_the_same_digests_until_one_number_differs(layout: str, dtype: str | None):
    config, arrays = numbers(NAME)
    one, two = (attn_bridge.digests(module, layout=layout, dtype=dtype) for module in _twins(arrays, config))
    assert (one.tensors, one.layout, one.dtype) == (two.tensors, two.layout, two.dtype)
    name = next(iter(arrays))
    arrays[name] = arrays[name] * np.float32(1.5)
    other = attn_bridge.digests(_twins(arrays, config)[1], layout=layout, dtype=dtype)
    assert len(one.compare(other)) == 1


def test_a_trainer_in_float32_and_a_server_in_bfloat16_compare():
    config, arrays = numbers(NAME)
    trainer, _ = _twins(arrays, config)
    _, server = _twins({name: one.astype(BFLOAT16) for name, one in arrays.items()}, config)
    held = attn_bridge.digests(server, layout="torch")
    assert attn_bridge.digests(trainer, layout="torch", dtype="bf16").compare(held) == {}
    problems = attn_bridge.digests(trainer, layout="torch").compare(held)
    assert problems.keys() == held.tensors.keys()
    assert all(text.endswith("cast both to one dtype") for text in problems.values())


def test_layouts_that_are_two_are_refused():
    config, arrays = numbers(NAME)
    module = _twins(arrays, config)[0]
    one, two = (attn_bridge.digests(module, layout=layout) for layout in ("torch", "flax"))
    with pytest.raises(ValueError, match="names of layout torch, the other of flax; take both in one layout"):
        one.compare(two)


def test_the_command_line_says_which_tensor_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FACTORY)
    for name in ("make", "other"):
        assert run(["digest", f"mine.py:{name}", "--layout", "flax", "--json", f"./{name}.json"]) == 0
    capsys.readouterr()
    assert run(["verify", "make.json", "make.json"]) == 0
    assert run(["verify", "make.json", "other.json"]) == 1
    out = capsys.readouterr().out
    assert out.count("W_key.kernel has other bytes in 1 of 256 tiles") == out.count("has other bytes") == 1
    for option in (["--from", "torch"], ["--to", "flax"], ["--dequantize"], ["--max-memory", "1GiB"]):
        assert run(["verify", "make.json", "other.json", *option]) == 2
        assert f"error: {option[0]} (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("layout",), 3),
        (("unit",), "host"),
        (("tensors",), []),
        (("tensors", "w", "held"), [7]),
        (("tensors", "w", "shape"), [-1]),
        (("shards", "w"), [{"place": "x"}]),
        (("attn-bridge-digests",), 2),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path: Path, path: tuple[str, ...], value: object):
    tensor = {"dtype": "float32", "shape": [2], "blake3": "00", "tiles": ["0"], "places": [[0]], "held": [0]}
    document: dict = {
        "attn-bridge-digests": 1, "layout": "", "dtype": "", "unit": "rank", "tensors": {"w": tensor}, "shards": {}
    }  # fmt: skip
    file = tmp_path / "digests.json"
    file.write_text(json.dumps(document))
    assert live.read(file) is not None
    *parents, last = path
    inside = document
    for parent in parents:
        inside = inside[parent]
    inside[last] = value
    file.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"digests\.json can't be used: [^\n]+$"):
        live.read(file)
