"""Files of other programs, and parts of checkpoints: refused in one line with a remedy, never converted in part."""

from __future__ import annotations

import json
import struct
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import WeightsMismatchError, checkpoints
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.models import layouts
from attn_bridge.weights.placements import LayoutError
from parity_tests.fuzz.samples import write

from ..checkpoint_files import made
from ..checkpoints import SIZES

ARRAYS = {"x": np.ones(3, np.float32)}


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("ggml.bin", struct.pack("<I", 0x67676D6C) + bytes(40), "older than GGUF: llama.cpp's"),
        ("ggjt.bin", struct.pack("<II", 0x67676A74, 3) + bytes(40), "older than GGUF: llama.cpp's"),
        ("a.bin", struct.pack("<Ii", 0x616B3432, 1) + bytes(40), "is an export of llama2.c"),
        ("b.bin", struct.pack("<ii", 20240326, 3) + bytes(40), "is an export of llm.c"),
        ("c.bin", b"\x08\x07\x12\x07pytorch" + bytes(40), "is a graph of ONNX"),
        ("d.tflite", b"\x1c\0\0\0TFL3" + bytes(40), "is a graph of TensorFlow Lite"),
        ("imatrix.dat", struct.pack("<ii", 1, 14) + b"blk.0.attn_q.w" + bytes(40), "is an importance matrix"),
        ("stream", b"\x92\x92\xa6params\xa1w\xc4\x02ab", "is a stream of EasyLM"),
        ("m.joblib", b"\x80\x04}.", "may be pickle: --source-format pickle reads it"),
        ("m.index", b"x", "is the index of a checkpoint of TensorFlow"),
        ("m.zip", b"PK\3\4" + bytes(40), "is a zip archive: unpack it"),
    ],
)
def test_files_of_other_programs_are_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.inspect(tmp_path / name)
    assert message in str(caught.value)


def test_a_folder_of_another_program_names_its_file(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"its saved_model\.pb is a graph of TensorFlow; load its variables"):
        checkpoints.inspect(tmp_path)


@pytest.mark.parametrize(
    ("member", "message"),
    [("x/models/model.json", "is a program of torch.export"), ("x.safetensors", "with x.safetensors in it: unpack it")],
)
def test_other_archives_named_as_files_of_torch(tmp_path, member, message):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr(member, "{}")
    with pytest.raises(CheckpointError, match=message):
        checkpoints.inspect(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "pattern", ["consolidated.{:02}.pth", "mp_rank_{:02}_model_states.pt", "model_world_size_2_rank_{}.pt"]
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_part_of_each_matrix_is_not_converted_alone(tmp_path, pattern, number):
    paths = [write("torch", tmp_path / pattern.format(rank), ARRAYS) for rank in range(2)]
    with pytest.raises(CheckpointError, match="holds a part of each matrix, whose other parts are next to it"):
        checkpoints.inspect(paths[number])
    paths[1 - number].unlink()
    assert checkpoints.inspect(paths[number]).tensors.keys() == {"x"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_of_zero_3_are_never_converted_alone(tmp_path, ranks):
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    paths = [write("torch", tmp_path / name, {"x": np.empty(0, np.float32)}) for name in names]
    for path in (tmp_path, *paths):
        with pytest.raises(CheckpointError, match=r"DeepSpeed's ZeRO 3 saves: its zero_to_fp32\.py puts them together"):
            checkpoints.convert(path, tmp_path / "out", to_layout="same")


@pytest.mark.parametrize(
    "names", [["mp_rank_00/a.pt", "mp_rank_01/a.pt"], ["mp_rank_00_000/a.pt", "mp_rank_00_001/a.pt"]]
)
def test_ranks_in_folders_are_not_offered_alone(tmp_path, names):
    run = tmp_path / "run" / "iter_0000010"
    for name in names:
        (run / name).parent.mkdir(parents=True)
        write("torch", run / name, ARRAYS)
    for path in (run.parent, run, *((run / name).parent for name in names), *(run / name for name in names)):
        with pytest.raises(
            CheckpointError, match="holds the parts of weights that ranks of tensor or pipeline parallelism"
        ):
            checkpoints.inspect(path)
    (run / names[1]).unlink()
    (run / names[1]).parent.rmdir()
    assert checkpoints.inspect(run / names[0]).tensors.keys() == {"x"}


def test_the_optimizer_of_deepspeed_beside_weights_is_passed_over(tmp_path):
    write("torch", tmp_path / "mp_rank_00_model_states.pt", ARRAYS)
    (tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    assert checkpoints.inspect(tmp_path).tensors.keys() == {"x"}


def test_arrays_of_objects_can_be_left_out(tmp_path):
    np.savez(tmp_path / "x.npz", **ARRAYS, tree=np.array({"a": 1}, dtype=object))
    with pytest.raises(CheckpointError, match=r"tree of .* which only unpickling reads; save the arrays .*--drop"):
        checkpoints.convert(tmp_path / "x.npz", tmp_path / "out", to_layout="same")
    checkpoints.convert(tmp_path / "x.npz", tmp_path / "out", to_layout="same", drop=["tree"])
    assert checkpoints.read(tmp_path / "out").keys() == {"x"}


def test_verify_reads_a_source_as_its_conversion_did(tmp_path):
    source = write("torch", tmp_path / "x.pt", ARRAYS).rename(tmp_path / "x.pth.tar")
    checkpoints.convert(source, tmp_path / "out", to_layout="same", source_format="torch")
    assert checkpoints.verify(source, tmp_path / "out").passed


def test_adapters_for_diffusion_models_are_named(tmp_path):
    names = ("alpha", "lora_down.weight", "lora_up.weight")
    arrays = {f"lora_unet_mid_block_to_q.{name}": np.ones((2, 2), np.float32) for name in names}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is of an adapter of Kohya's scripts for a diffusion model"):
        checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "out")


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("head", ["lm_head.weight", ""])
def test_names_of_nanogpt_may_be_of_gptbigcode(head, prefix):
    arrays = made("nanogpt")
    masks = {name for name in arrays if name.endswith(".attn.bias")}
    arrays = {f"{prefix}{name}": array for name, array in arrays.items() if head or name != "lm_head.weight"}
    plain = {name: array for name, array in arrays.items() if name.removeprefix(prefix) not in masks}
    with pytest.raises(LayoutError, match=r"GPTBigCode with multi_query=False.* --from nanogpt takes it"):
        layouts.detect(plain)
    if prefix:
        with pytest.raises(LayoutError, match=r"nanogpt without it \(--strip model\. --from nanogpt\); .*GPTBigCode"):
            layouts.detect(plain)
        return
    assert layouts.detect(plain, "gpt2").name == "nanogpt"
    assert layouts.detect(arrays).name == "nanogpt"
    assert (
        layouts.detect({name: array for name, array in plain.items() if not name.endswith(".bias")}).name == "nanogpt"
    )


def test_names_of_bert_with_one_type_of_tokens_may_be_of_roberta(tmp_path):
    arrays = made("hf-bert")
    arrays["embeddings.token_type_embeddings.weight"] = np.ones((1, 6), np.float32)
    with pytest.raises(LayoutError, match=r"one row, as in RoBERTa .* --from hf-bert takes it as BERT's"):
        layouts.detect(arrays)
    assert layouts.detect(arrays, "bert").name == "hf-bert"
    with pytest.raises(LayoutError, match=r"\(--strip auto\. --from hf-bert\); .*as in RoBERTa"):
        layouts.detect({f"auto.{name}": array for name, array in arrays.items()})


@pytest.mark.parametrize(("layout", "head"), [("hf-roberta", "lm_head."), ("hf-megatron-bert", "cls.predictions.")])
def test_the_second_name_of_a_heads_bias_is_a_copy_of_the_first(tmp_path, layout, head):
    arrays = made(layout)
    arrays[f"{head}decoder.bias"] = arrays[f"{head}bias"].copy()
    source = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays, source)
    checkpoints.convert(source, tmp_path / "flax")
    checkpoints.convert(tmp_path / "flax", tmp_path / "back.safetensors", to_layout=layout)
    back = checkpoints.read(tmp_path / "back.safetensors")
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }
    arrays[f"{head}decoder.bias"][3] += 1
    safetensors.numpy.save_file(arrays, source)
    with pytest.raises(CheckpointError, match=f"{head}decoder.bias must hold the numbers of {head}bias"):
        checkpoints.convert(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


ANGLES = np.arange(9)[:, None] * 10000.0 ** (-np.arange(0, 4, 2) / 4)
LOWER = np.tril(np.ones((1, 1, 9, 9), bool))
BUFFERS = {
    "hf-gpt-neo": (
        "transformer.h.{}.attn.attention.",
        {"bias": LOWER ^ np.tril(LOWER, -4), "masked_bias": np.float32(-1e9)},
    ),
    "hf-gptj": ("transformer.h.{}.attn.", {"bias": LOWER.astype(np.uint8), "masked_bias": np.float32(-1e9)}),
    "hf-gpt-neox": ("gpt_neox.layers.{}.attention.", {"bias": LOWER, "rotary_emb.inv_freq": np.float32([1.0, 0.1])}),
    "hf-roformer": (
        "roformer.encoder.",
        {"embed_positions.weight": np.concatenate([np.sin(ANGLES), np.cos(ANGLES)], 1).astype(np.float32)},
    ),
    "hf-codegen": ("transformer.h.{}.attn.", {"causal_mask": LOWER}),
    "hf-roberta": (
        "roberta.embeddings.",
        {"position_ids": np.arange(9)[None], "token_type_ids": np.zeros((1, 9), int)},
    ),
}
"""Layout -> front of the buffers that older versions of `transformers` wrote, and their numbers."""


@pytest.mark.parametrize("layout", BUFFERS)
def test_buffers_of_older_files_are_left_out_and_come_back(tmp_path, layout):
    front, buffers = BUFFERS[layout]
    arrays, settings = made(layout), {"num_heads": 4} if layout == "hf-gpt-neox" else {}
    arrays |= {front.format(0) + name: np.asarray(numbers) for name, numbers in buffers.items()}
    source = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays, source)
    checkpoints.convert(source, tmp_path / "flax", settings=settings)
    checkpoints.convert(tmp_path / "flax", tmp_path / "back.safetensors", to_layout=layout)
    back = checkpoints.read(tmp_path / "back.safetensors")
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }
    for name, numbers in buffers.items():
        # A mask that shows all, a number above zero, frequencies that rise, positions and types from 1 on.
        wrong = np.arange(1, np.size(numbers) + 1).reshape(np.shape(numbers)).astype(np.asarray(numbers).dtype)
        safetensors.numpy.save_file(arrays | {front.format(0) + name: wrong}, source)
        with pytest.raises(CheckpointError, match=f"{name} is not what it would be left out as"):
            checkpoints.convert(source, tmp_path / "other", settings=settings)
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("layout", "front"),
    [("hf-glm4-moe", "layers.9."), ("hf-exaone-moe", "mtp."), ("hf-ernie4-5-moe", "model.mtp_block.0.")],
)
def test_what_predicts_further_tokens_is_left_out(tmp_path, layout, front):
    """A layer behind the others, as GLM-4.5 has it, or a module of its own; transformers ignores both."""
    arrays = made(layout)
    block = next(name for name in arrays if "layers.0." in name).partition("layers.0.")[0] + "layers.0."
    front = f"{block.partition('layers.')[0]}{front}" if front.startswith("layers") else front
    further = {front + name.removeprefix(block): array for name, array in arrays.items() if name.startswith(block)}
    further |= {f"{front}eh_proj.weight": np.ones((6, 12), np.float32), f"{front}enorm.weight": np.ones(6, np.float32)}
    sources = {name: tmp_path / f"{name}.safetensors" for name in ("plain", "both")}
    safetensors.numpy.save_file(arrays, sources["plain"])
    safetensors.numpy.save_file(arrays | further, sources["both"])
    results = []
    for name, source in sources.items():
        checkpoints.convert(source, tmp_path / name, from_layout=layout)
        results.append({key: array.tobytes() for key, array in checkpoints.read(tmp_path / name).items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("prefix", ["roberta.", "data2vec_text.", "state.ernie."])
def test_names_below_another_familys_prefix_are_not_advised_to_be_of_bert(prefix):
    arrays = {f"{prefix}{name}": array for name, array in made("hf-bert").items()}
    with pytest.raises(LayoutError) as caught:
        layouts.detect(arrays | {"classifier.weight": np.ones((2, 6), np.float32)})
    assert "--strip" not in str(caught.value)


def big_bird(prefix):
    """Return an encoder of BigBird, whose names are those of BERT but for the pooler."""
    arrays = {f"{prefix}{name}": array for name, array in made("hf-bert").items() if "pooler" not in name}
    return arrays | {
        f"{prefix}pooler.weight": np.ones((6, 6), np.float32),
        f"{prefix}pooler.bias": np.ones(6, np.float32),
    }


def test_names_of_bert_with_a_pooler_of_one_layer_are_of_big_bird():
    with pytest.raises(LayoutError, match=r"pooler\.(weight|bias): a pooler of BigBird") as caught:
        layouts.detect(big_bird(""))
    assert "--drop" not in str(caught.value)


def test_a_refused_tensor_of_an_unknown_kind_of_model_is_named_with_that_kind():
    with pytest.raises(
        LayoutError, match=r"^no layout is for the model_type albert of config\.json; pooler\.(weight|bias)"
    ):
        layouts.detect(big_bird(""), "albert")


def test_from_is_not_advised_where_that_layout_lacks_tensors():
    """Falcon with ALiBi has the names of BLOOM, but for the norm of the embeddings."""
    arrays = {name: array for name, array in made("hf-bloom").items() if "embeddings_layernorm" not in name}
    named = r"config\.json says falcon, and hf-bloom needs .*word_embeddings_layernorm\.\w+: no layout has such a model"
    with pytest.raises(LayoutError, match=named) as caught:
        layouts.detect(arrays, "falcon")
    assert "--from" not in str(caught.value)


def test_an_encoder_of_big_bird_lacks_the_head_of_a_decoder():
    arrays = big_bird("bert.")
    layout = layouts.detect(arrays)
    assert layout.name == "hf-big-bird"
    with pytest.raises(WeightsMismatchError, match=r"missing: .*cls\.predictions\.bias"):
        layout.decode({name: array.shape for name, array in arrays.items()})


def test_tensors_whose_absence_leaves_shapes_that_do_not_fit_are_not_advised_to_be_dropped():
    arrays = made("hf-electra")
    table = next(name for name in arrays if name.endswith("word_embeddings.weight"))
    arrays[table] = np.ones((11, 4), np.float32)
    more = {"electra.embeddings_project.weight": np.ones((6, 4), np.float32)}
    with pytest.raises(LayoutError, match=r"does not know electra\.embeddings_project") as caught:
        layouts.detect(arrays | more)
    assert "--drop" not in str(caught.value)


def test_blocks_with_two_mixers_are_of_another_family():
    arrays = made("hf-bamba")
    attention = next(name for name in arrays if "self_attn.q_proj" in name).split("self_attn")[0]
    other = next(name for name in arrays if "mamba.in_proj" in name).split("mamba")[0]
    both = arrays | {
        name.replace(attention, other): array
        for name, array in arrays.items()
        if name.startswith(f"{attention}self_attn.")
    }
    with pytest.raises(LayoutError, match=r"are in one block; the blocks of hf-bamba have one of them$"):
        layouts.find("hf-bamba").decode({name: array.shape for name, array in both.items()}, SIZES)


def test_no_other_family_is_advised_for_a_part_of_an_unknown_one(tmp_path):
    arrays = made("hf-llama")
    names = {f"model.encoder.{name}": array for name, array in arrays.items()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "m2m_100"}))
    safetensors.numpy.save_file(names, tmp_path / "model.safetensors")
    with pytest.raises(LayoutError) as caught:
        checkpoints.convert(tmp_path, tmp_path / "out")
    assert str(caught.value).startswith("no layout is for the model_type m2m_100")
    assert "--from" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda torch: torch.eye(3).to_sparse(), "it is a sparse tensor; save its to_dense()"),
        (lambda torch: torch.ones(2, dtype=torch.complex64).conj(), "it is marked as conjugated or negated"),
    ],
)
def test_other_tensors_of_torch_can_be_left_out(tmp_path, value, message):
    torch = pytest.importorskip("torch")
    torch.save({"x": torch.ones(3), "odd": value(torch)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(tmp_path / "x.pt", tmp_path / "out", to_layout="same")
    assert message in str(caught.value)
    checkpoints.convert(tmp_path / "x.pt", tmp_path / "out", to_layout="same", drop=["odd"])
    assert checkpoints.read(tmp_path / "out").keys() == {"x"}


@pytest.mark.parametrize("head", ["score.weight", "qa_outputs.bias"])
def test_classifiers_without_a_head_over_the_vocabulary_get_no_advice_that_ends_nowhere(tmp_path, head):
    arrays = {name: array for name, array in made("hf-llama").items() if name != "lm_head.weight"}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    safetensors.numpy.save_file({**arrays, head: np.ones(2, np.float32)}, source / "model.safetensors")
    with pytest.raises(
        LayoutError, match=rf"^{head} is a head for classes or answers, .*--to same changes its container"
    ):
        checkpoints.convert(source, tmp_path / "out")
    checkpoints.convert(source, tmp_path / "same", to_layout="same")


def test_shapes_of_a_model_that_its_config_makes_unlike_others_name_the_key(tmp_path):
    arrays = {name: array for name, array in made("nanogpt").items() if not name.endswith("h.0.attn.bias")}
    sizes = {"n_embd": 6, "n_layer": 1, "n_head": 2, "vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_bigcode", "multi_query": False, **sizes}))
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(LayoutError, match=r"^config.json: multi_query \(False\) of gpt"):
        checkpoints.convert(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.transformer.h.0.attn.qkv.weight", "is of LitGPT: litgpt convert_from_litgpt gives"),
        ("decoder.layers.1.self_attention.linear_qkv.weight", "is of Megatron: the export to transformers"),
        ("language_model.encoder.layers.0.self_attention.query_key_value.weight", "is of Megatron: the export"),
        ("decoder.blocks.0.cross_attn.query.weight", "is of OpenAI's whisper: convert"),
        ("blocks.3.attn.W_Q", "is of TransformerLens, which"),
        ("ema.shadow_params.0", "is of an average that torch_ema or diffusers' EMAModel saves as a list without names"),
        ("tfbert/encoder/kernel:0", "is of TensorFlow, as in tf_model.h5"),
    ],
)
def test_names_of_other_programs_have_a_remedy(name, message):
    with pytest.raises(LayoutError) as caught:
        layouts.detect({name: (4, 4), "some.other": (3,)})
    assert str(caught.value).startswith(f"{name} {message}")


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_numbers_smaller_than_a_byte_have_a_remedy(tmp_path, dtype):
    count = {"F4": 4, "F6_E2M3": 6}[dtype]
    header = json.dumps({"x": {"dtype": dtype, "shape": [8], "data_offsets": [0, count]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(count))
    with pytest.raises(CheckpointError, match=rf"x has the dtype {dtype}, whose numbers .* or save its bytes"):
        checkpoints.inspect(tmp_path / "x.safetensors")


def test_a_norm_more_of_each_side_is_not_advised_away():
    """mBART's final norms mark blocks that normalise in another place than BART's."""
    arrays = made("hf-bart")
    for side in ("encoder", "decoder"):
        arrays |= {f"model.{side}.layer_norm.{one}": np.ones(6, np.float32) for one in ("weight", "bias")}
    with pytest.raises(LayoutError, match=r"hf-bart comes closest, but does not know .*layer_norm") as caught:
        layouts.detect(arrays)
    assert "--drop" not in str(caught.value)


def test_a_side_of_an_encoder_and_decoder_is_not_advised_as_a_model():
    below = {name.removeprefix("biogpt."): array for name, array in made("hf-biogpt").items()}
    half = {f"model.encoder.{name}": array for name, array in below.items()}
    with pytest.raises(LayoutError, match=r"--strip model\.encoder\."):
        layouts.detect(half)
    with pytest.raises(LayoutError) as caught:
        layouts.detect(half | {"model.decoder.layers.0.encoder_attn.q_proj.weight": np.ones((6, 6), np.float32)})
    assert "--strip" not in str(caught.value)
