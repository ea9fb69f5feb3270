"""Layouts of tunix: names and shapes as its own models have them, and where each element of `transformers` goes.

`goldens/tunix_states.json` has what was read off the library; twins/models/test_tunix.py runs it where it is there.
"""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import WeightsMismatchError, checkpoints
from attn_bridge.cli.app import run
from attn_bridge.models import layouts
from attn_bridge.models.layouts import LayoutError, SettingError
from parity_tests.support.calls import cover
from parity_tests.support.models.tunix_models import CASES, known_states

STATES = known_states()
DTYPES = [np.float32, ml_dtypes.bfloat16]


def theirs(name, dtype=np.float32, seed=0):
    """Return what `transformers` has in the files of a case, and by hand what tunix has of the same numbers."""
    case, random = CASES[name], np.random.default_rng([seed, 7])
    size = case.sizes
    d, f, c = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    n, k = size["num_attention_heads"], size["num_key_value_heads"]
    hf, own = {}, {}

    def draw(key, *shape):
        hf[f"model.{key}" if key != "lm_head.weight" else key] = array = random.normal(size=shape).astype(dtype)
        return array

    own["embedder.input_embedding"] = draw("embed_tokens.weight", size["vocab_size"], d)
    if not size["tie_word_embeddings"]:
        own["lm_head.w"] = draw("lm_head.weight", size["vocab_size"], d).T
    is_gemma, scale = "gemma3" in name, "scale" if "gemma3" in name else "w"
    own[f"final_norm.{scale}"] = draw("norm.weight", d)
    for i in range(size["num_hidden_layers"]):
        layer = f"layers.{i}."
        parts = {}
        for one, heads in (("q", n), ("k", k), ("v", k)):
            by_heads = draw(f"{layer}self_attn.{one}_proj.weight", heads * c, d).reshape(heads, c, d)
            parts[one] = by_heads.transpose(0, 2, 1)  # [heads, in, out]
            if name == "qwen2":
                own[f"{layer}attn.{one}_bias"] = draw(f"{layer}self_attn.{one}_proj.bias", heads * c)
        out = draw(f"{layer}self_attn.o_proj.weight", d, n * c).T.reshape(n, c, d)
        if is_gemma and n == k:
            own[f"{layer}attn.qkv_einsum.w"] = np.stack([parts["q"], parts["k"], parts["v"]])
        elif is_gemma:
            own[f"{layer}attn.q_einsum.w"] = parts["q"]
            own[f"{layer}attn.kv_einsum.w"] = np.stack([parts["k"], parts["v"]])
        else:
            own |= {f"{layer}attn.{one}_proj.w": part.transpose(1, 0, 2) for one, part in parts.items()}
        own[f"{layer}attn.attn_vec_einsum.w" if is_gemma else f"{layer}attn.o_proj.w"] = out
        if is_gemma or name.startswith("qwen3"):
            for one, long in (("q", "query"), ("k", "key")):
                norm = draw(f"{layer}self_attn.{one}_norm.weight", c)
                own[f"{layer}attn.{f'_{long}_norm.scale' if is_gemma else f'{one}_norm.w'}"] = norm
        norms = {"input_layernorm": "input_layernorm.w", "post_attention_layernorm": "post_attention_layernorm.w"}
        if is_gemma:
            norms = {
                "input_layernorm": "pre_attention_norm.scale",
                "post_attention_layernorm": "post_attention_norm.scale",
                "pre_feedforward_layernorm": "pre_ffw_norm.scale",
                "post_feedforward_layernorm": "post_ffw_norm.scale",
            }
        own |= {layer + there: draw(f"{layer}{here}.weight", d) for here, there in norms.items()}
        shapes = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        if name == "qwen3-moe":
            own[f"{layer}mlp.router.kernel"] = draw(f"{layer}mlp.gate.weight", 3, d).T
            for one, shape in shapes.items():
                every = [draw(f"{layer}mlp.experts.{j}.{one}_proj.weight", *shape).T for j in range(3)]
                own[f"{layer}mlp.{one}_proj"] = np.stack(every)
        else:
            for one, shape in shapes.items():
                own[f"{layer}mlp.{one}_proj.kernel"] = draw(f"{layer}mlp.{one}_proj.weight", *shape).T
    return hf, {key: np.ascontiguousarray(array) for key, array in own.items()}


def folder(path, name, arrays, **more):
    """Write a folder as `transformers` has it, or one of tunix's arrays with that config.json beside them."""
    path.mkdir()
    safetensors.numpy.save_file(arrays, path / "model.safetensors", {"format": "pt"})
    case = CASES[name]
    (path / "config.json").write_text(json.dumps({"model_type": case.model_type, **case.sizes, **more}))
    return path


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        assert found[key].tobytes() == array.tobytes(), key


@cover.rotated(("name", "dtype"), list(CASES), DTYPES)
def test_a_model_of_transformers_becomes_tunixs_and_comes_back_bit_for_bit(tmp_path, name, dtype):
    case = CASES[name]
    hf, own = theirs(name, dtype)
    source = folder(tmp_path / "hf", name, hf)
    checkpoints.convert(source, tmp_path / "tunix", to_layout=case.layout)
    found = checkpoints.read(tmp_path / "tunix")
    assert {key: array.shape for key, array in found.items()} == STATES[name]
    assert_same_bits(found, own)
    assert checkpoints.inspect(tmp_path / "tunix").layout == case.layout
    assert (tmp_path / "tunix" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    checkpoints.convert(tmp_path / "tunix", tmp_path / "back", to_layout=case.theirs)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()
    assert checkpoints.verify(source, tmp_path / "tunix").passed
    assert checkpoints.verify(tmp_path / "tunix", tmp_path / "back").passed


@cover.rotated(("name", "ours"), list(CASES), ["torch", "flax"])
def test_tunixs_own_files_become_ours_and_those_of_transformers(tmp_path, name, ours):
    hf, own = theirs(name, seed=1)
    source = folder(tmp_path / "tunix", name, own)
    checkpoints.convert(source, tmp_path / "hf", to_layout=CASES[name].theirs)
    assert_same_bits(checkpoints.read(tmp_path / "hf"), hf)
    checkpoints.convert(source, tmp_path / "ours", to_layout=ours)
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in ("model.safetensors", "config.json"):  # without what is beside them, the config alone says heads
        shutil.copy(tmp_path / "ours" / file, alone / file)
    checkpoints.convert(alone, tmp_path / "again", to_layout=CASES[name].layout)
    assert_same_bits(checkpoints.read(tmp_path / "again"), own)


@pytest.mark.parametrize("name", CASES)
def test_a_state_is_told_by_its_names_alone(name):
    assert layouts.detect(STATES[name]).name == CASES[name].layout
    in_nodes = [f"{key}.value" for key in STATES[name]]
    assert layouts.detect(in_nodes).name == CASES[name].layout
    with pytest.raises(LayoutError, match=r"no tensor has a name that a layout knows|does not know"):
        layouts.detect([*STATES[name], *in_nodes])


def test_a_model_of_another_kind_and_a_part_that_fits_several_are_one_clear_line():
    llama = STATES["llama3"]
    with pytest.raises(LayoutError, match=r"fit tunix-llama3, which is for llama, but config.json says mistral, "):
        layouts.detect(llama, "mistral")
    assert layouts.detect(llama, "attn-bridge-DecoderModel").name == "tunix-llama3"
    assert layouts.find("hf-qwen3").name == "hf-llama"  # not tunix's, which is for the same models
    assert layouts.find("hf-gemma3").name == "hf-gemma"
    part = [key for key in llama if "mlp" not in key]
    assert layouts.detect(part).name == "tunix-llama3"  # the others read these tensors as it does
    assert layouts.detect(part, "qwen3").name == "tunix-qwen3"


@pytest.mark.parametrize(
    ("case", "extra", "message"),
    [
        ("qwen3", "layers.0.attn.q_proj.w_lora_a", "a matrix of LoRA, which the weights don't hold yet"),
        ("gemma3", "layers.1.mlp.up_proj.kernel_lora_b", "a matrix of LoRA, which the weights don't hold yet"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".value"])
def test_what_is_no_part_of_the_weights_is_refused_by_name(case, extra, message, ending):
    names = [f"{key}{ending}" for key in (*STATES[case], extra)]
    with pytest.raises(LayoutError, match=f"^{extra}{ending}: {message}"):
        layouts.detect(names)


@pytest.mark.parametrize("extra", ["vision_encoder.siglip_encoder.pos_embedding", "embedder.mm_input_projection.w"])
@pytest.mark.parametrize("ending", ["", ".value"])
def test_towers_of_multimodal_models_are_left_out(extra, ending):
    names = [f"{key}{ending}" for key in (*STATES["gemma3"], extra)]
    layout = layouts.detect(names)
    assert layout.name == "tunix-gemma3"
    assert list(layout.apart(names)) == [extra + ending]


def test_heads_come_from_the_config_or_have_to_be_said(tmp_path, capsys):
    hf, own = theirs("llama3")
    source = folder(tmp_path / "hf", "llama3", hf)
    (source / "config.json").unlink()
    with pytest.raises(SettingError, match=r"W_key\.weight \(12, 16\): 12 = h x c needs --set num_kv_heads=N$"):
        checkpoints.convert(source, tmp_path / "x", to_layout="tunix-llama3")
    arguments = ["convert", str(source), str(tmp_path / "x"), "--to", "tunix-llama3", "--set", "num_heads=4"]
    assert run(arguments) == 2
    assert "--set num_kv_heads=N" in capsys.readouterr().err
    assert run([*arguments, "--set", "num_kv_heads=2"]) == 0
    assert_same_bits(checkpoints.read(tmp_path / "x"), own)
    assert run([*arguments[:2], str(tmp_path / "y"), *arguments[3:], "--set", "num_kv_heads=5"]) == 2
    assert "12 is not h=5 x c" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()


def test_a_config_of_a_multimodal_model_says_the_heads_of_its_text(tmp_path):
    hf, own = theirs("gemma3")
    inside = {key.replace("model.", "language_model.model.", 1): array for key, array in hf.items()}
    source = folder(tmp_path / "hf", "gemma3", inside)
    (source / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": CASES["gemma3"].sizes}))
    checkpoints.convert(source, tmp_path / "tunix", to_layout="tunix-gemma3")
    assert_same_bits(checkpoints.read(tmp_path / "tunix"), own)
    checkpoints.convert(tmp_path / "tunix", tmp_path / "back", to_layout="hf-gemma")
    assert_same_bits(checkpoints.read(tmp_path / "back"), inside)


@cover.rotated(
    ("container", "name"),
    ["tunix", "tunix.npz", "tunix.msgpack", "tunix.orbax"],
    ["llama3-tied", "qwen3-moe", "gemma3-own-keys"],
)
def test_names_of_variables_that_are_nodes_of_their_own(tmp_path, container, name):
    hf, own = theirs(name, np.float32)
    case, source = CASES[name], folder(tmp_path / "hf", name, hf)
    checkpoints.convert(source, tmp_path / container, to_layout=case.layout, settings={"value": 1})
    found = checkpoints.read(tmp_path / container)
    assert_same_bits(found, {f"{key}.value": array for key, array in own.items()})
    assert checkpoints.inspect(tmp_path / container).layout == case.layout
    checkpoints.convert(tmp_path / container, tmp_path / "back", to_layout=case.theirs)
    assert_same_bits(checkpoints.read(tmp_path / "back"), hf)
    safetensors.numpy.save_file(found, tmp_path / "alone.safetensors")
    checkpoints.convert(tmp_path / "alone.safetensors", tmp_path / "ours", to_layout="flax")
    checkpoints.convert(tmp_path / "ours", tmp_path / "again.npz", to_layout=case.layout)
    assert_same_bits(checkpoints.read(tmp_path / "again.npz"), found)  # as they were, without --set


def test_our_own_state_may_be_of_nodes_as_well():
    canonical = {"att.W_query.weight": np.float32([[1, 2], [3, 4]]), "att.out_proj.bias": np.float32([5, 6])}
    flax = layouts.find("flax")
    found = flax.from_canonical(canonical, value=1)
    assert_same_bits(
        found, {"att.W_query.kernel.value": np.float32([[1, 3], [2, 4]]), "att.out_proj.bias.value": np.float32([5, 6])}
    )
    assert layouts.detect(found) is flax
    assert_same_bits(flax.to_canonical(found), canonical)


def test_what_tunix_has_no_place_for_is_refused(tmp_path, capsys):
    hf, _ = theirs("llama3")
    biases = {key.replace("weight", "bias"): array[:, 0] for key, array in hf.items() if "self_attn" in key}
    source = folder(tmp_path / "biased", "llama3", {**hf, **biases}, attention_bias=True)
    with pytest.raises(WeightsMismatchError, match=r"unexpected: trf_blocks\.0\.att\.W_key\.bias, "):
        checkpoints.convert(source, tmp_path / "x", to_layout="tunix-llama3")
    hf, _ = theirs("gemma3")
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"] + 1
    source = folder(tmp_path / "untied", "gemma3", hf, tie_word_embeddings=False)
    assert run(["convert", str(source), str(tmp_path / "x"), "--to", "tunix-gemma3"]) == 2
    assert "it can't be tied to it; tunix-gemma3 has no other place for it" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_tensor_that_is_not_there_is_named_as_the_checkpoint_has_it(tmp_path):
    _, own = theirs("gemma3-own-keys")
    arrays = {f"{key}.value": array for key, array in own.items() if "layers.3.attn.qkv" not in key}
    source = folder(tmp_path / "tunix", "gemma3-own-keys", arrays)
    with pytest.raises(WeightsMismatchError, match=r"layers\.3\.attn\.qkv_einsum\.w\.value"):
        checkpoints.convert(source, tmp_path / "x", from_layout="tunix-gemma3", to_layout="hf-gemma")
