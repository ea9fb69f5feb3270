"""Shapes that do not fit: each other, a layout with the same names, or the config.json next to them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.planning import make
from attn_bridge.checkpoints.readers import ArraysReader
from attn_bridge.cli.app import run
from attn_bridge.models import dimensions, families, layouts
from attn_bridge.models.fitting import find_misfits
from attn_bridge.models.layouts import LayoutError
from attn_bridge.specs import VARIANTS, LayerNormConfig
from attn_bridge.specs.as_json import as_json, from_json
from parity_tests.support.calls import cover

from ..checkpoint_files import bits, made, tree, write
from ..checkpoints import SIZES, attention, bert, gpt, llama, whole

MAKE = {"hf-gpt2": gpt, "nanogpt": gpt, "hf-bert": bert, "flax-bert": bert, "hf-llama": llama}
WEIGHT = "transformer.h.0.attn.c_attn.weight"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
}
"""Of `checkpoints.llama`, whose norms of queries and keys a Llama does not have."""


def shapes(arrays):
    return {name: array.shape for name, array in arrays.items()}


def checkpoint(name, layers=2):
    layout = layouts.find(name)
    ours = MAKE[name](layers) if name in MAKE else whole(name, layers) if layout.whole else attention("net.att.")
    return layout.from_canonical(ours, **SIZES)


def altered(shape):
    """Return the shape transposed, or with a larger last axis where that changes nothing; two numbers for one."""
    if not shape:
        return (2,)
    return shape[::-1] if shape != shape[::-1] else (*shape[:-1], shape[-1] + 1)


# ---- the shapes of one checkpoint


def of_each_kind(names):
    """Return of the names that differ in numbers alone one, in turn the first and the last."""
    kinds = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "0", name), []).append(name)
    return [alike[-(number % 2)] for number, alike in enumerate(kinds.values())]


@cover.some("keys", ["of each kind", "all"], always=["of each kind"])
@pytest.mark.parametrize("name", layouts.names())
def test_any_altered_tensor_is_refused_by_name(name, keys):
    layout, right = layouts.find(name), shapes(checkpoint(name))
    layout.decode(right, SIZES)
    for key in right if keys == "all" else of_each_kind(right):
        with pytest.raises(LayoutError) as caught:
            layout.decode({**right, key: altered(right[key])}, SIZES)
        assert key in str(caught.value)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_shapes_of_every_variant_fit(variant):
    for example in variant.examples:
        for path in ("", "net.blocks.2."):
            ours = {path + row.rule.torch: row.shape for row in example.config.parameters}
            assert find_misfits(ours, {name: name for name in ours}, is_whole=False) == []
            assert dimensions.axes_of(ours, is_whole=False).keys() == ours.keys()


def test_layers_of_one_model_are_alike():
    ours = llama(3)
    for name, shape in (("fc1", (12, 6)), ("fc2", (12, 6)), ("fc3", (6, 12))):
        ours[f"trf_blocks.1.ff.{name}.weight"] = np.ones(shape, np.float32)
    assert make(ArraysReader(ours)).target_layout == "flax"
    with pytest.raises(
        LayoutError, match=r"^trf_blocks\.1\.ff\.fc1\.weight is \(12, 6\), .* layers would be 12 and 10"
    ):
        make(ArraysReader(ours), target_layout="hf-llama")


def test_heads_must_divide():
    theirs = checkpoint("hf-llama")
    for name in [name for name in theirs if "k_proj" in name or "v_proj" in name]:
        theirs[name] = np.ones((3, 6), np.float32)
    theirs = {name: array for name, array in theirs.items() if "_norm." not in name}
    with pytest.raises(
        LayoutError, match=r"the width of all query heads \(8\) must be a multiple of .* key heads \(3\)"
    ):
        layouts.find("hf-llama").decode(shapes(theirs))


def test_a_transposed_kernel_leaves_no_target(tmp_path, capsys):
    theirs = layouts.find("flax").from_canonical(llama(2))
    name = "trf_blocks.1.ff.fc1.kernel"
    theirs[name] = theirs[name].T.copy()
    source = write(tmp_path / "a.safetensors", theirs)
    before = tree(tmp_path)
    assert run(["convert", str(source), str(tmp_path / "x.npz")]) == 2
    error = capsys.readouterr().err
    assert f"{name} is (10, 6), transposed; flax has (6, 10)" in error
    assert error.count("\n") == 1
    assert tree(tmp_path) == before


# ---- nanoGPT


def test_nanogpt_is_told_from_gpt2_by_its_shapes():
    for name in ("hf-gpt2", "nanogpt"):
        assert layouts.detect(checkpoint(name), "gpt2").name == name
        assert make(ArraysReader(made(name))).source_layout == name


@pytest.mark.parametrize(
    ("name", "asked", "text"),
    [
        (
            "nanogpt",
            "hf-gpt2",
            "(144, 48): a torch Linear, as nanoGPT saves it; hf-gpt2 has (48, 144) (--from nanogpt)",
        ),
        ("hf-gpt2", "nanogpt", "(48, 144): a Conv1D, as transformers saves it; nanogpt has (144, 48) (--from hf-gpt2)"),
    ],
)
@pytest.mark.parametrize("target", ["flax", None])
def test_the_other_form_of_gpt2_is_named(name, asked, text, target):
    theirs = layouts.find(name).from_canonical(gpt(1, width=48))
    with pytest.raises(LayoutError, match=re.escape(f"{WEIGHT} is {text}")):
        make(ArraysReader(theirs), source_layout=asked, target_layout=target or asked)


@pytest.mark.parametrize("width", [6, 8])
def test_nanogpt_has_the_numbers_of_gpt2_transposed(width):
    ours = gpt(2, width=width)
    theirs, hf = (layouts.find(name).from_canonical(ours) for name in ("nanogpt", "hf-gpt2"))
    assert np.array_equal(theirs["lm_head.weight"], theirs["transformer.wte.weight"])
    for name, array in hf.items():
        is_matrix = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        assert np.array_equal(theirs[name], array.T if is_matrix else array)


@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("target", ["flax", "torch", "hf-gpt2"])
def test_nanogpt_goes_to_other_layouts_and_back_bit_for_bit(tmp_path, has_biases, target):
    theirs = {name: array for name, array in made("nanogpt").items() if has_biases or not is_bias(name)}
    source = write(tmp_path / "ckpt.safetensors", theirs)
    assert checkpoints.inspect(source).layout == "nanogpt"
    if target == "hf-gpt2" and not has_biases:
        with pytest.raises(ValueError, match=r"c_attn\.bias"):
            checkpoints.convert(source, tmp_path / "there", to_layout=target)
        return
    there = checkpoints.convert(source, tmp_path / "there", to_layout=target).target
    assert checkpoints.verify(source, there).passed
    back = checkpoints.convert(there, tmp_path / "back.safetensors", to_layout="nanogpt").target
    assert bits(checkpoints.read(back)) == bits(theirs)
    assert checkpoints.inspect(back).layout == "nanogpt"


def is_bias(name):
    return name.endswith(".bias") and not name.endswith(".attn.bias")


def test_a_manifest_decides_where_names_fit_several_layouts(tmp_path):
    source = write(tmp_path / "a.safetensors", made("book"))
    there = checkpoints.convert(source, tmp_path / "b.npz", to_layout="flax").target
    back = checkpoints.convert(there, tmp_path / "book", to_layout="fused-qkv").target
    assert checkpoints.inspect(back).layout == "fused-qkv"
    bare = write(tmp_path / "bare.safetensors", attention("net.att."))
    as_book = checkpoints.convert(bare, tmp_path / "as-book", to_layout="book").target
    assert checkpoints.inspect(as_book).layout == "book"
    (as_book / "attn-bridge.json").unlink()
    assert checkpoints.inspect(as_book).layout == "torch"


def test_names_alone_leave_the_choice_to_the_user():
    with pytest.raises(LayoutError, match=r"^the names fit the layouts hf-gpt2, nanogpt; say which with --from$"):
        layouts.detect(list(checkpoint("nanogpt")))


# ---- config.json


def refused(arrays, config, **options):
    with pytest.raises(LayoutError) as caught:
        make(ArraysReader(arrays), config=config, **options)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "unheard-of"])
@pytest.mark.parametrize("target", ["flax", "hf-llama"])
@pytest.mark.parametrize(
    ("key", "value", "texts"),
    [
        ("vocab_size", 9, ["model.embed_tokens.weight is (11, 6)", "vocab_size of config.json is 9", "to 11"]),
        ("hidden_size", 12, ["(11, 6)", "hidden_size of config.json is 12"]),
        ("intermediate_size", 20, ["mlp.gate_proj.weight is (10, 6)", "intermediate_size of config.json is 20"]),
        ("num_attention_heads", 8, ["self_attn.q_proj.weight is (8, 6)", "num_attention_heads 8", "16", "8"]),
        ("num_key_value_heads", 1, ["self_attn.k_proj.weight is (4, 6)", "num_key_value_heads 1", "2", "4"]),
        ("num_hidden_layers", 3, ["the file has 2 layers", "num_hidden_layers of config.json is 3", "to 2"]),
    ],
)
def test_a_config_of_other_sizes_is_refused(kind, target, key, value, texts):
    theirs = {name: array for name, array in checkpoint("hf-llama").items() if "_norm." not in name}
    config = {**LLAMA, "model_type": kind}
    make(ArraysReader(theirs), config=config, source_layout="hf-llama", target_layout=target)
    said = refused(theirs, {**config, key: value}, source_layout="hf-llama", target_layout=target)
    assert not [text for text in texts if text not in said], said


def test_a_stale_vocabulary_is_refused_by_the_command(tmp_path, capsys):
    source = tmp_path / "hf"
    theirs = {name: array for name, array in checkpoint("hf-llama").items() if "_norm." not in name}
    write(source / "model.safetensors", theirs, {"format": "pt"})
    (source / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 9}))
    assert run(["convert", str(source), str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == (
        "error: model.embed_tokens.weight is (11, 6), but vocab_size of config.json is 9: the number of tokens in the "
        "file is 11; set vocab_size to 11 if the file is right, as after a resize of the vocabulary\n"
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["gpt2", "bert", "attn-bridge-GPTModel"])
def test_configs_of_other_models_are_compared_as_well(kind):
    theirs = bert(2) if kind == "bert" else gpt(2)
    sizes = {
        "gpt2": {"vocab_size": 11, "n_embd": 6, "n_layer": 2, "n_head": 3, "n_positions": 7},
        "bert": {"vocab_size": 11, "hidden_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"intermediate_size": 10, "max_position_embeddings": 9},
        "attn-bridge-GPTModel": {"vocab_size": 11, "context_length": 7, "emb_dim": 6, "n_heads": 2, "n_layers": 2}
        | {"qkv_bias": True},
    }[kind]
    config = {"model_type": kind, **sizes}
    make(ArraysReader(theirs), config=config)
    for key in ("vocab_size", *[key for key in sizes if "layer" in key or "position" in key]):
        said = refused(theirs, {**config, key: sizes[key] + 1})
        assert key in said
        assert str(sizes[key]) in said
    layers = next(key for key in sizes if "layer" in key)
    assert "layers" in refused(theirs, {**config, layers: 4000})
    positions = next(key for key in sizes if "position" in key or "context" in key)
    assert f"{positions} of config.json is 100000000" in refused(theirs, {**config, positions: 10**8})
    heads = next(key for key in sizes if "head" in key)
    assert f"({heads} 4) makes" in refused(theirs, {**config, heads: 4})  # of 6 channels


MELLUM = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 2}
MELLUM |= {"num_key_value_heads": 2, "num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 10}
MELLUM |= {"intermediate_size": 10, "num_experts_per_tok": 2, "model_type": "mellum"}


def test_a_config_beside_another_familys_tensors_is_refused_where_no_key_gives_the_size():
    mellum = {**families.FAMILIES["mellum"].description.defaults, **MELLUM}
    ours = {row.rule.torch: np.zeros(row.shape, np.float32) for row in families.find_whole(mellum).parameters}
    theirs = layouts.find("hf-qwen3-moe").from_canonical(ours)
    make(ArraysReader(theirs), config=mellum)
    olmoe = {key: value for key, value in mellum.items() if key != "head_dim"} | {"model_type": "olmoe"}
    assert families.find_whole(olmoe).blocks  # whose norms of queries and keys are as wide as all heads
    said = refused(theirs, olmoe)
    assert "self_attn.q_norm.weight is (2,), but the olmoe of config.json has (8,) there" in said
    assert said.endswith("it is the config of another model; convert the file with its own")


def test_a_padded_vocabulary_is_only_held_against_a_config():
    theirs = made("nanogpt")
    assert make(ArraysReader(theirs), config={"note": 1}).source_layout == "nanogpt"
    config = {"model_type": "gpt2", "vocab_size": 10, "n_embd": 6, "n_layer": 2, "n_head": 3, "n_positions": 7}
    assert "vocab_size of config.json is 10" in refused(theirs, config)


def test_configs_name_a_norm_without_shift_alone():
    assert as_json(LayerNormConfig(6)) == {"class": "LayerNormConfig", "emb_dim": 6, "eps": 1e-5, "affine": True}
    assert from_json(as_json(LayerNormConfig(6, bias=False))) == LayerNormConfig(6, bias=False)
    assert [row.rule.torch for row in LayerNormConfig(6, bias=False).parameters] == ["scale"]
