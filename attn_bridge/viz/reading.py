"""Attention weights of a module of either backend, as NumPy arrays."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np

from .. import backends

Array = np.ndarray

NO_WEIGHTS = (
    "{what} takes no return_weights; give a module of torch_attn or jax_attn that does, or the weights themselves"
)


def weights(module: Any, x: Any, **call: Any) -> Array:
    """Return the attention weights of a call, before dropout.

    Args:
        module: a module of `torch_attn` or `jax_attn` whose call takes ``return_weights``.
        x: its input: an array, or a tuple of positional ones, of NumPy, torch or JAX.
        **call: keywords of the call, such as ``attention_mask``.

    Returns:
        ``(B, H, T, S)`` or the shape that the module returns; float32, or float64 of a float64 module.

    Raises:
        TypeError: it is not a module, or takes no ``return_weights``.
        ValueError: the call fails.
    """
    framework = backends.framework_of(module)
    if framework is None or isinstance(module, tuple):
        raise TypeError(f"module must be a torch.nn.Module or a flax.nnx.Module, got {type(module).__name__}")
    called = module.forward if framework == "torch" else type(module).__call__
    if "return_weights" not in inspect.signature(called).parameters:
        raise TypeError(NO_WEIGHTS.format(what=type(module).__name__))
    # The judge runs any module as a function of its weights. It is a layer above this package, so loaded by name.
    subject = importlib.import_module("attn_parity.compare.prepare").subject_of(module)
    calls = importlib.import_module("attn_parity.samples.calls")
    backend = backends.load(framework)
    module_weights = backend.get_weights(module)
    inputs = tuple(map(backends.as_numpy, x)) if isinstance(x, tuple) else (backends.as_numpy(x),)
    named = {key: backends.as_numpy(value) for key, value in call.items()}
    arguments = importlib.import_module("attn_parity.sides.subject").Arguments(
        inputs, {**named, "return_weights": True}
    )
    dtype = next((str(one.dtype) for one in module_weights.values() if "float" in str(one.dtype)), "float32")
    outputs = subject.run(module_weights, calls.in_dtype(arguments, dtype), None).outputs
    attention_weights: Array = outputs[1]
    return attention_weights if attention_weights.dtype == np.float64 else attention_weights.astype(np.float32)


def per_head(source: object, batch: int, name: str = "weights") -> Array:
    """Return the weights of one sequence as ``(H, T, S)``.

    Args:
        source: ``(T, S)``, ``(H, T, S)`` or ``(B, H, T, S)``.
        batch: which sequence of a batch.
        name: their name in messages.

    Raises:
        ValueError: other axes, a missing sequence, or numbers that are not finite.
    """
    array = np.asarray(backends.as_numpy(source))
    if array.ndim not in (2, 3, 4) or not array.size or not np.issubdtype(array.astype(np.float64).dtype, np.floating):
        raise ValueError(f"{name} must be (T, S), (H, T, S) or (B, H, T, S), got {array.shape}")
    array = array.astype(np.float64)
    if array.ndim == 4:
        if not -len(array) <= batch < len(array):
            raise ValueError(f"batch ({batch}) must be below {len(array)}, the number of sequences")
        array = array[batch]
    array = array[None] if array.ndim == 2 else array
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite")
    return array
