"""Folders as `transformers` writes them to `gemma` and MaxText and back: every bit, names and shapes, what is refused.

Names and shapes of ``gemma`` were read off its own modules, version 3.3.0, and those of MaxText off its converter's
source of August 2026 (see `attn_bridge.models.libraries`).
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.models import layouts
from attn_bridge.models.layouts import LayoutError, SettingError
from attn_bridge.weights.placements import Change
from parity_tests.support.calls import cover

from ..checkpoint_files import MEMORY

WIDTH, HIDDEN, WORDS, HEADS, HEAD = 24, 40, 37, 4, 6
LLAMA31 = {"rope_type": "llama3", "factor": 8.0}

DTYPES = ["bfloat16", "float32"]
KINDS = {
    "llama": ("hf-llama", {}),
    "llama-3.1": ("hf-llama", {"model_type": "llama", "rope_scaling": LLAMA31}),
    "mistral": ("hf-llama", {}),
    "qwen2": ("hf-llama", {"biases": True}),
    "qwen3": ("hf-llama", {"norms": True}),
    "qwen3-tied": ("hf-llama", {"model_type": "qwen3", "norms": True, "tie_word_embeddings": True}),
    "mixtral": ("hf-mixtral", {"experts": 3}),
    "qwen3_moe": ("hf-qwen3-moe", {"norms": True, "experts": 3}),
    "gemma2": ("hf-gemma", {"gemma": True, "tie_word_embeddings": True, "query_pre_attn_scalar": 7}),
    "gemma3_text": ("hf-gemma", {"gemma": True, "norms": True, "tie_word_embeddings": True}),
}
SCALED = {"llama", "llama-3.1", "mistral", "mixtral", "gemma2", "gemma3_text"}
"""Whose numbers are others in MaxText."""


def model(kind, layers=4, dtype="bfloat16", kv_heads=2, seed=0, times=1):
    """Return the tensors of a model as `transformers` names them, and its config.json."""
    layout, more = KINDS[kind]
    width, hidden, words, head = (times * size for size in (WIDTH, HIDDEN, WORDS, HEAD))
    random = np.random.default_rng([seed, layers])

    def draw(*shape):
        if times > 1:  # of a hundred million numbers only their places are of interest
            return random.random(shape, np.float32).astype(np.dtype(dtype), copy=False)
        return (0.3 * random.normal(size=shape)).astype(np.dtype(dtype))

    found = {"model.embed_tokens.weight": draw(words, width), "model.norm.weight": draw(width)}
    if not more.get("tie_word_embeddings"):
        found["lm_head.weight"] = draw(words, width)
    for layer in range(layers):
        front = f"model.layers.{layer}."
        for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            found[f"{front}self_attn.{name}_proj.weight"] = draw(heads * head, width)
            if more.get("biases"):
                found[f"{front}self_attn.{name}_proj.bias"] = draw(heads * head)
            if more.get("norms") and name != "v":
                found[f"{front}self_attn.{name}_norm.weight"] = draw(head)
        found[f"{front}self_attn.o_proj.weight"] = draw(width, HEADS * head)
        between = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if more.get("gemma") else ()
        for name in ("input_layernorm", "post_attention_layernorm", *between):
            found[f"{front}{name}.weight"] = draw(width)
        names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        block = "block_sparse_moe" if kind == "mixtral" else "mlp"
        for expert in range(more.get("experts", 0)) or [""]:
            place = f"{front}{block}.experts.{expert}." if more.get("experts") else f"{front}{block}."
            for name, shape in zip(names, [(hidden, width), (hidden, width), (width, hidden)], strict=True):
                found[f"{place}{name}.weight"] = draw(*shape)
        if more.get("experts"):
            found[f"{front}{block}.gate.weight"] = draw(more["experts"], width)
    config = {
        "model_type": kind,
        "hidden_size": width,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "num_hidden_layers": layers,
        **{key: value for key, value in more.items() if key not in ("biases", "norms", "experts", "gemma")},
    }
    return layout, found, config


def folder(path, arrays, config=None):
    path.mkdir()
    safetensors.numpy.save_file(arrays, path / "model.safetensors", {"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def same(one, two):
    """Whether two folders hold the same weights and config, byte for byte."""
    files = ("model.safetensors", "config.json")
    return all((one / file).read_bytes() == (two / file).read_bytes() for file in files)


def bits(path):
    return {name: (array.dtype.name, array.tobytes()) for name, array in checkpoints.read(path).items()}


@cover.rotated(("kind", "case"), list(KINDS), list(itertools.product([(0, "x"), (1, "x"), (1, "x.npz")], DTYPES)))
def test_a_folder_goes_to_maxtext_and_back_byte_for_byte(tmp_path, kind, case):
    (scan, target), dtype = case
    layout, arrays, config = model(kind, 8, dtype)
    source = folder(tmp_path / "hf", arrays, config)
    there = checkpoints.convert(source, tmp_path / target, to_layout="maxtext", settings={"scan": scan}).target
    assert checkpoints.inspect(there).layout == "maxtext"
    assert checkpoints.verify(source, there).passed
    names = checkpoints.read(there).keys()
    assert any(".decoder.layers." in name for name in names) == bool(scan)
    assert any(".decoder.layers_0." in name for name in names) == (not scan)
    if target != "x":
        shutil.copy(source / "config.json", tmp_path / "config.json")
    back = checkpoints.convert(there, tmp_path / "back", to_layout=layout).target
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    if target == "x":
        assert same(back, source)
        again = checkpoints.convert(back, tmp_path / "again", to_layout="maxtext", settings={"scan": scan}).target
        assert (again / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()


DEPTHS = [1, 5, 6, 7, 12, 14]


# gemma3_text has what is left of a multiple of six apart; the others have a stack of all, from 10 on of two digits.
@cover.some(
    "case",
    list(itertools.product(["gemma3_text", "llama", "qwen3_moe"], DEPTHS)),
    always=[*(("gemma3_text", layers) for layers in DEPTHS), ("llama", 1), ("llama", 12), ("qwen3_moe", 12)],
)
def test_stacks_of_any_depth_come_back(tmp_path, case):
    kind, layers = case
    layout, arrays, config = model(kind, layers)
    source = folder(tmp_path / "hf", arrays, config)
    there = checkpoints.convert(source, tmp_path / "x", to_layout="maxtext", settings={"scan": 1}).target
    found = checkpoints.read(there)
    front = "params.params.decoder."
    if kind == "gemma3_text":
        for place in range(min(layers, 6) if layers >= 6 else 0):
            assert found[f"{front}layers.layers_{place}.mlp.wi_0.kernel"].shape == (WIDTH, layers // 6, HIDDEN)
        assert f"{front}layers_remainder.layers_{layers % 6}.mlp.wi_0.kernel" not in found
        for place in range(layers % 6):
            name = f"{front}layers_remainder.layers_{place}.mlp.wi_0.kernel"
            theirs = arrays[f"model.layers.{layers - layers % 6 + place}.mlp.gate_proj.weight"]
            assert found[name].tobytes() == theirs.T.tobytes()
    elif kind == "qwen3_moe":
        stack = found[f"{front}layers.moe_block.wo"]
        assert stack.shape == (3, layers, HIDDEN, WIDTH)
        for layer in range(layers):
            down = arrays[f"model.layers.{layer}.mlp.experts.2.down_proj.weight"]
            assert stack[2, layer].tobytes() == down.T.tobytes()
    assert same(checkpoints.convert(there, tmp_path / "back", to_layout=layout).target, source)


@pytest.mark.parametrize("kind", ["llama", "llama-3.1", "gemma2", "gemma3_text", "qwen3"])
def test_numbers_are_where_maxtext_has_them_and_scaled_as_it_has_them(tmp_path, kind):
    _, arrays, config = model(kind, dtype="float32")
    found = checkpoints.read(
        checkpoints.convert(
            folder(tmp_path / "hf", arrays, config), tmp_path / "x", to_layout="maxtext", settings={"scan": 1}
        ).target
    )
    front, layer, place = "params.params.decoder.layers.", 3, 3
    suffix = ""
    if kind == "gemma2":
        suffix, place = "_global", 1
    elif kind == "gemma3_text":
        front, place = "params.params.decoder.layers_remainder.layers_3.", None
    at = (slice(None),) if place is None else (slice(None), place)
    theirs = arrays[f"model.layers.{layer}.self_attn.q_proj.weight"].T.reshape(WIDTH, HEADS, HEAD)
    if kind == "llama-3.1":  # neighbours turn, not halves
        theirs = theirs[..., [0, 3, 1, 4, 2, 5]]
    scale = {"llama": HEAD, "llama-3.1": HEAD, "gemma2": 7}.get(kind, 1) ** -0.5
    query = found[f"{front}self_attention{suffix}.query.kernel"][at]
    assert query.tobytes() == (theirs * np.float32(scale)).tobytes()
    gemma = kind.startswith("gemma")
    norm = "pre_self_attention_norm" if gemma else "pre_self_attention_layer_norm"
    own = arrays[f"model.layers.{layer}.input_layernorm.weight"]
    assert found[f"{front}{norm}{suffix}.scale"][at].tobytes() == (own + np.float32(gemma)).tobytes()
    factor = {"gemma2": np.float32(WIDTH**0.5), "gemma3_text": np.float32(ml_dtypes.bfloat16(WIDTH**0.5))}.get(kind, 1)
    table = found["params.params.token_embedder.embedding"]
    assert table.tobytes() == (arrays["model.embed_tokens.weight"] * np.float32(factor)).tobytes()
    out = found[f"{front}self_attention{suffix}.out.kernel"]
    out = out if place is None else out[:, place]
    expected = arrays[f"model.layers.{layer}.self_attn.o_proj.weight"].T.reshape(HEADS, HEAD, WIDTH)
    assert out.tobytes() == expected.tobytes()


def test_the_way_back_without_what_was_kept_is_within_a_rounding(tmp_path):
    for kind in KINDS:
        layout, arrays, config = model(kind)
        there = checkpoints.convert(
            folder(tmp_path / f"hf-{kind}", arrays, config), tmp_path / f"x-{kind}", to_layout="maxtext"
        ).target
        (there / "attn-bridge.json").unlink()
        found = checkpoints.read(checkpoints.convert(there, tmp_path / f"back-{kind}", to_layout=layout).target)
        assert found.keys() == arrays.keys()
        others = [name for name, array in arrays.items() if found[name].tobytes() != array.tobytes()]
        assert bool(others) == (kind in SCALED)
        for name in others:
            one, two = found[name].astype(np.float64), arrays[name].astype(np.float64)
            # 8 bits of a product twice rounded, or of a sum near 1
            assert np.abs(one - two).max() <= 2**-7 * (np.abs(two).max() + ("norm" in name))


def test_numbers_trained_on_are_not_those_that_were_kept(tmp_path):
    layout, arrays, config = model("llama")
    source = folder(tmp_path / "hf", arrays, config)
    there = checkpoints.convert(source, tmp_path / "x", to_layout="maxtext", settings={"scan": 1}).target
    trained = checkpoints.read(there)
    query = "params.params.decoder.layers.self_attention.query.kernel"
    trained[query][:, 2] *= 2
    safetensors.numpy.save_file(trained, there / "model.safetensors")
    found = checkpoints.read(checkpoints.convert(there, tmp_path / "back", to_layout=layout).target)
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        times = 2 if layer == 2 else 1
        one, two = found[name].astype(np.float32), arrays[name].astype(np.float32) * times
        assert (np.abs(one - two) <= 2**-7 * np.abs(two)).all()
        assert (found[name].tobytes() == arrays[name].tobytes()) == (layer != 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_nans_signed_zeros_and_tiny_numbers_come_back_from_scaled_ones(tmp_path, dtype):
    layout, arrays, config = model("gemma2", dtype=dtype)
    bits = np.dtype(dtype).itemsize
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight"):
        view = arrays[name].reshape(-1).view(f"u{bits}")
        infinite = np.array([np.inf], dtype).view(f"u{bits}")[0]
        view[:6] = [0, 1 << (8 * bits - 1), 1, 3, infinite, infinite + 1]
    source = folder(tmp_path / "hf", arrays, config)
    there = checkpoints.convert(source, tmp_path / "x", to_layout="maxtext").target
    assert same(checkpoints.convert(there, tmp_path / "back", to_layout=layout).target, source)


@pytest.mark.parametrize("kind", ["llama-3.1", "gemma2"])
def test_other_containers_and_layouts_between_lose_nothing(tmp_path, kind):
    layout, arrays, config = model(kind)
    source = folder(tmp_path / "hf", arrays, config)
    there = checkpoints.convert(source, tmp_path / "x", to_layout="maxtext", settings={"scan": 1}).target
    flax = checkpoints.convert(there, tmp_path / "flax").target
    straight = checkpoints.convert(source, tmp_path / "straight").target
    assert bits(flax) == bits(straight)
    assert same(checkpoints.convert(flax, tmp_path / "back", to_layout=layout).target, source)
    shutil.copy(source / "config.json", tmp_path / "config.json")
    packed = checkpoints.convert(there, tmp_path / "x.npz", to_layout="same").target
    assert bits(checkpoints.convert(packed, tmp_path / "unpacked", to_layout=layout).target) == bits(source)


@pytest.mark.parametrize("kind", ["llama-3.1", "gemma3_text"])
def test_a_checkpoint_of_maxtext_comes_back_from_flax(tmp_path, kind):
    arrays, config = model(kind)[1:]
    source = folder(tmp_path / "hf", arrays, config)
    there = checkpoints.convert(source, tmp_path / "x", to_layout="maxtext", settings={"scan": 1}).target
    for file in ("attn-bridge.json", "attn-bridge.kept"):
        (there / file).unlink()
    flax = checkpoints.convert(there, tmp_path / "flax").target
    assert checkpoints.verify(there, flax).passed
    back = checkpoints.convert(flax, tmp_path / "back", to_layout="maxtext").target
    assert (back / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()


def test_a_cast_on_the_way_is_one_rounding_and_comes_back(tmp_path):
    layout, arrays, config = model("llama")
    source = folder(tmp_path / "hf", arrays, {**config, "dtype": "bfloat16"})
    there = checkpoints.convert(source, tmp_path / "x", to_layout="maxtext", dtype="f32").target
    query = "model.layers.0.self_attn.q_proj.weight"
    expected = arrays[query].astype(np.float32).T.reshape(WIDTH, HEADS, HEAD) * np.float32(HEAD**-0.5)
    found = checkpoints.read(there)["params.params.decoder.layers_0.self_attention.query.kernel"]
    assert found.tobytes() == expected.tobytes()
    back = checkpoints.convert(there, tmp_path / "back", to_layout=layout, dtype="bf16").target
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_what_is_kept_is_said_and_checked(tmp_path):
    layout, arrays, config = model("llama")
    source = folder(tmp_path / "hf", arrays, config)
    (note,) = checkpoints.plan(source, tmp_path / "x", to_layout="maxtext").notes
    query = "params.params.decoder.layers_{}.self_attention.query.kernel"
    assert note.startswith(f"{query.format(0)} and 3 more hold numbers that are scaled or shifted, and so rounded;")
    there = checkpoints.convert(source, tmp_path / "x", to_layout="maxtext").target
    (note,) = checkpoints.plan(there, tmp_path / "back", to_layout=layout).notes
    assert note.startswith("model.layers.0.self_attn.q_proj.weight and 3 more take the numbers that were kept aside,")
    home = checkpoints.convert(there, tmp_path / "home", to_layout=layout).target
    assert checkpoints.verify(source, home).passed
    kept = checkpoints.read(shutil.copy(there / "attn-bridge.kept", tmp_path / "kept.safetensors"))
    assert kept.keys() == {f"numbers-plain/trf_blocks.{layer}.att.W_query.weight" for layer in range(4)}
    for layer in range(4):
        own = arrays[f"model.layers.{layer}.self_attn.q_proj.weight"]
        assert kept[f"numbers-plain/trf_blocks.{layer}.att.W_query.weight"].tobytes() == own.tobytes()
    data = bytearray((there / "attn-bridge.kept").read_bytes())
    data[-1] ^= 1
    (there / "attn-bridge.kept").write_bytes(data)
    assert not checkpoints.verify(None, there).passed
    with pytest.raises(CheckpointError, match="which was kept aside, has other bytes"):
        checkpoints.convert(there, tmp_path / "back", to_layout=layout)


@cover.rotated(("kind", "back"), ["llama", "gemma2"], [True, False], always=["gemma2"])
def test_stacks_stay_within_a_bound_on_memory(tmp_path, kind, back):
    layers, times, most = 6, 48, 200 << 20
    layout, arrays, config = model(kind, layers, "float32", times=times)
    source = folder(tmp_path / "hf", arrays, config)
    largest = layers // (1 + (kind == "gemma2")) * times**2 * WIDTH * HIDDEN * 4  # a stack of feed-forwards
    assert largest > (most - (128 << 20)) / 3
    there = checkpoints.convert(
        source, tmp_path / "x", to_layout="maxtext", settings={"scan": 1}, max_memory=most if not back else None
    ).target
    del arrays
    command = "checkpoints.convert(sys.argv[1], sys.argv[2], max_memory=int(sys.argv[3]) or None"
    options = f', to_layout="{layout}"' if back else ', to_layout="maxtext", settings={"scan": 1}'
    code = MEMORY.replace(command, command + options)
    assert code != MEMORY
    ends = (there, tmp_path / "back") if back else (source, tmp_path / "again")
    done = subprocess.run([sys.executable, "-c", code, *map(str, ends), str(most)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < most - (64 << 20)
    expected = source if back else there
    assert (ends[1] / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "qwen3_moe"])
def test_layers_stacked_along_another_axis_are_refused(tmp_path, kind):
    layout, arrays, config = model(kind, 12)
    source = folder(tmp_path / "hf", arrays, config)
    there = checkpoints.convert(source, tmp_path / "x", to_layout="maxtext", settings={"scan": 1}).target
    wrong = checkpoints.read(there)
    for name, array in wrong.items():
        if ".decoder.layers." in name:
            wrong[name] = np.ascontiguousarray(np.moveaxis(array, 1, 0))
    other = folder(tmp_path / "wrong", wrong, config)
    with pytest.raises(
        LayoutError, match=r"must be as wide as the embeddings \(24\), and its second must count the la"
    ):
        checkpoints.convert(other, tmp_path / "back", to_layout=layout)
    name = "params.params.decoder.decoder_norm.scale"
    part = checkpoints.read(there)
    part[next(name for name in part if name.endswith((".wi_0.kernel", ".wi_0")))] = part[name]
    with pytest.raises(LayoutError):
        checkpoints.convert(folder(tmp_path / "part", part, config), tmp_path / "back", to_layout=layout)
    assert not (tmp_path / "back").exists()


REFUSED = {
    "scalar": ("llama", None, {"head_dim": 6}, SettingError, "--set interleaved=1 for Llama 3.1 and later"),
    "head": ("llama", None, {"interleaved": 0}, SettingError, "depends on the width of a head: --set head_dim=N"),
    "neighbours": ("qwen3", None, {"interleaved": 1}, LayoutError, "is for Llama 3.1 and later alone"),
    "granite": (
        "llama",
        {"model_type": "granite"},
        {},
        LayoutError,
        "config.json says 'granite'; maxtext is for llama,",
    ),
    "biases": ("qwen2", {"model_type": "llama"}, {"head_dim": 0}, LayoutError, "must be a whole number of at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_maxtext_can_not_be_told_is_refused_by_name(tmp_path, case):
    kind, config, settings, error, message = REFUSED[case]
    arrays = model(kind)[1]
    source = folder(tmp_path / "hf", arrays, config)
    with pytest.raises(error, match=r"^.*$") as caught:
        checkpoints.convert(source, tmp_path / "x", to_layout="maxtext", settings=settings)
    assert message in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_an_odd_number_of_gemma_2s_layers_makes_no_pairs(tmp_path):
    _, arrays, config = model("gemma2", 3)
    with pytest.raises(LayoutError, match="MaxText holds Gemma 2 as pairs of layers, which 3 layers are not"):
        checkpoints.convert(folder(tmp_path / "hf", arrays, config), tmp_path / "x", to_layout="maxtext")


FOREIGN = {
    "opt_state.0.mu.params.decoder.decoder_norm.scale": "an optimizer's state",
    "params.params.decoder.layers_0.self_attention.qkv_proj.kernel": "fused_qkv",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_part_of_the_model_is_refused_by_name(tmp_path, name):
    _, arrays, config = model("llama")
    there = checkpoints.convert(folder(tmp_path / "hf", arrays, config), tmp_path / "x", to_layout="maxtext").target
    more = {**checkpoints.read(there), name: np.ones(3, np.float32)}
    with pytest.raises(LayoutError) as caught:
        checkpoints.convert(folder(tmp_path / "more", more, config), tmp_path / "back")
    assert str(caught.value).startswith(f"{name}: ")
    assert FOREIGN[name] in str(caught.value)


def test_integers_are_not_scaled(tmp_path):
    _, arrays, config = model("llama")
    whole = {name: np.ones(array.shape, np.int8) for name, array in arrays.items()}
    with pytest.raises(CheckpointError, match=r"q_proj\.weight \(int8\) would have to be scaled"):
        checkpoints.convert(folder(tmp_path / "hf", whole, config), tmp_path / "x", to_layout="maxtext")
    _, arrays, config = model("qwen3")
    whole = {name: np.ones(array.shape, np.int8) for name, array in arrays.items()}
    checkpoints.convert(folder(tmp_path / "qwen", whole, config), tmp_path / "x", to_layout="maxtext")


# ---- gemma

SHAPES = {
    "embedder.input_embedding": (WORDS, WIDTH),
    "final_norm.scale": (WIDTH,),
    "layer_0.attn.attn_vec_einsum.w": (HEADS, HEAD, WIDTH),
    "layer_0.mlp.linear": (HIDDEN, WIDTH),
    **{f"layer_0.{name}_norm.scale": (WIDTH,) for name in ("pre_attention", "post_attention", "pre_ffw", "post_ffw")},
}
OF_KIND = {
    "gemma2": {},
    "gemma3_text": {"layer_0.attn._query_norm.scale": (HEAD,), "layer_0.attn._key_norm.scale": (HEAD,)},
}
OF_HEADS = {
    kv_heads: {
        "layer_0.attn.q_einsum.w": (HEADS, WIDTH, HEAD),
        "layer_0.attn.kv_einsum.w": (2, kv_heads, WIDTH, HEAD),
    }
    for kv_heads in (1, 2)
} | {4: {"layer_0.attn.qkv_einsum.w": (3, HEADS, WIDTH, HEAD)}}
OF_WAY = {0: {"layer_0.mlp.gating_einsum": (2, WIDTH, HIDDEN)}, 1: {"layer_0.mlp.gating_einsum": (2, HIDDEN, WIDTH)}}


@cover.rotated(
    ("kind", "kv_heads", "case"), list(itertools.product(OF_KIND, [1, 2, 4])), list(itertools.product([0, 1], DTYPES))
)
def test_a_folder_goes_to_gemma_and_back_byte_for_byte(tmp_path, kind, kv_heads, case):
    way, dtype = case
    layout, arrays, config = model(kind, 2, dtype, kv_heads)
    source = folder(tmp_path / "hf", arrays, config)
    expected = {**SHAPES, **OF_KIND[kind], **OF_HEADS[kv_heads], **OF_WAY[way]}
    for target, settings in (("x", {}), ("x.msgpack", {"prefix": "params."}), ("flat", {"flat": 1})):
        settings = {"transposed": way, **settings}
        there = checkpoints.convert(source, tmp_path / target, to_layout="gemma-linen", settings=settings).target
        assert checkpoints.inspect(there).layout == "gemma-linen"
        assert checkpoints.verify(source, there).passed
        found = {name: array.shape for name, array in checkpoints.read(there).items() if "layer_1" not in name}
        if target == "flat":
            names = {name: name.replace("mlp.linear", "mlp.linear.w") for name in expected}
            names = {name: new.replace("gating_einsum", "gating_einsum.w") for name, new in names.items()}
            stems = {name: new.rpartition(".") for name, new in names.items()}
            flat = {name: f"transformer/{stem.replace('.', '/')}.{leaf}" for name, (stem, _, leaf) in stems.items()}
            assert found == {flat[name]: shape for name, shape in expected.items()}
        else:
            assert found == {settings.get("prefix", "") + name: shape for name, shape in expected.items()}
        back = checkpoints.convert(there, tmp_path / f"{target}-back", to_layout=layout).target
        assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
        if target != "x.msgpack":
            assert same(back, source)
            flax = checkpoints.convert(there, tmp_path / f"{target}-flax").target
            again = checkpoints.convert(flax, tmp_path / f"{target}-again", to_layout="gemma-linen").target
            assert (again / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()


def test_elements_are_where_gemma_has_them(tmp_path):
    _, arrays, config = model("gemma3_text", 2, "float32")
    there = checkpoints.convert(folder(tmp_path / "hf", arrays, config), tmp_path / "x", to_layout="gemma-linen").target
    found, front = checkpoints.read(there), "model.layers.1."
    attn = {name: arrays[f"{front}self_attn.{name}_proj.weight"] for name in "qkvo"}
    for name, heads in (("q", found["layer_1.attn.q_einsum.w"]), ("k", found["layer_1.attn.kv_einsum.w"][0])):
        for head in range(len(heads)):
            np.testing.assert_array_equal(heads[head], attn[name][head * HEAD : (head + 1) * HEAD].T)
    np.testing.assert_array_equal(found["layer_1.attn.kv_einsum.w"][1, 1], attn["v"][HEAD:].T)
    np.testing.assert_array_equal(found["layer_1.attn.attn_vec_einsum.w"][2], attn["o"][:, 2 * HEAD : 3 * HEAD].T)
    np.testing.assert_array_equal(found["layer_1.mlp.gating_einsum"][0], arrays[f"{front}mlp.gate_proj.weight"])
    np.testing.assert_array_equal(found["layer_1.mlp.gating_einsum"][1], arrays[f"{front}mlp.up_proj.weight"])
    np.testing.assert_array_equal(
        found["layer_1.pre_ffw_norm.scale"], arrays[f"{front}pre_feedforward_layernorm.weight"]
    )


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("gemma-linen", "vision_encoder.siglip_encoder.pos_embedding"),
        ("gemma-linen", "embedder.mm_input_projection.w"),
        ("gemma-linen", "SigLiPFromPatches_0/siglip_encoder.pos_embedding"),
        ("maxtext", "params.params.vision_encoder.Gemma3VisionEncoderLayer_0.pos_embedding"),
    ],
)
def test_towers_of_multimodal_models_are_left_out_and_named(tmp_path, layout, name):
    _, arrays, config = model("gemma3_text", 2)
    there = checkpoints.convert(folder(tmp_path / "hf", arrays, config), tmp_path / "x", to_layout=layout).target
    alone = folder(tmp_path / "alone", checkpoints.read(there), config)
    wanted = checkpoints.read(checkpoints.convert(alone, tmp_path / "wanted", to_layout="hf-gemma").target)
    source = folder(tmp_path / "more", {**checkpoints.read(there), name: np.ones(3, np.float32)}, config)
    planned = checkpoints.plan(source, tmp_path / "back", to_layout="hf-gemma")
    assert f"left out, as it is no part of the text model, which alone is converted: {name}" in planned.notes
    for from_layout in (None, layout):
        back = tmp_path / f"back {from_layout}"
        checkpoints.convert(source, back, from_layout=from_layout, to_layout="hf-gemma")
        assert checkpoints.verify(source, back, from_layout=from_layout).passed
        found = checkpoints.read(back)
        assert {key: array.tobytes() for key, array in found.items()} == {
            key: array.tobytes() for key, array in wanted.items()
        }


def test_stacked_layers_of_gemma_are_refused_by_name(tmp_path):
    name = "transformer/stacked_layers/attention_type_0/attn/q_einsum.w"
    _, arrays, config = model("gemma3_text", 2)
    there = checkpoints.convert(folder(tmp_path / "hf", arrays, config), tmp_path / "x", to_layout="gemma-linen").target
    more = {**checkpoints.read(there), name: np.ones(3, np.float32)}
    with pytest.raises(LayoutError) as caught:
        checkpoints.convert(folder(tmp_path / "more", more, config), tmp_path / "back", from_layout="gemma-linen")
    assert str(caught.value).startswith(f"{name}: ")
    assert "load_params" in str(caught.value)


def test_a_llama_is_no_gemma(tmp_path):
    arrays, config = model("llama")[1:]
    with pytest.raises(ValueError, match=r"post_(norm1|attention_norm)"):
        checkpoints.convert(folder(tmp_path / "hf", arrays, config), tmp_path / "x", to_layout="gemma-linen")


# ---- the language of rows


@pytest.mark.parametrize("change", [Change(times=6**-0.5), Change(plus=1.0), Change(times=0.25)])
def test_a_row_says_how_numbers_are_made_both_ways(change):
    row = layouts.Row("all", ("a.{i}", "b.{i}"), "o i -> i part l o", part="part", stack="l", change=change)
    layout = layouts.Layout("x", "x", [row], ours=False)
    random = np.random.default_rng(0)
    ours = {f"{name}.{i}": random.normal(size=(3, 4)) for name in "ab" for i in range(2)}
    theirs = layout.from_canonical(ours)
    assert theirs["all"].shape == (4, 2, 2, 3)
    np.testing.assert_array_equal(theirs["all"][:, 1, 0].T, ours["b.0"] * change.times + change.plus)
    back = layout.to_canonical(theirs)
    for name, array in ours.items():
        np.testing.assert_allclose(back[name], array, rtol=0, atol=0 if change.times == 0.25 else 1e-15)
    assert str(change) in ("times 0.408248", "plus 1", "times 0.25")
