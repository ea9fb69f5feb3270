"""The layout tables, and reading the files they are applied to."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import WeightsMismatchError, checkpoints, layouts

HF_BERT = layouts.find("hf-bert")
WIDTH = 6
OUTSIDE = {
    "attention.self.query": "W_query",
    "attention.self.key": "W_key",
    "attention.self.value": "W_value",
    "attention.output.dense": "out_proj",
}


def bert_attention(num_layers: int = 2, prefix: str = "") -> dict[str, np.ndarray]:
    """Attention tensors under their Hugging Face names, every element of its own value."""
    sizes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    names = [
        (f"{prefix}encoder.layer.{i}.{module}.{kind}", shape)
        for i in range(num_layers)
        for module in OUTSIDE
        for kind, shape in sizes.items()
    ]
    values = np.random.default_rng(0)
    return {name: values.standard_normal(shape, dtype=np.float32) for name, shape in names}


REST = [
    "embeddings.word_embeddings.weight",
    "embeddings.LayerNorm.weight",
    "encoder.layer.0.attention.output.LayerNorm.weight",
    "encoder.layer.0.intermediate.dense.weight",
    "encoder.layer.0.output.dense.weight",
    "encoder.layer.0.crossattention.self.query.weight",
    "encoder.layer.00.attention.self.query.weight",
    "encoder.layer.0.attention.self.query.weight.quantized",
    "notencoder.layer.0.attention.self.query.weight",
    "pooler.dense.weight",
]


def assert_same_bits(result: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        assert result[name].dtype == array.dtype, name
        assert result[name].shape == array.shape, name
        assert result[name].tobytes() == array.tobytes(), name


def test_find_names_the_known_layouts() -> None:
    with pytest.raises(ValueError, match=r"^layout \(foo\) must be one of hf-bert$"):
        layouts.find("foo")


def test_hf_bert_renames_every_attention_tensor_and_leaves_its_axes() -> None:
    arrays = bert_attention(num_layers=12)
    expected = {
        f"layers.{i}.{ours}.{kind}": arrays[f"encoder.layer.{i}.{theirs}.{kind}"]
        for i in range(12)
        for theirs, ours in OUTSIDE.items()
        for kind in ("weight", "bias")
    }
    assert_same_bits(HF_BERT.to_canonical(arrays), expected)


@pytest.mark.parametrize("prefix", ["", "bert", "model.bert"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bit_exact_below_any_prefix(prefix: str, dtype: str) -> None:
    arrays = bert_attention(prefix=f"{prefix}." if prefix else "")
    arrays = {name: array.astype(np.dtype(dtype)) for name, array in arrays.items()}
    assert HF_BERT.find_prefix(arrays) == prefix
    assert_same_bits(HF_BERT.from_canonical(HF_BERT.to_canonical(arrays), prefix=prefix), arrays)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_select_keeps_the_order_and_leaves_out_all_but_attention(prefix: str) -> None:
    covered = list(bert_attention(prefix=prefix))
    rest = [prefix + name for name in REST]
    names = [name for pair in zip(rest, covered, strict=False) for name in pair] + covered[len(rest) :]
    assert HF_BERT.select(names) == covered


def test_what_is_not_attention_is_refused_unless_it_was_left_out() -> None:
    arrays = bert_attention() | {"pooler.dense.weight": np.zeros((WIDTH, WIDTH), np.float32)}
    with pytest.raises(WeightsMismatchError, match=r"^weights do not match: unexpected: pooler\.dense\.weight$"):
        HF_BERT.to_canonical(arrays)
    HF_BERT.to_canonical({name: arrays[name] for name in HF_BERT.select(arrays)})


def test_a_missing_tensor_is_named_with_its_prefix() -> None:
    arrays = bert_attention(prefix="bert.")
    del arrays["bert.encoder.layer.1.attention.self.key.bias"]
    message = r"^weights do not match: missing: bert\.encoder\.layer\.1\.attention\.self\.key\.bias$"
    with pytest.raises(WeightsMismatchError, match=message):
        HF_BERT.to_canonical(arrays)


def test_a_tensor_of_another_rank_is_named() -> None:
    arrays = bert_attention()
    arrays["encoder.layer.0.attention.self.key.bias"] = np.zeros((WIDTH, 1), np.float32)
    message = r"misshapen: encoder\.layer\.0\.attention\.self\.key\.bias: shape \(6, 1\) does not fit 'o -> o'$"
    with pytest.raises(WeightsMismatchError, match=message):
        HF_BERT.to_canonical(arrays)


def test_two_models_in_one_file_are_refused() -> None:
    arrays = bert_attention(prefix="question.") | bert_attention(prefix="passage.")
    message = r"^hf-bert tensors must stand below one prefix, got 'passage', 'question'; convert one at a time$"
    with pytest.raises(ValueError, match=message):
        HF_BERT.to_canonical(arrays)


def test_a_file_without_attention_is_refused() -> None:
    assert HF_BERT.select(REST) == []
    assert HF_BERT.find_prefix(REST) == ""
    with pytest.raises(WeightsMismatchError, match=r"missing: encoder\.layer\.\{i\}\.attention\.output\.dense\.bias"):
        HF_BERT.to_canonical({})


def test_the_result_shares_no_memory_with_the_source() -> None:
    arrays = bert_attention()
    for name, array in HF_BERT.to_canonical(arrays).items():
        assert not any(np.shares_memory(array, source) for source in arrays.values()), name


def test_read_returns_what_was_saved(tmp_path) -> None:
    arrays = bert_attention() | {
        "half": np.array([1.5, -0.0, np.nan], ml_dtypes.bfloat16),
        "index": np.arange(3),
        "empty": np.zeros((0, 2), np.float16),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    assert_same_bits(checkpoints.read(tmp_path / "model.safetensors"), arrays)
    assert_same_bits(checkpoints.read(str(tmp_path / "model.safetensors")), arrays)


def test_read_takes_bfloat16_with_nothing_imported_before(tmp_path) -> None:
    safetensors.numpy.save_file({"a": np.array([1.5], ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    code = (
        "import sys; from attn_bridge import checkpoints; early = {'safetensors', 'ml_dtypes'} & sys.modules.keys(); "
        f"print(sorted(early), checkpoints.read({str(tmp_path / 'model.safetensors')!r})['a'].dtype)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[] bfloat16\n"


def test_read_refuses_another_kind_of_file(tmp_path) -> None:
    (tmp_path / "model.pt").touch()
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"^\S*model\.pt is not a \.safetensors file$"):
        checkpoints.read(tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"^\S*folder\.safetensors is not a \.safetensors file$"):
        checkpoints.read(tmp_path / "folder.safetensors")


def test_read_refuses_a_missing_file(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^\S*model\.safetensors does not exist$"):
        checkpoints.read(tmp_path / "model.safetensors")


@pytest.mark.parametrize("kept", [0, 8, 100, -1])
def test_read_refuses_a_truncated_file(tmp_path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(bert_attention(), path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"^\S*model\.safetensors is corrupt: [^\n]+$"):
        checkpoints.read(path)


def test_read_refuses_a_dtype_that_numpy_lacks(tmp_path) -> None:
    header = b'{"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x00\x00")
    message = r"^\S*model\.safetensors holds a tensor that NumPy cannot represent: [^\n]*float8_e4m3fn[^\n]*$"
    with pytest.raises(ValueError, match=message):
        checkpoints.read(tmp_path / "model.safetensors")
