"""How both backends draw tokens: as often as the model says, from the tokens `transformers` keeps, and alike."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from scipy import stats

import jax_attn
import torch_attn
from attn_bridge.generation import Options
from jax_attn.decoding import generation as flax_generation
from jax_attn.random import TorchRngs
from torch_attn.backend import to_numpy
from torch_attn.decoding import generation
from torch_attn.random import JaxRngs

from ...support.calls import cover
from ...support.models.decoder_oracle import TOKENS, VOCABULARY, run

PACKAGES = {"torch": torch_attn, "flax": jax_attn}

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module", params=PACKAGES)
def side(request):
    return request.param


@functools.cache
def load(side: str, name: str) -> Any:
    return PACKAGES[side].DecoderModel.from_pretrained(run(name).folder)


def arrays(side: str, *given: np.ndarray) -> list[Any]:
    return [torch.tensor(one) if side == "torch" else jnp.asarray(one) for one in given]


def stream(side: str, seed: int = 0) -> Any:
    return JaxRngs(draws=seed).draws if side == "torch" else nnx.Rngs(draws=seed).draws


def generate(side: str, name: str, ids: np.ndarray, new: int, mask: np.ndarray | None = None, **options: Any) -> Any:
    if mask is not None:
        options["attention_mask"] = arrays(side, mask)[0]
    return np.asarray(load(side, name).generate(*arrays(side, ids), new, **options))


def pick(side: str, logits: np.ndarray, numbers: np.ndarray, **options: Any) -> np.ndarray:
    module, checked = {"torch": generation, "flax": flax_generation}[side], Options(1, **options).checked(len(logits.T))
    return np.asarray(module.pick(*arrays(side, logits, numbers), checked))


# ---- alike


SAMPLED = {
    "llama": {"temperature": 1.4, "top_k": 25, "top_p": 0.97},
    "gpt-oss": {"temperature": 1.2, "top_p": 0.95},
    "gemma2": {"temperature": 1.0, "top_k": 20},
}


@cover.some("name", list(SAMPLED), always=["gpt-oss"])
def test_1000_tokens_are_the_same_from_the_same_stream(name):
    oracle = run(name, "left")
    ids, mask = np.tile(oracle.ids, (4, 1)), np.tile(oracle.mask, (4, 1))
    found = [generate(side, name, ids, 85, mask, rng=stream(side, 5), **SAMPLED[name]) for side in PACKAGES]
    np.testing.assert_array_equal(*found)
    drawn = found[0][:, TOKENS:]
    assert drawn.size >= 1000
    assert len(np.unique(drawn)) > VOCABULARY // 2
    assert len(np.unique(drawn, axis=0)) == len(drawn)


@cover.some("name", list(SAMPLED), always=["gemma2"])
def test_a_padded_row_generates_the_tokens_of_the_row_alone(side, name):
    """Greedily: a row of a batch draws other numbers than a row alone."""
    oracle = run(name, "left")
    row = oracle.mask.sum(-1).argmin()
    ids = oracle.ids[row : row + 1, oracle.mask[row]]
    assert ids.size < TOKENS
    found = generate(side, name, oracle.ids, 20, oracle.mask)[row, TOKENS:]
    np.testing.assert_array_equal(found, generate(side, name, ids, 20)[0, ids.size :])


def test_torch_generators_and_torch_rngs_give_the_same_tokens():
    ids, options = run("llama").ids, {"temperature": 1.3, "top_p": 0.9}
    found = generate("torch", "llama", ids, 30, rng=torch.Generator().manual_seed(4), **options)
    np.testing.assert_array_equal(generate("flax", "llama", ids, 30, rng=TorchRngs(4), **options), found)
    torch.manual_seed(4)
    np.testing.assert_array_equal(generate("torch", "llama", ids, 30, **options), found)
    assert (generate("torch", "llama", ids, 30, rng=torch.Generator().manual_seed(5), **options) != found).any()


def test_nothing_is_left_of_an_earlier_call(side):
    ids = run("llama").ids
    alone = generate(side, "llama", ids[:1, :5], 9)
    generate(side, "llama", ids, 17)
    generate(side, "llama", ids, 3, rng=stream(side), temperature=1.0)
    np.testing.assert_array_equal(generate(side, "llama", ids[:1, :5], 9), alone)
    np.testing.assert_array_equal(generate(side, "llama", ids[:1, :5], 4), alone[:, :9])


# ---- as often as they should be


DRAWS = 24_000
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "all": {"temperature": 1.0},
    "cold": {"temperature": 0.4},
    "top_k": {"temperature": 1.3, "top_k": 7},
    "top_p": {"temperature": 2.0, "top_p": 0.7},
    "both": {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
}


def kept(logits: np.ndarray, **options: Any) -> np.ndarray:
    """Return the logits after the processors of `transformers`, in their order."""
    scores = torch.tensor(logits)
    processors = [transformers.TemperatureLogitsWarper(options["temperature"])]
    if "top_k" in options:
        processors.append(transformers.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        processors.append(transformers.TopPLogitsWarper(options["top_p"]))
    for processor in processors:
        scores = processor(None, scores)
    return scores.numpy()


def p_value(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return how likely draws are to be that far from probabilities; 0 where a token of probability 0 was drawn."""
    counts = np.bincount(found, minlength=len(wanted))
    if counts[wanted == 0].any():
        return 0.0
    rare = wanted * len(found) < 5
    cells = ~rare
    observed = np.append(counts[cells], counts[rare].sum())
    expected = np.append(wanted[cells], wanted[rare].sum()) * len(found)
    present = expected > 0
    return float(stats.chisquare(observed[present], expected[present], sum_check=False).pvalue)


@cover.some("case", list(DISTRIBUTIONS), always=["cold", "both"])
def test_tokens_are_drawn_as_often_as_their_probabilities_say(side, case):
    options = DISTRIBUTIONS[case]
    ids = run("llama").ids[:1, :4]
    logits = to_numpy(load("torch", "llama")(torch.tensor(ids)))[:, -1]
    wanted = torch.softmax(torch.tensor(kept(logits, **options)), -1)[0].double().numpy()
    tokens = generate(side, "llama", np.repeat(ids, DRAWS, 0), 1, rng=stream(side, 3), **options)[:, -1]
    assert np.count_nonzero(wanted) > 3
    assert p_value(tokens, wanted / wanted.sum()) > 1e-4
    other = np.roll(wanted, 1)
    assert p_value(tokens, other / other.sum()) < 1e-4


@cover.some("options", [{}, {"top_k": 3}, {"top_p": 0.6}], always=[{}, {"top_p": 0.6}])
def test_tokens_that_are_as_likely_are_drawn_as_often(side, options):
    logits = np.array([[0.0, 2.0, 1.0, 2.0, -3.0, 2.0, 2.0, 1.0]], np.float32)
    numbers = np.random.default_rng(0).random(DRAWS, np.float32)
    tokens = pick(side, logits.repeat(DRAWS, 0), numbers, temperature=1.0, **options)
    wanted = np.exp(logits[0]) if not options else (logits[0] == 2.0).astype(float)  # ties with the last are kept
    assert p_value(tokens, wanted / wanted.sum()) > 1e-4


def test_the_first_of_the_likeliest_is_taken(side):
    logits = np.array([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 0.0, 1.0]], np.float32)
    assert pick(side, logits, np.zeros(3, np.float32)).tolist() == [1, 0, 1]


@cover.some("temperature", [1e-3, 1e-20, 1e-45, 1e-300], always=[1e-3, 1e-300])
def test_the_coldest_temperatures_take_the_likeliest_token(side, temperature):
    logits = np.random.default_rng(1).normal(size=(50, 9)).astype(np.float32) * np.float32(1e10)
    numbers = np.random.default_rng(2).random(50, np.float32)
    for options in ({}, {"top_p": 0.5}, {"top_k": 2}):
        found = pick(side, logits, numbers, temperature=temperature, **options)
        np.testing.assert_array_equal(found, logits.argmax(-1))


@cover.rotated(
    ("options", "spread"),
    [{"top_k": 5}, {"top_p": 0.3}, {"top_p": 0.9}, {"top_k": 9, "top_p": 0.75}],
    [1.0, 0.3, 5.0],
)
def test_the_tokens_drawn_from_are_those_that_transformers_keeps(side, options, spread):
    logits = np.random.default_rng(7).normal(size=(15, 17)).astype(np.float32) * spread
    options = {"temperature": 1.5, **options}
    keeps = np.isfinite(kept(logits, **options))
    assert 15 <= keeps.sum() < keeps.size
    # Of every token that is kept, the number in the middle of its range picks it.
    shares = np.where(keeps, np.exp((logits - logits.max(-1, keepdims=True)) / 1.5), 0)
    ends = np.cumsum(shares, -1) / shares.sum(-1, keepdims=True)
    middles = (ends - shares / shares.sum(-1, keepdims=True) / 2)[keeps].astype(np.float32)
    rows, tokens = np.nonzero(keeps)
    np.testing.assert_array_equal(pick(side, logits[rows], middles, **options), tokens)
    numbers = np.linspace(0, 1, 2000, endpoint=False, dtype=np.float32)
    rows = np.arange(15).repeat(len(numbers))
    assert keeps[rows, pick(side, logits[rows], np.tile(numbers, 15), **options)].all()


def test_ties_with_the_last_kept_token_are_kept(side):
    logits = np.array([[1.0, 1.0, 1.0, 1.0, 0.0]], np.float32)
    keeps = np.isfinite(kept(logits, temperature=1.0, top_p=0.4))[0]
    found = pick(side, logits.repeat(400, 0), (np.arange(400) + np.float32(0.5)) / 400, temperature=1.0, top_p=0.4)
    assert set(np.flatnonzero(keeps)) < set(found) == {0, 1, 2, 3}


# ---- programs and modes


def test_one_program_draws_whatever_the_numbers_of_the_options(monkeypatch):
    traces = []
    plain = flax_generation.pick
    monkeypatch.setattr(flax_generation, "pick", lambda *args: traces.append(args[2]) or plain(*args))
    flax_generation._continue.clear_cache()
    flax_generation._read.clear_cache()
    ids = run("llama").ids[:2, :6]
    for temperature, top_k, top_p, eos in ((1.0, 3, 0.9, 1), (0.5, 8, 0.2, 2), (2.0, 30, 0.99, 30)):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "eos": eos}
        generate("flax", "llama", ids, 12, rng=stream("flax"), **options)
    generate("flax", "llama", run("llama").ids[1:, :6], 12, rng=stream("flax"), **options)
    assert len(traces) == 2  # in the loop and behind it, once each
    assert flax_generation._continue._cache_size() == flax_generation._read._cache_size() == 1
    generate("flax", "llama", ids, 12)
    assert flax_generation._continue._cache_size() == 2
    assert flax_generation._read._cache_size() == 1


def test_a_call_inside_a_jit_is_refused_in_one_line():
    model = load("flax", "llama")
    for call, name in (
        (lambda x: model.generate(x, 2), "tokens"),
        (lambda x: model.generate(np.ones((1, 3), int), 2, attention_mask=x > 0), "attention_mask"),
    ):
        with pytest.raises(TypeError) as caught:
            jax.jit(call)(np.ones((1, 3), np.int32))
        assert str(caught.value) == (
            f"{name} must be an array, not a tracer: call generate outside jax.jit, it compiles itself"
        )


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_torch_keeps_the_mode_of_every_module(context):
    model = torch_attn.DecoderModel(load("torch", "llama").config)
    model.train()
    model.trf_blocks[0].eval()
    before = [module.training for module in model.modules()]
    with context():
        found = model.generate(torch.tensor([[3, 1]]), 3)
    with pytest.raises(ValueError, match="tokens"):
        model.generate(torch.tensor([[3, VOCABULARY]]), 3)
    assert [module.training for module in model.modules()] == before
    assert not found.requires_grad
    assert found.dtype == torch.int64


def test_a_step_that_fails_leaves_the_modes(monkeypatch):
    model = torch_attn.DecoderModel(load("torch", "llama").config).train()
    monkeypatch.setattr(model, "head", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(torch.tensor([[3, 1]]), 3)
    assert all(module.training for module in model.modules())


@cover.some("name", ["llama", "gpt2"], always=["gpt2"])
def test_torch_compiles_the_model_whole_and_refuses_unknown_ids(name):
    model = load("torch", name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = torch.tensor(run(name).ids)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-12, atol=1e-12)
        for bad in (VOCABULARY, -1):
            with pytest.raises((RuntimeError, IndexError)):
                compiled(ids.clone().fill_(bad))


@pytest.mark.parametrize("bad", [VOCABULARY, -1, -VOCABULARY - 1])
def test_an_unknown_id_makes_its_sequence_nan_in_jit(bad):
    model, ids = load("flax", "llama"), run("llama").ids.copy()
    ids[1, 4] = bad
    found = np.asarray(nnx.jit(lambda model, ids: model(ids))(model, ids))
    assert np.isfinite(found[[0, 2]]).all()
    assert np.isnan(found[1, 4:]).all()
