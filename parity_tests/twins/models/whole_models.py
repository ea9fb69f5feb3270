"""Makes `GPTModel` and `BertEncoder` in both frameworks, and computes them in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

import torch_attn
from attn_bridge import transfer
from attn_parity.sides.subject import Arguments, load_adapter
from jax_attn import backend as jax_backend
from parity_tests.support.models.whole_models import WholeModel, draw
from torch_attn import backend as torch_backend

Result = tuple[np.ndarray, dict[str, np.ndarray]]
"""An output, and the gradients of the parameters under their torch names."""


def make_torch(model: WholeModel, dtype: str = "float32", **changes: Any) -> torch.nn.Module:
    """Return a model with the weights that torch draws."""
    return getattr(torch_attn, model.name)({**model.config, **changes}, dtype=getattr(torch, dtype)).eval()


def make_flax(model: WholeModel, dtype: str = "float32", **changes: Any) -> nnx.Module:
    """Return a model of zeros, which costs no time."""
    return jax_backend.build_blank(model.name, model.spec_of(**changes), dtype)


def on_torch(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return arrays as torch takes them."""
    return {name: torch.from_numpy(array) for name, array in inputs.items()}


@jax.jit
def call(model: nnx.Module, inputs: dict[str, Any]) -> Any:
    """Call a Flax model."""
    return model(**inputs)


def cotangent(model: WholeModel) -> np.ndarray:
    """Return a cotangent of the output."""
    return np.random.default_rng(1).normal(size=model.shape)


@functools.cache
def weights(model: WholeModel) -> dict[str, np.ndarray]:
    """Return drawn weights in float64."""
    return draw(model.spec_of())


@functools.cache
def results(model: WholeModel) -> dict[str, Result]:
    """Return what each framework computes in float64 from the same weights; Flax has them from torch."""
    plain = make_torch(model, "float64")
    torch_backend.set_weights(plain, weights(model))
    call, cotangents = Arguments((), model.inputs), [cotangent(model)]
    run = load_adapter("torch").subject_of(plain).run(weights(model), call, cotangents)
    found = {"torch": (run.outputs[0], run.parameter_gradients)}
    with jax_backend.precision("float64"):
        flax = make_flax(model, "float64")
        transfer(plain, flax)
        run = load_adapter("flax").subject_of(flax).run(jax_backend.get_weights(flax), call, cotangents, mode="quick")
    found["flax"] = (run.outputs[0], plain.config.rules().convert(run.parameter_gradients, "flax"))
    return found


def assert_close(actual: np.ndarray, wanted: np.ndarray, tolerance: float, scale: float | None = None) -> None:
    """Check the largest difference against the largest value wanted, or against `scale`."""
    assert actual.shape == wanted.shape
    assert np.abs(actual - wanted).max() <= tolerance * (np.abs(wanted).max() if scale is None else scale)
