"""Single layers of `transformers` models, each loaded alone and run by the model's own code.

The model is built with empty layers except one, and `transformers` loads that layer's tensors in the usual way. The
model is then called with embeddings: it makes positions, masks and rotary tables and calls the layer at its usual
index; the layer's output is the result.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_attn.backend import from_numpy

from ...sides.subject import Array
from .running.promotion import promoted

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FEW = 8
"""Tokens of a model whose embeddings are never looked up."""


class UnknownModelError(Exception):
    """`transformers` is missing, or does not support the model; the message names the cause."""


class ModelLayer(nn.Module):
    """One layer of a model of `transformers`, called with the layer's input.

    Args:
        model: the model without its head, whose other layers are empty.
        layers: the model's list of layers.
        index: the layer that is not empty.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList, index: int):
        super().__init__()
        self.layer = layers[index]
        call = _Call()
        # In a tuple, so that what holds no weight of the layer is no submodule.
        self._around = (model, call)
        layers[index] = _Stage(self.layer, call)
        model.requires_grad_(False)  # its embeddings, which were never loaded

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x` of shape ``(B, T, D)``."""
        model, call = self._around
        call.inputs = x
        try:
            model(inputs_embeds=x, use_cache=False)
        except _Done:
            assert call.result is not None
            return call.result
        finally:
            call.inputs = call.result = None
        raise RuntimeError("the model has not called its layer")


class Ends(nn.Module):
    """Embeddings, last norm and head of a model of `transformers`, without its layers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``(B, T, V)``."""
        logits: Tensor = self.model(input_ids=tokens.long(), use_cache=False).logits
        return logits


class _Done(Exception):  # noqa: N818 - it ends a call, and nothing has gone wrong
    pass


@dataclasses.dataclass
class _Call:
    inputs: Tensor | None = None
    result: Tensor | None = None


class _Stage(nn.Module):
    """Wrapper at the layer's index: passes the given input to the layer and ends the model's call with its output."""

    def __init__(self, layer: nn.Module, call: _Call):
        super().__init__()
        self._layer, self._call = (layer,), call

    def forward(self, hidden_states: object, *args: object, **kwargs: object) -> object:
        result = self._layer[0](self._call.inputs, *args, **kwargs)
        self._call.result = result[0] if isinstance(result, tuple) else result
        raise _Done


class _Empty(nn.Module):
    """Placeholder for a layer in front of it; returns its input, or the first of its inputs."""

    def forward(self, hidden_states: object, *args: object, **kwargs: object) -> object:
        return hidden_states, None


def read_config(folder: Path) -> PretrainedConfig:
    """Return the config of a folder as `transformers` reads it.

    Raises:
        UnknownModelError: it is not installed, or knows no such model.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UnknownModelError("transformers is not installed")
    import transformers

    with _quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except (ValueError, KeyError, OSError) as error:
            raise UnknownModelError(f"transformers does not know it: {' '.join(str(error).split())[:120]}") from None
    config = config.get_text_config()
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnknownModelError(f"transformers has no causal language model of type {config.model_type}")
    return config


def layer(config: PretrainedConfig, index: int, state: Mapping[str, Array], dtype: str) -> ModelLayer:
    """Return a layer with its tensors.

    Args:
        config: of `read_config`.
        index: which layer.
        state: its tensors under the names that a checkpoint has, of the whole model.
        dtype: of the parameters.
    """
    config = copy.deepcopy(config)
    config.vocab_size, config.pad_token_id = FEW, None
    model, layers = _loaded(config, [index], state, dtype)
    return ModelLayer(model.base_model, layers, index).eval()


def ends(config: PretrainedConfig, rows: int, state: Mapping[str, Array], dtype: str) -> Ends:
    """Return embeddings, last norm and head of the first `rows` tokens."""
    config = copy.deepcopy(config)
    config.vocab_size, config.pad_token_id = rows, None
    model, _ = _loaded(config, [], state, dtype)
    return Ends(model).eval()


def _loaded(
    config: PretrainedConfig, kept: list[int], state: Mapping[str, Array], dtype: str
) -> tuple[nn.Module, nn.ModuleList]:
    """Return a model of which only some layers are not empty, as `transformers` loads it, and its list of layers."""
    import transformers

    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    made: list[nn.ModuleList] = []

    def init(self: nn.Module, config: PretrainedConfig, *args: object, **kwargs: object) -> None:
        kind.__init__(self, config, *args, **kwargs)
        layers = _layers(self.base_model, config)
        for number in range(len(layers)):
            if number not in kept:
                layers[number] = _Empty()
        del layers[max(kept, default=-1) + 1 :]
        made[:] = [layers]

    pruned: Any = type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
    tensors = {name: from_numpy(array, name, adopt=array.flags.writeable) for name, array in state.items()}
    with _quiet():
        model, loading = pruned.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    missing = [name for name in loading["missing_keys"] if not kept or f".{kept[0]}." in f".{name}."]
    wrong = [*missing, *loading["unexpected_keys"], *(name for name, *_ in loading["mismatched_keys"])]
    if wrong:
        raise UnknownModelError(f"transformers does not load {', '.join(sorted(map(str, wrong))[:3])}")
    _sharpen(model)
    _register(model)
    return model, made[0]


def _register(model: nn.Module) -> None:
    """Make parameters of the floating-point buffers that checkpoints hold (biases of routers): ours are parameters."""
    for module in list(model.modules()):
        for name, buffer in list(module._buffers.items()):
            if _is_floating(buffer) and name not in module._non_persistent_buffers_set:
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer))


def _sharpen(model: nn.Module) -> None:
    """Give tables and scales that no checkpoint holds their float64 values; lower precisions round them as they run."""
    with promoted(), torch.no_grad():
        for module in model.modules():
            tables = [name for name in module._non_persistent_buffers_set if _is_floating(module._buffers[name])]
            if tables:
                for name in tables:
                    module._buffers[name] = module._buffers[name].double()
                registered = dict(module._parameters)  # which are no part of it
                module._parameters.update({name: _blank(one) for name, one in registered.items()})
                model._init_weights(module)
                module._parameters.update(registered)
            if type(module).__name__ == "BloomGelu":  # which has sqrt(2 / pi) to 8 digits
                module.forward = functools.partial(torch.nn.functional.gelu, approximate="tanh")


def _blank(parameter: nn.Parameter | None) -> nn.Parameter | None:
    return None if parameter is None else nn.Parameter(torch.empty(parameter.shape, dtype=torch.float64))


def _is_floating(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.is_floating_point()


def _layers(model: nn.Module, config: PretrainedConfig) -> nn.ModuleList:
    """Return the list of a model's layers.

    Raises:
        UnknownModelError: it has none of that length.
    """
    for child in model.modules():
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
            return child
    raise UnknownModelError(f"{type(model).__name__} has no list of {config.num_hidden_layers} layers")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep `transformers` from writing on the terminal."""
    from transformers.utils import logging

    their: Any = logging
    logger = their.get_logger("transformers")
    level, bars = logger.level, their.is_progress_bar_enabled()
    logger.setLevel(their.CRITICAL)
    their.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if bars:
            their.enable_progress_bar()
