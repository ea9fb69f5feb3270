"""JAX's random numbers in torch: against the stored vectors, against NumPy, compiled, copied, and in modules."""

from __future__ import annotations

import copy
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.func import functional_call

import torch_attn
from attn_bridge import rng
from attn_bridge.specs import VARIANTS
from parity_tests.goldens import make_random_vectors, random_vectors
from torch_attn import functional, random, threefry
from torch_attn.random import JaxRngs, RngStream

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def as_numpy(drawn):
    if drawn.dtype == torch.bfloat16:
        return drawn.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return drawn.numpy()


def words(key):
    return key.numpy().view(np.uint32)


def draw_as_jax(case):
    key = random.key(case["seed"], x64=case["x64"])
    match case["function"]:
        case "key":
            return words(key)
        case "fold_in":
            return words(random.fold_in(key, case["data"]))
        case "split":
            return words(random.split(key, case["num"]))
        case "bits":
            return as_numpy(random.bits(key, case["shape"], getattr(torch, case["dtype"])))
        case "uniform":
            dtype, bounds = getattr(torch, case["dtype"]), (case["minval"], case["maxval"])
            return as_numpy(random.uniform(key, case["shape"], dtype, *bounds, x64=case["x64"]))
        case "bernoulli":
            return as_numpy(random.bernoulli(key, case["p"], case["shape"], x64=case["x64"]))
        case "streams":
            return np.stack(random_vectors.streams(lambda **s: JaxRngs(**s, params=case["seed"]), words))
    raise AssertionError(case)


@pytest.mark.parametrize("computes_float16", [False, True])
def test_torch_draws_what_jax_drew(computes_float16, monkeypatch):
    monkeypatch.setattr(rng.fused, "COMPUTES_FLOAT16", computes_float16)
    assert random_vectors.check("jax", draw_as_jax) == len(random_vectors.jax_cases())


def test_this_torch_draws_what_it_drew():
    assert random_vectors.check("torch", make_random_vectors.draw_with_torch) == len(random_vectors.torch_cases())


def test_torch_draws_what_numpy_draws_in_1000_random_cases():
    choose = np.random.default_rng(0)
    for _ in range(1000):
        x64 = bool(choose.integers(2))
        seed, data = int(choose.integers(-(2**63), 2**63)), int(choose.integers(2**32))
        shape = tuple(int(size) for size in choose.integers(0, 9, size=choose.integers(0, 4)))
        key, expected = random.key(seed, x64=x64), rng.key(seed, x64=x64)
        np.testing.assert_array_equal(words(random.split(key, (2, 3))), rng.split(expected, (2, 3)))
        key, expected = random.fold_in(key, data), rng.fold_in(expected, data)
        np.testing.assert_array_equal(words(key), expected)
        name = str(choose.choice(UNSIGNED))
        np.testing.assert_array_equal(
            random.bits(key, shape, getattr(torch, name)).numpy(), rng.bits(expected, shape, name)
        )
        name = str(choose.choice(FLOATS))
        low = float(choose.normal())
        bounds = (low, low + float(choose.exponential())) if choose.integers(2) else (0.0, 1.0)
        found = as_numpy(random.uniform(key, shape, getattr(torch, name), *bounds, x64=x64))
        wanted = rng.uniform(expected, shape, found.dtype, *bounds, x64=x64)
        assert found.tobytes() == wanted.tobytes(), (seed, data, shape, name, bounds)
        p = float(choose.choice([0.0, 1e-9, 0.1, 0.9, 1.0, 1.5, -0.5, choose.random()]))
        mask = random.bernoulli(key, p, shape, x64=x64)
        np.testing.assert_array_equal(mask.numpy(), rng.bernoulli(expected, p, shape, x64=x64))
        p = torch.tensor(choose.random(), dtype=getattr(torch, name))
        np.testing.assert_array_equal(
            random.bernoulli(key, p, shape).numpy(), rng.bernoulli(expected, as_numpy(p), shape)
        )


def test_a_draw_of_many_chunks_is_the_draw_of_one(monkeypatch):
    key = random.key(3)
    one = random.bernoulli(key, 0.9, 200_003), random.bits(key, 200_003, torch.uint64)
    monkeypatch.setattr(threefry, "_CHUNK", 1 << 12)
    assert torch.equal(random.bernoulli(key, 0.9, 200_003), one[0])
    assert torch.equal(random.bits(key, 200_003, torch.uint64).view(torch.int64), one[1].view(torch.int64))
    np.testing.assert_array_equal(one[1].numpy()[-9:], rng.bits(rng.key(3), 200_003, "uint64")[-9:])


def test_counters_beyond_32_bits_have_an_upper_word(monkeypatch):
    seen = []
    plain = threefry.threefry
    monkeypatch.setattr(
        threefry, "threefry", lambda w, high, low: seen.append((high.clone(), low.clone())) or plain(w, high, low)
    )
    monkeypatch.setattr(threefry, "_CHUNK", 4)
    random.bits(random.key(0), 6)
    assert [part[0].tolist() for part in seen] == [[0] * 4, [0] * 2]
    assert [part[1].tolist() for part in seen] == [[0, 1, 2, 3], [4, 5]]
    assert (threefry.signed(2**32 + 5), threefry.signed(2**31)) == (5, -(2**31))


def test_normal_draws_follow_the_uniform_ones():
    drawn = random.normal(random.key(0), 20_000)
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1.0) < 0.02
    # jax.random.normal(jax.random.key(0), (4,)), jax 0.10.2
    expected = torch.tensor([1.6226422, 2.0252647, -0.43359444, -0.07861735])
    torch.testing.assert_close(random.normal(random.key(0), 4), expected, rtol=4e-7, atol=0)


# ---- streams


def test_streams_count_fall_back_and_fork():
    rngs = JaxRngs(0, dropout=1)
    assert (len(rngs), list(rngs), "dropout" in rngs, "params" in rngs) == (2, ["dropout", "default"], True, False)
    first, second = rngs.params(), rngs()
    assert not torch.equal(first, second)
    assert (int(rngs.default.count), int(rngs.dropout.count)) == (2, 0)
    forked = rngs.fork()
    assert (int(rngs.default.count), int(forked.default.count)) == (3, 0)
    assert torch.equal(forked.default.key, random.fold_in(random.key(0), 2))
    assert torch.equal(rngs.fold_in(9), random.fold_in(random.fold_in(random.key(0), 3), 9))
    assert words(JaxRngs(0, dropout=1).dropout()).tolist() == [0x1E3F1835, 0x6E752082]


def test_draws_of_streams_take_the_next_key():
    stream, again = JaxRngs(4).noise, JaxRngs(4)
    assert torch.equal(stream.uniform((3,)), random.uniform(again(), 3))
    assert torch.equal(
        stream.uniform((3,), -1.0, 2.0, torch.float64), random.uniform(again(), 3, torch.float64, -1.0, 2.0)
    )
    assert torch.equal(stream.uniform((3,), torch.bfloat16), random.uniform(again(), 3, torch.bfloat16))
    assert torch.equal(stream.uniform((3,), torch.float32, -1.0), random.uniform(again(), 3, torch.float32, -1.0))
    assert torch.equal(stream.bits((3,), torch.uint8), random.bits(again(), 3, torch.uint8))
    assert torch.equal(stream.bernoulli(0.3, (9,)), random.bernoulli(again(), 0.3, 9))
    assert torch.equal(JaxRngs(4).uniform((3,)), random.uniform(JaxRngs(4)(), 3))


def test_split_streams_hold_many_keys_and_do_not_draw():
    rngs = JaxRngs(params=1, dropout=2, noise=3).split({"params": 5, "dropout": None, ...: (2, 5)})
    assert rngs.params.key.shape == (5, 2)
    assert rngs.dropout.key.shape == (2,)
    assert rngs.noise.key.shape == (2, 5, 2)
    assert torch.equal(JaxRngs(1).split(5).default.key, random.split(random.fold_in(random.key(1), 0), 5))
    with pytest.raises(ValueError, match=r"^fold_in takes one key of two words, got words of shape \(5, 2\)$"):
        rngs.params()


def test_x64_changes_seeds_masks_and_default_types():
    narrow, wide = JaxRngs(2**32 + 5), JaxRngs(2**32 + 5, x64=True)
    assert (words(narrow.default.key).tolist(), words(wide.default.key).tolist()) == ([0, 5], [1, 5])
    assert not torch.equal(JaxRngs(0).bernoulli(0.5, (64,)), JaxRngs(0, x64=True).bernoulli(0.5, (64,)))
    assert (narrow.uniform().dtype, wide.uniform().dtype) == (torch.float32, torch.float64)
    assert (narrow.bits().dtype, wide.fork().default.bits().dtype) == (torch.uint32, torch.uint64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: JaxRngs(dropout=1).params(), AttributeError, r"^No RngStream named 'params' found in Rngs\.$"),
        (lambda: JaxRngs(dropout=1)["params"], KeyError, r"No RngStream named 'params' found in Rngs\."),
        (lambda: JaxRngs(dropout=1)(), AttributeError, r"^No RngStream named 'default' found in Rngs\.$"),
        (lambda: JaxRngs("seed"), ValueError, r"^Invalid rng value: seed, expected a seed, a stream, or keys "),
        (lambda: JaxRngs(2**63), ValueError, r"^seed \(9223372036854775808\) must be from "),
        (lambda: JaxRngs(0).bits(3, torch.int32), ValueError, r"^dtype of bits must be uint8, .* got torch\.int32$"),
        (lambda: JaxRngs(0).uniform(3, dtype=torch.int32), ValueError, r"^dtype of uniform must be float16, .*int32$"),
        (lambda: JaxRngs(0).bernoulli(1, 3), TypeError, r"^p of bernoulli must be floating point, got int$"),
        (lambda: random.fold_in(random.key(0), -1), ValueError, r"^data \(-1\) of fold_in must be from 0 to "),
    ],
)
def test_a_bad_argument_is_one_clear_line(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- modules


CONFIG = {
    "vocab_size": 40,
    "context_length": 8,
    "emb_dim": 8,
    "n_heads": 2,
    "n_layers": 2,
    "drop_rate": 0.3,
    "qkv_bias": True,
}
IDS = torch.arange(12).reshape(2, 6)


def test_a_module_draws_by_its_seed_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, other = (torch_attn.GPTModel(CONFIG, rngs=JaxRngs(5)) for _ in range(2))
    first = one(IDS)
    assert torch.equal(first, other(IDS))
    assert not torch.equal(first, one(IDS))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.eval()(IDS), one(IDS))


@pytest.mark.parametrize("variant", [one for one in VARIANTS if one.examples], ids=lambda variant: variant.name)
def test_initial_weights_by_rngs_leave_the_global_generator_alone(variant):
    before = torch.get_rng_state()
    getattr(torch_attn, variant.name)(variant.examples[0].config, rngs=JaxRngs(5))
    assert torch.equal(torch.get_rng_state(), before)


def test_no_rngs_means_the_global_generator():
    torch.manual_seed(0)
    one = torch_attn.GPTModel(CONFIG)
    torch.manual_seed(0)
    assert all(map(torch.equal, one.state_dict().values(), torch_attn.GPTModel(CONFIG).state_dict().values()))
    assert one.drop_emb.rngs is None


def test_a_copy_goes_on_by_itself_and_the_state_dict_holds_weights_only():
    plain, module = torch_attn.GPTModel(CONFIG), torch_attn.GPTModel(CONFIG, rngs=JaxRngs(5))
    assert list(module.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(module.state_dict(), strict=True)
    module(IDS)
    copied = copy.deepcopy(module)
    second = module(IDS)
    assert torch.equal(copied(IDS), second)
    assert int(copied.drop_emb.rngs.count) == int(module.drop_emb.rngs.count) == 2
    copied(IDS)
    assert int(module.drop_emb.rngs.count) == 2
    third = functional_call(module, dict(module.named_parameters()), (IDS,))
    assert not torch.equal(third, second)


def test_meta_modules_take_rngs():
    module = torch_attn.MultiHeadAttention(6, 6, 4, 0.1, 2, rngs=JaxRngs(0), device="meta")
    assert module.W_query.weight.is_meta


def test_functional_attention_takes_streams():
    x = torch.randn(2, 5, 2, 4)
    masks = [
        functional.dot_product_attention(x, x, x, dropout=0.5, rng=rngs) for rngs in (JaxRngs(1), JaxRngs(1).dropout)
    ]
    assert torch.equal(*masks)
    assert not torch.equal(masks[0], functional.dot_product_attention(x, x, x, dropout=0.5, rng=JaxRngs(2)))


def test_compiling_a_module_changes_no_draw_and_compiles_once():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = torch_attn.CausalAttention(4, 4, 8, 0.4, rngs=JaxRngs(5))
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8, 4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-6)
    assert int(module.dropout.rngs.count) == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def draw_some(stream):
    key = stream()
    return random.bits(key, (3, 5), torch.uint16).view(torch.int16), random.uniform(key, 7), random.split(key, 3)


def draw_masks(stream):
    return (stream.bernoulli(0.9, (5, 7)),)


@pytest.mark.parametrize(
    ("draw", "backend", "x64"),
    [
        (draw_some, "aot_eager", False),
        (draw_masks, "aot_eager", True),
        pytest.param(draw_masks, "inductor", False, marks=pytest.mark.full),  # a C++ compiler at work for half a minute
    ],
)
def test_compiled_draws_are_the_same(draw, backend, x64):
    torch._dynamo.reset()
    compiled = torch.compile(draw, fullgraph=True, backend=backend)
    stream, eager = (RngStream(3, tag="a", x64=x64) for _ in range(2))
    for _ in range(2):
        for found, expected in zip(compiled(stream), draw(eager), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same():
    here, there = JaxRngs(1).noise, JaxRngs(1).noise
    assert torch.equal(there.uniform(999, -0.3, 0.9, device="cuda").cpu(), here.uniform(999, -0.3, 0.9))
    assert torch.equal(there.bernoulli(0.9, 999, device="cuda").cpu(), here.bernoulli(0.9, 999))
    module = torch_attn.GPTModel(CONFIG, rngs=JaxRngs(5))
    moved = copy.deepcopy(module).cuda()
    torch.testing.assert_close(moved(IDS.cuda()).cpu(), module(IDS), rtol=1e-4, atol=1e-4)


def test_masks_are_drawn_fast():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(5):
            start = time.thread_time()
            random.bernoulli(random.key(0), 0.9, 1 << 20)
            times.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert (1 << 20) / min(times) > 3e6  # a tenth of what an idle machine gives


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), torch.inference_mode], ids=["meta", "inference"])
def test_streams_made_in_other_contexts_draw_the_same(context):
    def draws(rngs, forked):
        return [rngs.dropout.bernoulli(0.7, (9,)), rngs.params.uniform((9,)), forked(), rngs.params.split(3).key]

    plain = JaxRngs(3, dropout=4)
    stream = plain.dropout.fork()
    wanted = draws(plain, stream)
    with context():
        rngs = JaxRngs(3, dropout=4)
        forked = rngs.dropout.fork()
        layer = torch_attn.dropout.Dropout(0.5, rngs=JaxRngs(0))
    for one, two in zip(draws(rngs, forked), wanted, strict=True):
        assert torch.equal(one, two)
    ones = torch.ones(20)
    assert torch.equal(layer(ones), torch_attn.dropout.Dropout(0.5, rngs=JaxRngs(0))(ones))


def test_draws_on_the_meta_device_have_shapes_alone():
    with torch.device("meta"):
        rngs = JaxRngs(0)
        found = [rngs.uniform((3,)), rngs.uniform((3,), -1, 1), rngs.bernoulli(0.5, (3,)), rngs.normal((3,))]
    assert {one.device.type for one in found} == {"meta"}
    assert {tuple(one.shape) for one in found} == {(3,)}
