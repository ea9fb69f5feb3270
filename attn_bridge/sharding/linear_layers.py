"""Linear layers that replaced those of a module: their biases and the widths of their inputs.

Outputs are checked where they are split into heads: `heads`.
"""

from __future__ import annotations

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


def misfit(config: object, layers: Mapping[str, Widths]) -> str | None:
    """Return the reason why a product of linear layers failed; None if their widths are those of the config.

    Args:
        config: of the module; one without a table of parameters has no widths.
        layers: widths by the path of the layer in the module.
    """
    for name, (_, outputs, bias) in layers.items():
        if bias not in (None, outputs):
            return _of_bias(name, bias, outputs)
    if not isinstance(config, Config) or type(config).parameters is Config.parameters:
        return None
    for row in config.parameters:
        name, _, leaf = row.rule.torch.rpartition(".")
        if leaf == "weight" and name in layers and layers[name][0] != row.shape[1]:
            return f"width of the input of {name} ({layers[name][0]}) must be {row.shape[1]}"
    return None


def _of_bias(name: str, bias: int | None, outputs: int) -> str:
    return f"width of the bias of {name} ({bias}) must be that of its output ({outputs})"
