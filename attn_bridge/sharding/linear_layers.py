"""Linear layers that replaced those of a module: their biases and the widths of their inputs.

Outputs are checked where they are split into heads: `heads`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..specs.base import Config

Widths = tuple[int, int, int | None]
"""Widths of the input, of the output, and of the bias; None without one."""


def check_bias(name: str, bias: int, outputs: int) -> None:
    """Check the width of a linear layer's bias, of which a single number would be broadcast.

    Raises:
        ValueError: it is not that of the output.
    """
    if bias != outputs:
        raise ValueError(_of_bias(name, bias, outputs))


def misfit(config: object, layers: Mapping[str, Widths], message: str) -> str | None:
    """Return the reason why a product or sum in linear layers failed; None if their widths are not the reason.

    Args:
        config: of the module; one without a table of parameters has no widths.
        layers: widths by the path of the layer in the module.
        message: of the framework's error, which has the sizes: a module may hold a part of its heads by right.
    """
    sizes = set(map(int, re.findall(r"[0-9]+", message)))
    for name, (_, outputs, bias) in layers.items():
        if bias not in (None, outputs) and bias in sizes:
            return _of_bias(name, bias, outputs)
    if not isinstance(config, Config) or type(config).parameters is Config.parameters:
        return None
    for row in config.parameters:
        name, _, leaf = row.rule.torch.rpartition(".")
        width = layers[name][0] if leaf == "weight" and name in layers else row.shape[-1]
        if width != row.shape[-1] and width in sizes:
            return f"width of the input of {name} ({width}) must be {row.shape[-1]}"
    return None


def _of_bias(name: str, bias: int | None, outputs: int) -> str:
    return f"width of the bias of {name} ({bias}) must be that of its output ({outputs})"
