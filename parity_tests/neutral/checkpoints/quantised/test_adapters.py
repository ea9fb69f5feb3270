"""LoRA adapters of peft merged into their base: what comes out, what is refused, and by which words."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.checkpoints.adapters import LoraAdapter, Merged
from attn_bridge.checkpoints.containers import open_reader
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.cli.app import run
from parity_tests.support.files import adapter_files, quantised_files
from parity_tests.support.files.adapter_files import matrices, product

from ..checkpoint_files import tree

QUERY, DOWN, OTHER = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.10.mlp.down_proj"
FUSED, OUT = "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"
SHAPES = {f"{QUERY}.weight": (6, 6), f"{DOWN}.weight": (6, 10), f"{OTHER}.weight": (6, 10), "model.norm.weight": (6,),
          "model.embed_tokens.weight": (7, 6), "lm_head.weight": (7, 6), f"{FUSED}.weight": (6, 18),
          f"{FUSED}.bias": (18,), f"{OUT}.weight": (6, 6)}  # fmt: skip


def write(folder, dtype=np.float32, config=None, names=SHAPES, front=""):
    """Write a base and return its folder and tensors."""
    rng = np.random.default_rng(5)
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items() if name in names}
    folder.mkdir()
    safetensors.numpy.save_file({front + name: one for name, one in arrays.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False} if config is None else config))
    return folder, arrays


def merged(tmp_path, tensors, base=None, config=None, front="", **options):
    """Merge, and return the tensors that differ from the base's, in float64."""
    source, arrays = base or write(tmp_path / "base")
    adapter = adapter_files.save(tmp_path / "adapter", tensors, **(config or {}))
    target = tmp_path / "out"
    checkpoints.convert(source, target, to_layout="same", adapter=adapter, **options)
    assert checkpoints.verify(source, target, adapter=adapter).passed
    found = checkpoints.read(target)
    assert found.keys() == {front + name for name in arrays}
    return {
        name: found[front + name].astype(np.float64) - array.astype(np.float64)
        for name, array in arrays.items()
        if found[front + name].tobytes() != array.tobytes()
    }


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, atol=2e-6 * np.abs(array).max())


@pytest.mark.parametrize("is_rslora", [False, True])
def test_products_are_added_times_alpha_over_rank(tmp_path, is_rslora):
    tensors = matrices(QUERY, 6, 6) | matrices(DOWN, 10, 6)
    found = merged(tmp_path, tensors, config={"use_rslora": is_rslora})
    wanted = {f"{layer}.weight": product(tensors, layer, is_rslora=is_rslora) for layer in (QUERY, DOWN)}
    close(found, wanted)


def test_patterns_give_layers_their_rank_and_alpha(tmp_path):
    tensors = matrices(QUERY, 6, 6, 2) | matrices(DOWN, 10, 6) | matrices(OTHER, 10, 6, 3)
    config = {
        "rank_pattern": {"self_attn.q_proj": 2, r"model\.layers\.1\d\.mlp\.down_proj": 3},
        "alpha_pattern": {"0.mlp.down_proj": 5, "^layers.0.self_attn.q_proj": 99, "proj": 98, ".*q_proj": 3},
    }
    wanted = {QUERY: 3, DOWN: 5, OTHER: 8}  # "0.mlp" is a whole part of a name, "10.mlp" is not
    close(
        merged(tmp_path, tensors, config=config),
        {f"{layer}.weight": product(tensors, layer, alpha) for layer, alpha in wanted.items()},
    )


@pytest.mark.parametrize("model", [{"model_type": "gpt2", "tie_word_embeddings": False}, {}])
def test_matrices_of_conv1d_are_added_transposed(tmp_path, model):
    tensors = matrices(FUSED, 6, 18) | matrices(OUT, 6, 6)
    base = write(tmp_path / "base", config=model)
    found = merged(tmp_path, tensors, base, {"fan_in_fan_out": True})
    close(found, {f"{layer}.weight": product(tensors, layer).T for layer in (FUSED, OUT)})


def test_square_matrices_beside_a_head_are_those_of_their_model(tmp_path):
    tensors = matrices(FUSED, 6, 18) | matrices(OUT, 6, 6) | matrices("lm_head", 6, 7)
    base = write(tmp_path / "base", config={"model_type": "gpt2", "tie_word_embeddings": False})
    found = merged(tmp_path, tensors, base)  # peft saves fan_in_fan_out as the last layer has it, the head
    close(found, {f"{one}.weight": product(tensors, one).T for one in (FUSED, OUT)}
          | {"lm_head.weight": product(tensors, "lm_head")})  # fmt: skip


@pytest.mark.parametrize("ending", ["", ".weight"])
def test_rows_of_dora_get_their_magnitudes(tmp_path, ending):
    tensors = matrices(DOWN, 10, 6) | matrices(FUSED, 6, 18)
    norms = {DOWN: np.arange(1, 7, dtype=np.float32), FUSED: np.arange(3, 21, dtype=np.float32)}
    source, arrays = write(tmp_path / "base", config={"model_type": "gpt2", "tie_word_embeddings": False})
    more = {f"{layer}.lora_magnitude_vector{ending}": array for layer, array in norms.items()}
    found = merged(tmp_path, tensors | more, (source, arrays), {"use_dora": True})
    wanted = {}
    for layer, array in norms.items():
        weight = arrays[f"{layer}.weight"].astype(np.float64)
        rows = (weight.T if layer == FUSED else weight) + product(tensors, layer)
        rows *= (array / np.linalg.norm(rows, axis=1))[:, None]
        wanted[f"{layer}.weight"] = (rows.T if layer == FUSED else rows) - weight
    close(found, wanted)


def test_embeddings_biases_and_saved_modules_are_merged(tmp_path):
    rng = np.random.default_rng(3)
    table, head, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((7, 6), (7, 6), 18))
    down, up = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 7), (6, 4)))
    tensors = {
        "model.embed_tokens.base_layer.weight": table,
        "model.embed_tokens.lora_embedding_A": down,
        "model.embed_tokens.lora_embedding_B": up,
        "lm_head.weight": head,
        f"{FUSED}.lora_B.bias": bias,
        **matrices(FUSED, 6, 18),
    }
    base = write(tmp_path / "base")
    wanted = {
        "model.embed_tokens.weight": table - base[1]["model.embed_tokens.weight"] + 2 * (up.astype(float) @ down).T,
        "lm_head.weight": head.astype(float) - base[1]["lm_head.weight"],
        f"{FUSED}.bias": 2 * bias.astype(float),
        f"{FUSED}.weight": product(tensors, FUSED).T,
    }
    close(merged(tmp_path, tensors, base), wanted)


@pytest.mark.parametrize("front", ["text.", ""])
def test_bases_with_another_front_are_followed(tmp_path, front):
    names = (f"{QUERY}.weight", "model.norm.weight")
    base = write(tmp_path / "base", names=names, front=front)
    layer = QUERY if front else f"transformer.{QUERY}"
    tensors = matrices(layer, 6, 6)
    close(merged(tmp_path, tensors, base, front=front), {f"{QUERY}.weight": product(tensors, layer)})


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_sums_are_rounded_once(tmp_path, dtype):
    tensors = matrices(DOWN, 10, 6)
    source, arrays = write(tmp_path / "base", dtype)
    adapter = adapter_files.save(tmp_path / "adapter", tensors)
    name = f"{DOWN}.weight"
    exact = arrays[name].astype(np.float64) + product(tensors, DOWN)
    for option, wanted in ((None, dtype), ("f32", np.float32), ("bf16", ml_dtypes.bfloat16)):
        target = tmp_path / f"{option}"
        checkpoints.convert(source, target, to_layout="same", adapter=adapter, dtype=option)
        assert checkpoints.verify(source, target, adapter=adapter).passed
        found = checkpoints.read(target)
        assert {array.dtype for array in found.values()} == {np.dtype(wanted)}
        step = float(ml_dtypes.finfo(wanted).eps) / 2 + (1e-6 if dtype != np.float64 else 1e-14)
        assert (np.abs(found[name].astype(np.float64) - exact) <= step * np.abs(exact).max()).all()
        other = arrays["lm_head.weight"].astype(np.float64)
        assert (np.abs(found["lm_head.weight"].astype(np.float64) - other) <= step * np.abs(other)).all()


@pytest.mark.parametrize("is_dora", [False, True])
def test_pieces_and_workers_merge_to_the_same_bytes(tmp_path, is_dora):
    source, _ = write(tmp_path / "base", ml_dtypes.bfloat16)
    tensors = matrices(DOWN, 10, 6) | matrices(FUSED, 6, 18)
    norms = {f"{layer}.lora_magnitude_vector": np.ones(size, np.float32) for layer, size in ((DOWN, 6), (FUSED, 18))}
    tensors, config = (tensors | norms, {"use_dora": True}) if is_dora else (tensors, {})
    adapter = adapter_files.save(tmp_path / "adapter", tensors, **config)
    checkpoints.convert(source, tmp_path / "whole", to_layout="same", adapter=adapter)
    whole = checkpoints.read(tmp_path / "whole")
    with open_reader(source) as base:
        found = Merged(base, LoraAdapter.open(adapter), {}, "", False)
        for name in (f"{DOWN}.weight", f"{FUSED}.weight"):
            data = whole[name].tobytes()
            for start, stop in ((0, 1), (3, 9), (7, 60), (10, 61), (59, 120), (120, 120)):
                assert bytes(found.read_range(name, start, stop)) == data[start:stop]
            into = np.empty((3, 4), ml_dtypes.bfloat16)
            found.read_rows(name, 13, 17, into)
            assert (
                into.tobytes() == np.stack([whole[name].reshape(-1)[13 + 17 * row :][:4] for row in range(3)]).tobytes()
            )
    checkpoints.convert(source, tmp_path / "many", to_layout="same", adapter=adapter, workers=2, task_bytes=4096)
    assert tree(tmp_path / "many") == tree(tmp_path / "whole")


def test_verify_holds_the_adapter_against_the_merged_one(tmp_path):
    source, _ = write(tmp_path / "base")
    adapter = adapter_files.save(tmp_path / "adapter", matrices(DOWN, 10, 6))
    target = tmp_path / "out"
    options = ["--adapter", str(adapter)]
    assert run(["convert", str(source), str(target), "--to", "same", *options]) == 0
    assert run(["verify", str(source), str(target), *options]) == 0
    assert run(["verify", str(target)]) == 0
    with pytest.raises(CheckpointError, match=r"was made with an adapter; give it, too, with --adapter$"):
        checkpoints.verify(source, target)
    other = adapter_files.save(tmp_path / "other", matrices(DOWN, 10, 6, seed=1))
    problems = checkpoints.verify(source, target, adapter=other).problems
    assert f"base_model.model.{DOWN}.lora_A.weight (adapter)" in problems
    assert f"{DOWN}.weight" in problems


REFUSED = {
    "QALoRA": ({}, {"use_qalora": True}, "is an adapter with QALoRA and is not merged"),
    "IA3": ({}, {"peft_type": "IA3"}, "peft_type (IA3) must be LORA; merge_and_unload of peft merges it: save what"),
    "a head": ({}, {"peft_type": "HRA", "target_modules": ["lm_head"]}, "merges it only where the base's head and emb"),
    "names of a pattern": ({}, {"use_qalora": True, "target_modules": ".*proj"}, "as it changes both of a tied pair"),
    "a router": ({}, {"peft_type": "LILY"}, "which depends on the input: it can't be merged, by peft neither"),
    "prompts": ({}, {"peft_type": "PREFIX_TUNING"}, "which adds inputs and changes no weight: it can't be merged"),
    "mixtures": ({}, {"peft_type": "XLORA"}, "which depends on the input: it can't be merged, by peft neither"),
    "replicated layers": ({}, {"layer_replication": [[0, 1]]}, "which share their base's weights: it can't be merged"),
    "activated LoRA": ({}, {"alora_invocation_tokens": [1]}, "which acts from an invocation on: it can't be merged"),
    "a switch of a later peft": ({}, {"use_other_scale": True}, "with use_other_scale, which is not known, and is not"),
    "biases of layers without": (
        {f"{DOWN}.lora_B.bias": np.ones(6)},
        {"lora_bias": True},
        f"the base has no {DOWN}.bias; peft merges none of them either: load the base with biases of zeros, as "
        "attention_bias=True and mlp_bias=True make them in a Llama",
    ),
    "a head of another task": (
        {"score.weight": np.ones((2, 6))},
        {},
        "trained score.weight (modules_to_save), which the base lacks: a head of another task is not added to it; "
        "merge_and_unload of peft merges it",
    ),
    "PiSSA": ({}, {"init_lora_weights": "pissa"}, "init_lora_weights pissa, which changes the base"),
    "experts": ({}, {"target_parameters": ["mlp.experts"]}, "LoRA of stacked parameters"),
    "AdaLoRA": ({f"{DOWN}.lora_E": np.ones(6)}, {}, "lora_E is of a kind of adapter"),
    "other magnitudes": (
        {f"{DOWN}.lora_magnitude_vector": np.ones(10)},
        {"use_dora": True},
        "must have the norm of each output",
    ),
    "magnitudes alone": (
        {f"{QUERY}.lora_magnitude_vector": np.ones(6), f"{DOWN}.lora_magnitude_vector": np.ones(6)},
        {"use_dora": True},
        "must have the norm of each output",
    ),
    "magnitudes without DoRA": ({f"{DOWN}.lora_magnitude_vector": np.ones(6)}, {}, "has magnitudes without use_dora"),
    "DoRA without magnitudes": ({}, {"use_dora": True}, "lacks lora_magnitude_vector, which use_dora asks for"),
    "a rank of 0": ({}, {"r": 0}, "r (0) must be a whole number of at least 1"),
    "alpha of text": ({}, {"lora_alpha": "8"}, "lora_alpha (8) must be a number"),
    "alpha beyond float64": ({}, {"lora_alpha": 10**400}, f"lora_alpha ({10**400})"[:30]),
    "another rank": ({}, {"r": 8}, "must be matrices of rank 8, as its config has it"),
    "a convolution": ({f"{DOWN}.lora_A.weight": np.ones((4, 3, 2, 2))}, {}, "is of a convolution, which is not merged"),
    "half": ({f"{QUERY}.lora_A.weight": np.ones((4, 6))}, {}, "lacks its other matrix (lora_A, lora_B)"),
    "another base": (matrices("model.layers.0.mlp.router", 6, 6), {}, "mlp.router.weight, which it changes, is not in"),
    "other shapes": (matrices(QUERY, 7, 6), {}, f"does not fit {QUERY}.weight (6, 6) of the base"),
    "other embeddings": (
        {"lm_head.weight": np.ones((9, 6))},
        {},
        "(9, 6) does not fit lm_head.weight (7, 6) of "
        "the base: resize_token_embeddings(9) of the base, and save that first",
    ),
    "whole numbers": ({"model.norm.weight": np.ones(6, np.int64)}, {}, "must be floating point to be merged"),
    "a turned square": (matrices(QUERY, 6, 6), {"fan_in_fan_out": True}, "fan_in_fan_out of its config contradicts"),
    "a hostile pattern": ({}, {"alpha_pattern": {"(a+)+$": 1}}, "repeats too much to be matched safely"),
    "a switch of text": ({}, {"use_rslora": "false"}, "use_rslora ('false') must be true or false"),
    "a turned Linear": (matrices(OTHER, 6, 10), {}, f"is (10, 6), {OTHER}.weight (6, 10) of the base is its transpose"),
    "a module that was not saved": ({}, {"modules_to_save": ["lm_head"]}, "lacks lm_head, which modules_to_save names"),
    "biases that were not saved": ({}, {"lora_bias": True}, "lacks lora_B.bias, which lora_bias asks for"),
    "a LoRA of another layer": (
        matrices(QUERY, 6, 6),
        {"target_modules": ["model.layers.0.mlp.down_proj", "k_proj"]},
        f"holds a LoRA of {QUERY}, and target_modules of its config (model.layers.0.mlp.down_proj, k_proj) leaves that",
    ),
    "a broken pattern": ({}, {"rank_pattern": {"a(": 1}}, "the pattern a( is malformed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_can_not_be_merged_are_named(tmp_path, case):
    more, config, message = REFUSED[case]
    source, _ = write(tmp_path / "base")
    adapter = adapter_files.save(tmp_path / "adapter", {**matrices(DOWN, 10, 6), **more}, **config)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout="same", adapter=adapter)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "adapter") in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_patterns_that_take_too_long_are_refused(tmp_path):
    source, _ = write(tmp_path / "base")
    tensors = matrices("m." * 99 + DOWN, 10, 6)  # in front of the base's name, as of a whole model
    adapter = adapter_files.save(tmp_path / "adapter", tensors, alpha_pattern={".*.*.*.*y": 1})
    with pytest.raises(CheckpointError, match=r"takes too long to be matched with \.\*\.\*\.\*\.\*y$"):
        checkpoints.plan(source, tmp_path / "out", to_layout="same", adapter=adapter)


def test_layers_without_their_lora_are_named(tmp_path):
    source, _ = write(tmp_path / "base")
    config = {"target_modules": ["down_proj", "q_proj", "norm"]}
    adapter = adapter_files.save(tmp_path / "adapter", matrices(DOWN, 10, 6), **config)
    plan = checkpoints.plan(source, tmp_path / "out", to_layout="same", adapter=adapter)
    (note,) = [note for note in plan.notes if "target_modules" in note]
    assert (
        note == f"2 layers that its target_modules name have no LoRA in adapter, and stay as they are: {QUERY}; {OTHER}"
    )
    whole = adapter_files.save(tmp_path / "whole", matrices(DOWN, 10, 6), target_modules=["0.mlp.down_proj", "k_proj"])
    plan = checkpoints.plan(source, tmp_path / "out", to_layout="same", adapter=whole)
    assert not any("target_modules" in note for note in plan.notes)


def test_saved_modules_that_the_base_lacks_are_not_missed(tmp_path):
    config = {"modules_to_save": ["classifier", "score"]}  # as peft adds them, whichever the model has
    assert merged(tmp_path, matrices(DOWN, 10, 6), config=config).keys() == {f"{DOWN}.weight"}


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("change", ["table", "head", "lora of both"])
def test_a_tied_head_that_an_adapter_changes_becomes_a_tensor(tmp_path, change, is_stored):
    names = SHAPES.keys() - (() if is_stored else {HEAD})
    source, arrays = write(tmp_path / "base", config={"model_type": "llama", "tie_word_embeddings": True}, names=names)
    if is_stored:  # as in a file of torch
        arrays[HEAD] = arrays[TABLE]
        safetensors.numpy.save_file(arrays, source / "model.safetensors")
    own = matrices("lm_head", 6, 7)
    rows = matrices("x", 7, 6)
    both = {"model.embed_tokens.lora_embedding_A": rows["x.lora_A.weight"],
            "model.embed_tokens.lora_embedding_B": rows["x.lora_B.weight"]}  # fmt: skip
    tensors, wanted = {
        "table": ({TABLE: arrays[TABLE] + 1}, (arrays[TABLE] + 1, arrays[TABLE])),
        "head": ({HEAD: arrays[TABLE] + 1}, (arrays[TABLE], arrays[TABLE] + 1)),
        "lora of both": (own | both, (arrays[TABLE] + product(rows, "x").T, arrays[TABLE] + product(own, "lm_head"))),
    }[change]
    tying = {"target_modules": ["down_proj", "embed_tokens"], "ensure_weight_tying": True} if "lora" in change else {}
    adapter = adapter_files.save(tmp_path / "adapter", matrices(DOWN, 10, 6) | tensors, **tying)
    checkpoints.convert(source, tmp_path / "out", to_layout="same", adapter=adapter)
    assert checkpoints.verify(source, tmp_path / "out", adapter=adapter).passed
    found = checkpoints.read(tmp_path / "out")
    for name, array in zip((TABLE, HEAD), wanted, strict=True):
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-5)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_tied_head_that_no_adapter_changes_stays_tied(tmp_path):
    source, _ = write(tmp_path / "base", config={"tie_word_embeddings": True}, names=SHAPES.keys() - {HEAD})
    adapter = adapter_files.save(tmp_path / "adapter", matrices(DOWN, 10, 6))
    checkpoints.convert(source, tmp_path / "out", to_layout="same", adapter=adapter)
    assert HEAD not in checkpoints.read(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"tie_word_embeddings": True}


def test_tied_embeddings_of_an_unknown_name_are_not_changed_alone(tmp_path):
    source, arrays = write(tmp_path / "base", config={"tie_word_embeddings": True}, names={TABLE, f"{DOWN}.weight"})
    safetensors.numpy.save_file(
        {"encoder.embed_tokens.weight": arrays[TABLE], f"{DOWN}.weight": arrays[f"{DOWN}.weight"]},
        source / "model.safetensors",
    )
    changed = {"encoder.embed_tokens.weight": arrays[TABLE] + 1}
    adapter = adapter_files.save(tmp_path / "adapter", matrices(DOWN, 10, 6) | changed)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight, which the base's config\.json ties to the head"):
        checkpoints.plan(source, tmp_path / "out", to_layout="same", adapter=adapter)


def test_an_adapter_alone_is_refused_with_the_option(tmp_path):
    adapter = adapter_files.save(tmp_path / "adapter", matrices(DOWN, 10, 6))
    with pytest.raises(
        CheckpointError, match=r"is an adapter of peft, without its base; convert the base with --adapter"
    ):
        checkpoints.convert(adapter, tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_model_name_or_path": "org/base"}, r"of peft, without its base \(org/base\); convert the base with"),
        ({"peft_type": "IA3"}, r"peft_type \(IA3\) must be LORA; merge_and_unload of peft merges it"),
        ({"peft_type": "PROMPT_TUNING"}, "is an adapter of PROMPT_TUNING, which adds inputs and changes no weight"),
        ({"peft_type": None, "fine_tune_type": "lora"}, "is an adapter of mlx_lm .*mlx_lm.fuse merges it"),
    ],
)
def test_an_adapter_alone_is_named_whatever_it_holds(tmp_path, config, message):
    held = {f"{QUERY}.base_layer.bias": np.ones(6, np.float32)} | matrices(QUERY, 6, 6)
    adapter = adapter_files.save(tmp_path / "adapter", held, **config)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.convert(adapter, tmp_path / "out")


def test_a_model_with_its_adapter_in_one_folder_needs_the_option(tmp_path):
    source, arrays = write(tmp_path / "base")
    (source / "model.safetensors").rename(source / "own.safetensors")
    tensors = matrices(DOWN, 10, 6)
    for file in adapter_files.save(tmp_path / "made", tensors).iterdir():
        file.rename(source / file.name)
    for layout in ("same", "flax"):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.convert(source, tmp_path / "out", to_layout=layout)
        assert f"--adapter {source} merges it, and --drop 'base_model.model.*' leaves it out" in str(caught.value)
    found = merged(tmp_path, tensors, base=(source, arrays))
    checkpoints.convert(source, tmp_path / "here", to_layout="same", adapter=source)
    checkpoints.convert(source, tmp_path / "alone", to_layout="same", drop=["base_model.model.*"])
    here, alone = checkpoints.read(tmp_path / "here"), checkpoints.read(tmp_path / "alone")
    assert here.keys() == alone.keys() == arrays.keys()
    changed = {name for name in arrays if here[name].tobytes() != arrays[name].tobytes()}
    assert changed == found.keys() == {f"{DOWN}.weight"}
    assert all(alone[name].tobytes() == array.tobytes() for name, array in arrays.items())


@pytest.mark.parametrize("container", ["index", "model.safetensors", "pytorch_model.bin"])
def test_an_adapter_in_the_folder_of_its_model_is_never_passed_over(tmp_path, container):
    made, arrays = write(tmp_path / "base")
    source = adapter_files.save(tmp_path / "in", matrices(DOWN, 10, 6))
    (source / "config.json").write_bytes((made / "config.json").read_bytes())
    if container == "index":
        (made / "model.safetensors").rename(source / "model.safetensors")
        weights = dict.fromkeys(arrays, "model.safetensors")
        model = source / "own.safetensors.index.json"
        model.write_text(json.dumps({"weight_map": weights}))
    else:
        model = source / container
        checkpoints.convert(arrays, model, to_layout="same")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout="same")
    assert f"--adapter {source} merges it, and the path {model} leaves it out" in str(caught.value)
    checkpoints.convert(source, tmp_path / "here", to_layout="same", adapter=source)
    checkpoints.convert(model, tmp_path / "alone", to_layout="same")
    here, alone = checkpoints.read(tmp_path / "here"), checkpoints.read(tmp_path / "alone")
    assert {name for name in arrays if here[name].tobytes() != arrays[name].tobytes()} == {f"{DOWN}.weight"}
    assert all(alone[name].tobytes() == array.tobytes() for name, array in arrays.items())


@pytest.mark.parametrize(("layer", "advice"), [(DOWN, "merges it: save what"), ("lm_head", "merges it only where the")])
def test_a_model_saved_with_its_adapter_in_it_is_not_taken_for_an_adapter(tmp_path, layer, advice):
    source, arrays = write(tmp_path / "base")
    whole = {f"base_model.model.{name}": array for name, array in arrays.items() if name != f"{layer}.weight"}
    whole[f"base_model.model.{layer}.base_layer.weight"] = arrays[f"{layer}.weight"]
    whole |= {f"base_model.model.{layer}.lora_{one}.default.weight": np.ones((2, 2), np.float32) for one in "AB"}
    safetensors.numpy.save_file(whole, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"not merged, without its alpha; merge_and_unload of peft {advice}"):
        checkpoints.convert(source, tmp_path / "out")


def test_folders_that_hold_no_adapter_are_refused(tmp_path):
    source, _ = write(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"must be a folder with adapter_config.json, as peft saves it$"):
        checkpoints.convert(source, tmp_path / "out", adapter=source)
    for name in ("two", "one"):
        adapter_files.save(tmp_path / "adapters" / name, matrices(DOWN, 10, 6))
    with pytest.raises(CheckpointError, match=r"as peft saves it; its folders have one: one; two$"):
        checkpoints.convert(source, tmp_path / "out", adapter=tmp_path / "adapters")
    adapter = adapter_files.save(tmp_path / "adapter", matrices(DOWN, 10, 6))
    (adapter / "adapter_model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"has neither adapter_model.safetensors nor adapter_model.bin"):
        checkpoints.convert(source, tmp_path / "out", adapter=adapter)
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"is a link out of its folder"):
        checkpoints.convert(source, tmp_path / "out", adapter=adapter)


@pytest.mark.parametrize("name", ["gptq shuffled", "awq", "nf4 nested", "int8"])
@pytest.mark.parametrize("word", [None, "f32"])
def test_a_quantised_base_is_dequantised_and_merged(tmp_path, name, word):
    make, scheme = quantised_files.SCHEMES[name]
    weight = np.random.default_rng(2).normal(size=(32, 48))
    packed, exact = make(weight)
    tensors = {f"{DOWN}.{ending}": array for ending, array in packed.items()}
    tensors["model.norm.weight"] = np.float16([1.5, 2.5, -3])
    source = tmp_path / "base"
    source.mkdir()
    safetensors.numpy.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps({"quantization_config": scheme} if scheme else {}))
    lora = matrices(DOWN, 48, 32)
    adapter = adapter_files.save(tmp_path / "adapter", lora)
    target = tmp_path / "out"
    checkpoints.convert(source, target, to_layout="same", adapter=adapter, dequantize=True, dtype=word)
    assert checkpoints.verify(source, target, adapter=adapter).passed
    found = checkpoints.read(target)
    assert found.keys() == {f"{DOWN}.weight", "model.norm.weight"}
    wanted = exact.astype(np.float32) + product(lora, DOWN).astype(np.float32)
    kind = np.dtype(np.float32 if word else np.float16)
    assert found[f"{DOWN}.weight"].dtype == kind
    np.testing.assert_allclose(found[f"{DOWN}.weight"], wanted, rtol=0, atol=np.finfo(kind).eps * np.abs(wanted).max())
    assert "quantization_config" not in json.loads((target / "config.json").read_text())


def test_a_base_that_is_not_quantised_is_not_dequantised(tmp_path):
    source, _ = write(tmp_path / "base")
    adapter = adapter_files.save(tmp_path / "adapter", matrices(DOWN, 10, 6))
    with pytest.raises(CheckpointError, match=r"quantised"):
        checkpoints.convert(source, tmp_path / "out", adapter=adapter, dequantize=True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("letter", ["A", "B"])
def test_numbers_that_are_not_finite_are_not_merged(tmp_path, value, letter):
    source, _ = write(tmp_path / "base")
    lora = matrices(DOWN, 10, 6)
    lora[f"{DOWN}.lora_{letter}.weight"][1, 2] = value
    adapter = adapter_files.save(tmp_path / "adapter", lora)
    message = rf"{DOWN}.lora_{letter}.weight holds {value}, which is not a finite number"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.convert(source, tmp_path / "out", to_layout="same", adapter=adapter)
    assert not (tmp_path / "out").exists()
