"""Quantised originals to floating point: MXFP4 and float8 with scales, held against the formula in exact fractions."""

from __future__ import annotations

import json
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import containers
from attn_bridge.checkpoints.containers.base import CheckpointError, TensorInfo
from attn_bridge.checkpoints.copying import Move
from attn_bridge.checkpoints.planning.plans import TargetTensor
from attn_bridge.checkpoints.quantised import Dequantised, rounding_losses
from parity_tests.support.calls import cover

FORMATS = {"bf16": (8, -126, 127), "f16": (11, -14, 15), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
"""Word -> bits of precision, smallest and largest exponent."""

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
STEM = "model.layers.0.mlp.experts.down_proj"
U8, F4, E4M3 = np.uint8, np.float32, ml_dtypes.float8_e4m3fn
E4M3_VALUES = np.arange(256, dtype=U8).view(E4M3).astype(np.float64)


def write(path, arrays):
    """Write arrays of NumPy to a file; the writer is the project's own."""
    infos = [TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    writer = containers.make_writer("safetensors", path, infos, {"format": "pt"})
    for name, array in arrays.items():
        writer.write(name, array)
    writer.finish()
    return path


def nearest(exact, word):
    """Return the number of a format next to a fraction, ties to even."""
    bits, low, high = FORMATS[word]
    size = abs(exact)
    if not size:
        return 0.0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, low) - bits + 1)
    found = round(size / unit) * unit  # ties to even
    found = float("inf") if found >= Fraction(2) ** (high + 1) else float(found)
    return -found if exact < 0 else found


def product(value, scale, word):
    """Return what a quantised number and its scale stand for, rounded once."""
    value, scale = float(value), float(scale)
    if not np.isfinite(value) or not np.isfinite(scale):
        return value * scale
    return np.copysign(nearest(Fraction(value) * Fraction(scale), word), value)


def e2m1(code):
    return -E2M1[code & 7] if code & 8 else np.float64(E2M1[code])


def unpacked(blocks, scales, word):
    """Return MXFP4 as (..., rows, columns), number by number."""
    found = np.empty((*scales.shape, 32), DTYPES[word])
    for index in np.ndindex(scales.shape):
        scale = float("nan") if scales[index] == 255 else 2.0 ** (int(scales[index]) - 127)
        for at, byte in enumerate(blocks[index]):
            found[(*index, 2 * at)] = product(np.copysign(e2m1(byte & 15), -1 if byte & 8 else 1), scale, word)
            found[(*index, 2 * at + 1)] = product(np.copysign(e2m1(byte >> 4), -1 if byte >> 4 & 8 else 1), scale, word)
    return found.reshape(*scales.shape[:-1], -1)


def same(one, two):
    """Say whether two arrays have the same bits, but for those of NaN."""
    width = f"u{one.dtype.itemsize}"
    lost = np.isnan(one.astype(np.float64)) & np.isnan(two.astype(np.float64))
    return one.dtype == two.dtype and one.shape == two.shape and ((one.view(width) == two.view(width)) | lost).all()


def mxfp4(shape=(3, 5, 2, 16), seed=0, low=0, high=256):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, shape, np.uint8), random.integers(low, high, shape[:-1]).astype(np.uint8)


def float8(shape=(300, 200), block=(128, 128), kind="float8_e4m3fn", scale="float32", seed=0):
    """Return numbers of all bit patterns, and scales of all sizes."""
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 256, shape, np.uint8).view(getattr(ml_dtypes, kind))
    grid = (*shape[:-2], *(-(-size // one) for size, one in zip(shape[-2:], block, strict=True)))
    scales = np.exp(random.normal(-3, 3, grid)).astype(np.float32)
    return numbers, scales.astype(getattr(ml_dtypes, scale, scale))


def expanded(scales, shape, block):
    """Return the scale of every element."""
    across = scales.repeat(block[0], -2)[..., : shape[-2], :].repeat(block[1], -1)[..., : shape[-1]]
    return np.broadcast_to(across, shape)


def multiplied(numbers, scales, word):
    pairs = zip(numbers.astype(np.float64).ravel(), scales.astype(np.float64).ravel(), strict=True)
    return np.array([product(*pair, word) for pair in pairs]).astype(DTYPES[word]).reshape(numbers.shape)


def converted(source, target, **more):
    """Dequantise without another layout, verify, and return the tensors."""
    checkpoints.convert(source, target, to_layout="same", dequantize=True, **more)
    assert checkpoints.verify(source, target).passed
    return checkpoints.read(target)


@pytest.mark.parametrize("word", FORMATS)
def test_mxfp4_is_the_formula_for_every_code_under_small_and_large_scales(tmp_path, word):
    every = np.uint8([*range(9), *range(9, 247, 7), *range(247, 256)])
    blocks = np.arange(256, dtype=np.uint8).reshape(16, 16)[None, None].repeat(len(every), 0)
    scales = every.reshape(-1, 1, 1).repeat(16, -1)
    theirs = write(tmp_path / "hf.safetensors", {f"{STEM}_blocks": blocks, f"{STEM}_scales": scales})
    own = write(tmp_path / "o.safetensors", {"block.0.mlp.mlp2_weight.blocks": blocks,
                                             "block.0.mlp.mlp2_weight.scales": scales})  # fmt: skip
    wanted = unpacked(blocks, scales, word)
    found = converted(theirs, tmp_path / "a.safetensors", dtype=word)
    assert found.keys() == {STEM}
    assert same(found[STEM], np.ascontiguousarray(wanted.swapaxes(1, 2)))
    found = converted(own, tmp_path / "b.safetensors", dtype=word)
    assert found.keys() == {"block.0.mlp.mlp2_weight"}
    assert same(found["block.0.mlp.mlp2_weight"], wanted)
    assert np.isnan(found["block.0.mlp.mlp2_weight"][-1].astype(np.float64)).all()


@cover.rotated(
    ("shape", "block", "said", "kinds"),
    [
        ((300, 200), (128, 128), None),
        ((256, 128), (128, 128), {"weight_block_size": [128, 128]}),
        ((70, 33), (64, 16), {"weight_block_size": [64, 16], "quant_method": "fp8"}),
        ((3, 50, 40), (16, 32), {"weight_block_size": [16, 32]}),
        ((9, 7), (1, 2), {"weight_block_size": [1, 2]}),
        ((20, 30), (20, 30), {"weight_block_size": None}),
    ],
    [("bf16", "float32"), ("f16", "bfloat16"), ("f32", "float8_e8m0fnu")],
)
def test_float8_by_blocks_is_the_formula(tmp_path, shape, block, said, kinds):
    word, scale = kinds
    numbers, scales = float8(shape, block, scale=scale)
    if said is not None:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    other = np.float64([[1.5, 2.5]])
    source = write(tmp_path / "x.safetensors", {"a.weight": numbers, "a.weight_scale_inv": scales, "b.weight": other})
    found = converted(source, tmp_path / "y.safetensors", dtype=word)
    assert found.keys() == {"a.weight", "b.weight"}
    assert found["b.weight"].dtype == DTYPES[word]
    assert same(found["a.weight"], multiplied(numbers, expanded(scales, shape, block), word))


@pytest.mark.parametrize(
    ("grid", "block"), [((6, 1), (1, 40)), ((1, 40), (6, 1)), ((1, 1), (6, 40)), ((1,), (6, 40)), ((), (6, 40))]
)
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_by_rows_or_as_a_whole_is_the_formula(tmp_path, grid, block, kind):
    numbers, scales = float8((6, 40), block, kind)
    source = write(tmp_path / "x.safetensors", {"a.weight": numbers, "a.weight_scale": scales.reshape(grid)})
    found = converted(source, tmp_path / "y.safetensors")
    assert same(found["a.weight"], multiplied(numbers, expanded(scales, (6, 40), block), "bf16"))


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        ({"strategy": "block", "block_structure": [4, 16]}, (4, 16)),
        ({"strategy": "group", "group_size": 8, "block_structure": None}, (1, 8)),
    ],
)
def test_float8_of_compressed_tensors_has_the_blocks_of_its_config(tmp_path, weights, block):
    numbers, scales = float8((6, 40), block)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    source = write(tmp_path / "x.safetensors", {"a.weight": numbers, "a.weight_scale": scales})
    found = converted(source, tmp_path / "y.safetensors")
    assert same(found["a.weight"], multiplied(numbers, expanded(scales, (6, 40), block), "bf16"))
    write(tmp_path / "x.safetensors", {"a.weight": numbers, "a.weight_scale": scales[:, :2]})
    with pytest.raises(CheckpointError, match=r"a.weight_scale must have the shape \(6, 1\) .* got \("):
        converted(source, tmp_path / "y.safetensors")


def test_the_product_is_rounded_once(tmp_path):
    # A little above the middle of two bfloat16, and on it when rounded to float32 first.
    middle = 1 + 2**-8
    value, scale = next(
        (float(value), scale)
        for value in E4M3_VALUES[(E4M3_VALUES >= 1) & (E4M3_VALUES < 2)]
        for near in [np.float32(middle / value)]
        for scale in (near, np.nextafter(near, np.float32(2)))
        if np.float32(value * float(scale)) == middle < value * float(scale)
    )
    numbers = np.full((4, 4), value).astype(ml_dtypes.float8_e4m3fn)
    source = write(tmp_path / "x.safetensors", {"w": numbers, "w_scale_inv": np.full((1, 1), scale, np.float32)})
    once, twice = (1 + 2**-7, 1.0)
    assert nearest(Fraction(value) * Fraction(float(scale)), "bf16") == once
    assert np.float32(value * float(scale)).astype(ml_dtypes.bfloat16) == twice
    assert (converted(source, tmp_path / "y.safetensors")["w"] == once).all()


def test_float8_keeps_the_signs_of_nan_and_zero_and_counts_what_float16_can_not_hold(tmp_path):
    codes = np.uint8([[0x7F, 0xFF, 0x00, 0x80, 0x7E, 0x38]])
    source = write(
        tmp_path / "x.safetensors",
        {"w": codes.view(ml_dtypes.float8_e4m3fn), "w_scale_inv": np.full((1, 1), 256, np.float32)},
    )
    result = checkpoints.convert(source, tmp_path / "y.safetensors", to_layout="same", dtype="f16", dequantize=True)
    assert result.changed == {"w": 1}  # 448 x 256 is inf
    assert checkpoints.read(tmp_path / "y.safetensors")["w"].view(np.uint16).tolist() == [
        [0x7E00, 0xFE00, 0, 0x8000, 0x7C00, 0x5C00]
    ]


def test_what_rounding_changes_is_counted_element_by_element_in_whatever_order_it_is_read(tmp_path):
    blocks, scales = mxfp4((3, 8, 2, 16), low=95, high=160)
    numbers, factors = float8((40, 24), (16, 16))
    source = write(
        tmp_path / "x.safetensors",
        {f"{STEM}_blocks": blocks, f"{STEM}_scales": scales, "w": numbers, "w_scale_inv": factors},
    )
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [16, 16]}}')
    exact = {
        STEM: unpacked(blocks, scales, "f64"),
        "w": numbers.astype(np.float64) * expanded(factors, (40, 24), (16, 16)).astype(np.float64),
    }
    with np.errstate(over="ignore"):
        wanted = {
            name: int(np.count_nonzero((one.astype(np.float16).astype(np.float64) != one) & ~np.isnan(one)))
            for name, one in exact.items()
        }
    result = checkpoints.convert(source, tmp_path / "y.safetensors", to_layout="same", dtype="f16", dequantize=True)
    assert result.changed == wanted
    assert min(wanted.values()) > 20
    exactly = checkpoints.convert(source, tmp_path / "z.safetensors", to_layout="same", dtype="f64", dequantize=True)
    assert exactly.changed == {}


class Spy(containers.Reader):
    """A reader that adds up the bytes that are read of each tensor."""

    format = "memory"

    def __init__(self, path, arrays):
        self.path, self.metadata, self.arrays = path, {}, arrays
        self.tensors = {name: TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items()}
        self.bytes = dict.fromkeys(arrays, 0)

    def files(self):
        return []

    def read_range(self, name, start, stop):
        self.bytes[name] += stop - start
        return np.ascontiguousarray(self.arrays[name]).reshape(-1).view(np.uint8)[start:stop].data


def spied(tmp_path):
    blocks, scales = mxfp4((2, 9, 3, 16))
    numbers, factors = float8((2, 40, 50), (16, 8))
    arrays = {f"{STEM}_blocks": blocks, f"{STEM}_scales": scales, "w": numbers, "w_scale_inv": factors}
    spy = Spy(tmp_path, arrays)
    made = Dequantised(spy, {"quantization_config": {"weight_block_size": [16, 8]}}, "bfloat16")
    return spy, made


def test_any_range_of_bytes_is_made_of_the_blocks_that_it_touches(tmp_path):
    spy, made = spied(tmp_path)
    random = np.random.default_rng(1)
    for name in (f"{STEM}_blocks", "w"):
        size = made.tensors[name].nbytes
        whole = bytes(made.read_range(name, 0, size))
        assert len(whole) == size
        for _ in range(200):
            start, stop = sorted(random.integers(0, size + 1, 2).tolist())
            assert bytes(made.read_range(name, start, stop)) == whole[start:stop]
            into = bytearray(stop - start)
            made.read_into(name, start, memoryview(into))
            assert into == whole[start:stop]
        values = np.frombuffer(whole, np.uint16)
        for _ in range(200):
            rows, run, step = (int(random.integers(1, most)) for most in (9, 40, 220))
            step = step if random.random() < 0.3 else made.tensors[name].shape[-1] * (1 + step % 3)
            last = values.size - (rows - 1) * step - run
            if last < 0:
                continue
            start = int(random.integers(0, last + 1))
            into = np.empty((rows, run), np.uint16).view(ml_dtypes.bfloat16)
            made.read_rows(name, start, step, into)
            wanted = np.lib.stride_tricks.as_strided(values[start:], (rows, run), (2 * step, 2))
            assert (into.view(np.uint16) == wanted).all()
    spy.bytes = dict.fromkeys(spy.bytes, 0)
    made.read_range(f"{STEM}_blocks", 2 * 96 + 70, 2 * 96 + 72)  # the fourth number of the second group of a row
    assert spy.bytes == {f"{STEM}_blocks": 16, f"{STEM}_scales": 1, "w": 0, "w_scale_inv": 0}
    with pytest.raises(CheckpointError, match="was asked for"):
        made.read_range("w", 0, made.tensors["w"].nbytes + 1)


def test_what_rounding_changes_is_counted_in_a_box_of_a_tensor(tmp_path):
    spy, made = spied(tmp_path)
    spy.arrays["w"][np.random.default_rng(2).random((2, 40, 50)) < 0.5] = 0  # which no rounding changes
    exact = spy.arrays["w"].astype(np.float64) * expanded(spy.arrays["w_scale_inv"], (2, 40, 50), (16, 8))
    is_changed = (exact.astype(ml_dtypes.bfloat16).astype(np.float64) != exact) & ~np.isnan(exact)
    wanted = is_changed[:, 5:35, 10:30].transpose(1, 0, 2).ravel()
    axes = ((30, 50, 40), (2, 2000, 20), (20, 1, 1))
    target = TargetTensor(TensorInfo("t", "bfloat16", (30, 2, 20)), "w", (Move("w", 5 * 50 + 10, 0, axes),), "")
    for start, stop in ((0, 1200), (40, 400), (33, 1111)):
        assert rounding_losses(made, target, start, stop) == np.count_nonzero(wanted[start:stop])


def test_numbers_that_lie_in_turn_are_read_many_at_a_time(tmp_path):
    values = np.arange(6000, dtype=np.uint16)
    spy = Spy(tmp_path, {"x": values})
    reads = []
    spy.read_range = lambda name, start, stop: reads.append(stop - start) or values.view(np.uint8)[start:stop].data
    for rows, run_, step, start in ((2000, 1, 3, 1), (7, 5, 5, 2), (3, 4, 900, 11), (1, 6, 0, 4), (2, 3, 1, 0)):
        into = np.empty((rows, run_), np.uint16)
        spy.read_rows("x", start, step, into)
        assert (into == start + step * np.arange(rows)[:, None] + np.arange(run_)).all()
    assert len(reads) == 1 + 1 + 3 + 1 + 2
