"""The options of a conversion, as an object and as keywords."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import ConvertOptions
from attn_bridge.checkpoints.options import ConvertKeywords
from attn_bridge.checkpoints.requests import Request

FUNCTIONS = (
    checkpoints.plan,
    checkpoints.tasks,
    checkpoints.convert,
    checkpoints.convert_share,
    checkpoints.finish,
    checkpoints.verify,
)


@pytest.fixture
def source(tmp_path):
    random = np.random.default_rng(3)
    file = tmp_path / "source.npz"
    np.savez(file, **{name: random.normal(size=(4, 6)).astype(np.float32) for name in ("a.w", "a.v", "b.w")})
    return file


def test_options_and_keywords_give_the_same_bytes(source, tmp_path):
    options = ConvertOptions(to_layout="same", dtype="bf16", drop=["b.*"])
    checkpoints.convert(source, tmp_path / "one.safetensors", options=options)
    checkpoints.convert(source, tmp_path / "two.safetensors", to_layout="same", dtype="bf16", drop="b.*")
    checkpoints.convert(source, tmp_path / "three.safetensors", options=options, dtype="f16")
    one, two, three = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("one", "two", "three"))
    assert one == two != three
    assert sorted(checkpoints.read(tmp_path / "one.safetensors")) == ["a.v", "a.w"]
    assert checkpoints.verify(source, tmp_path / "one.safetensors", options=options).passed


def test_options_say_how_a_run_goes_about_it(source, tmp_path):
    target = tmp_path / "x.npz"
    options = ConvertOptions(to_layout="same", workers=1, task_bytes=1 << 20, max_memory=1 << 30, resume=True)
    checkpoints.convert(source, target, options)
    with pytest.raises(ValueError, match="exists; --overwrite"):
        checkpoints.convert(source, target, ConvertOptions(to_layout="same"))
    checkpoints.convert(source, target, ConvertOptions(to_layout="same", dtype="f16", overwrite=True))
    assert {array.dtype for array in checkpoints.read(target).values()} == {np.dtype(np.float16)}
    assert len(checkpoints.tasks(source, tmp_path / "y.safetensors", ConvertOptions(to_layout="same", workers=3))) > 1


def test_verify_casts_as_the_options_say_without_a_manifest(source, tmp_path):
    target = tmp_path / "bare.safetensors"
    checkpoints.convert(source, target, to_layout="same", dtype="f16")
    next(tmp_path.glob("bare*.json")).unlink()
    assert checkpoints.verify(source, target, to_layout="same", dtype="f16").passed
    assert not checkpoints.verify(source, target, to_layout="same").passed


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_takes_the_options(function, source, tmp_path):
    assert {"options", "keywords"} <= inspect.signature(function).parameters.keys()
    numbers = (0, 1) if function is checkpoints.convert_share else ()
    with pytest.raises(TypeError, match=r"^'layout' is no option of a conversion; did you mean to_layout\?$"):
        function(source, tmp_path / "x.npz", *numbers, layout="torch")
    with pytest.raises(TypeError, match=r"^options \(\{\}\) must be ConvertOptions or None$"):
        function(source, tmp_path / "x.npz", *numbers, {})


def test_options_are_checked_when_they_are_made():
    with pytest.raises(TypeError, match=r"^dtype \(16\) must be a text or None$"):
        ConvertOptions(dtype=16)
    with pytest.raises(TypeError, match=r"^settings \('num_heads=2'\) must be a mapping of names to values, or None$"):
        ConvertOptions(settings="num_heads=2")
    with pytest.raises(TypeError, match=r"^overwrite \('yes'\) must be True or False$"):
        ConvertOptions(overwrite="yes")
    with pytest.raises(ValueError, match=r"^max_memory \('1G'\) must be a whole number of bytes, or None$"):
        ConvertOptions(max_memory="1G")
    with pytest.raises(ValueError, match=r"^--drop \(\) must be a pattern of names"):
        ConvertOptions(drop=[""])


def test_keywords_and_fields_are_the_same():
    names = {field.name for field in dataclasses.fields(ConvertOptions)}
    assert ConvertKeywords.__annotations__.keys() == names
    request = Request.of("a", "b", ConvertOptions(drop="x.*", step=3))
    assert Request(**dataclasses.asdict(request)) == request
