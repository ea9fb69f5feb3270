"""The named optimizers: the same update in torch and in optax, with a note for the reader on how they were matched."""

from __future__ import annotations

from collections.abc import Sequence

from ..pairing import Match
from ..sides.subject import load_adapter
from .stepping import Hyperparameters


def optimizers_of(
    optimizer: str | tuple[object, object], lr: float, matches: Sequence[Match]
) -> tuple[tuple[object, object], list[str]]:
    """Return both sides' optimizers, and how they were reconciled.

    Args:
        optimizer: name of one, or the pair that the user gave.
        lr: learning rate of a named one.
        matches: the parameters; of those with one axis in torch none decays.
    """
    if not isinstance(optimizer, str):
        return optimizer, ["optimizers: the pair that was given, as they are"]
    values = Hyperparameters(lr)
    matches = [match for match in matches if match.first.parameter.role != "state"]
    decaying = [match for match in matches if len(match.first.parameter.shape) > 1]
    if optimizer == "adamw":
        b1, b2 = values.betas
        settings = [
            f"adamw: lr {lr:g}, betas {b1:g} and {b2:g}; eps {values.eps:g} outside the square root, added to the "
            "bias-corrected moment (torch's place; optax: eps, with eps_root=0)",
            f"weight decay {values.weight_decay:g}, decoupled, times lr (defaults: torch 0.01, optax 0.0001); only "
            f"parameters that have two or more axes in torch decay, {len(decaying)} of {len(matches)} (both's default: "
            "all)",
            "bias correction by 1 - beta ** t on both sides; torch computes it in float64, optax in float32",
        ]
    elif optimizer == "momentum":
        settings = [
            f"momentum: lr {lr:g}; buffer = {values.momentum:g} * buffer + gradient, step = lr * buffer "
            "(torch: dampening=0, nesterov=False; optax: trace); no weight decay"
        ]
    else:
        settings = [f"sgd: lr {lr:g}; no momentum, no weight decay"]
    torch_names = [match.first.source for match in decaying]
    flax_names = [match.second.source for match in decaying]
    pair = (
        load_adapter("torch", "training").optimizer(optimizer, values, torch_names),
        load_adapter("flax", "training").optimizer(optimizer, values, flax_names),
    )
    return pair, settings
