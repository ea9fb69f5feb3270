"""Loading the book's checkpoints, which hold a causal ``mask`` buffer that our modules compute instead."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

BUFFER = "mask"


def accept_book_mask(module: nn.Module) -> None:
    """Let `module` load a state dict that holds the book's ``mask`` buffer, with ``strict=True``, too.

    The buffer is checked to be the causal mask of ``module.config.context_length`` (ones above the diagonal = hidden),
    then dropped. Any other tensor of that name is an error of `load_state_dict`.
    """
    module.register_load_state_dict_pre_hook(_check_and_drop)


def _check_and_drop(
    module: nn.Module,
    state_dict: dict[str, object],
    prefix: str,
    local_metadata: Mapping[str, object],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    name = prefix + BUFFER
    if name not in state_dict:
        return
    buffer = state_dict.pop(name)
    size = module.config.context_length
    if not isinstance(buffer, Tensor) or tuple(buffer.shape) != (size, size):
        shape = tuple(buffer.shape) if isinstance(buffer, Tensor) else type(buffer).__name__
        error_msgs.append(f"{name} must be the causal mask of shape ({size}, {size}), got {shape}")
    elif not torch.equal(buffer != 0, torch.ones(size, size, dtype=torch.bool, device=buffer.device).triu(diagonal=1)):
        error_msgs.append(f"{name} must be the causal mask: non-zero above the diagonal, zero elsewhere")
