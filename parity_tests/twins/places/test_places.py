"""The place that is named, for a fault at every place in the code, in pairs of several styles and frameworks."""

from __future__ import annotations

import itertools

import pytest
import torch

from . import planted_places as planted
from .planted_places import FlaxBlock, FlaxFlatBlock, FlaxModel, TorchBlock, TorchFlatBlock, TorchModel

STYLES = {
    "torch, flax": (TorchBlock, FlaxBlock),
    "torch, flat flax": (TorchBlock, FlaxFlatBlock),
    "flat torch, flax": (TorchFlatBlock, FlaxBlock),
    "torch, torch": (TorchBlock, TorchBlock),
    "flax, flat flax": (FlaxBlock, FlaxFlatBlock),
}

NESTED = {
    # spot: (module whose code it is in, what it lies between); "" is the block
    "block start": ("", ("", "norm1")),
    "normed": ("", ("norm1", "attn")),
    "attn start": ("attn", ("attn", "attn.q_proj")),
    "before v": ("attn", ("attn.k_proj", "attn.v_proj")),
    "scores": ("attn", ("attn.v_proj", "attn.out_proj")),
    "context": ("attn", ("attn.v_proj", "attn.out_proj")),
    "attn end": ("attn", ("attn.out_proj", "attn")),
    "residual": ("", ("attn", "norm2")),
    "between": ("", ("attn", "norm2")),
    "inner": ("mlp", ("mlp.fc1", "mlp.fc2")),
    "mlp end": ("mlp", ("mlp.fc2", "mlp")),
    "after mlp": ("", ("mlp", "")),
    "block end": ("", ("mlp", "")),
    "linear": ("attn.out_proj", None),
}

FLAT = {
    # where one side has no module for the attention, its code is the block's
    "normed": ("", ("norm1", "q_proj")),
    "attn start": ("", ("norm1", "q_proj")),
    "before v": ("", ("k_proj", "v_proj")),
    "scores": ("", ("v_proj", "out_proj")),
    "context": ("", ("v_proj", "out_proj")),
    "attn end": ("", ("out_proj", "norm2")),
    "residual": ("", ("out_proj", "norm2")),
    "between": ("", ("out_proj", "norm2")),
    "linear": ("out_proj", None),
}
FLAT_FLAX = {
    "inner": ("", ("mlp.fc1", "mlp.fc2")),
    "mlp end": ("", ("mlp.fc2", "")),
    "after mlp": ("", ("mlp.fc2", "")),
    "block end": ("", ("mlp.fc2", "")),
}
FLAT_TORCH = {
    "inner": ("ff", ("ff.0", "ff.2")),
    "mlp end": ("ff", ("ff.2", "ff")),
    "after mlp": ("", ("ff", "")),
    "block end": ("", ("ff", "")),
}


def expected(style, side, spot, direction):
    """Return the path and the pairs of paths that are right, with the first side's names."""
    first, second = STYLES[style]
    known = dict(NESTED)
    if FlaxFlatBlock in (first, second):
        known |= {
            key: (path, between and tuple(_in_attention(one) for one in between))
            for key, (path, between) in FLAT.items()
        }
        known |= {"linear": ("attn.out_proj", None)} | FLAT_FLAX
    if first is TorchFlatBlock:
        known |= FLAT | FLAT_TORCH
        if side == 0 and spot == "mlp end":  # the Sequential has no place for it
            known[spot] = ("", ("ff", ""))
    if (first, second) == (TorchBlock, TorchBlock):  # both have a module for the activation
        known["inner"] = ("mlp", ("mlp.act", "mlp.fc2"))
    path, between = known[spot]
    right = {between}
    if spot == "scores" and direction == "backward":  # what it comes back to are query and key
        right |= {(between[0].replace("v_", "q_"), between[1]), (between[0].replace("v_", "k_"), between[1])}
    if spot == "residual" and direction == "forward":  # the code is on the way past the attention
        right.add(("", between[1]))
    if spot == "before v" and direction == "forward":  # neither query nor key goes into it
        right = {(path if path else "norm1", between[1])}
    whole = "blocks.0"
    named = {one and tuple(f"{whole}.{name}".rstrip(".") for name in one) for one in right}
    return f"{whole}.{path}".rstrip("."), named


def _in_attention(name):
    return f"attn.{name}" if name.endswith("_proj") else name


def model(block, spot="", fault=""):
    """Return a model of one block, with a fault in the part that has the spot."""
    torch.manual_seed(0)
    made = (TorchModel if block in (TorchBlock, TorchFlatBlock) else FlaxModel)(block, depth=1)
    if spot:
        part = made.blocks[0]
        for name in NESTED[spot][0].split("."):
            part = getattr(part, name, part)
        part.faults = {spot: fault}
    return made


FORWARD, BACKWARD = ("scale", "roll", "shift"), ("gradient", "detach")


def cases(style):
    """Yield a fault for every spot, on one side or the other, forward or backward; both where that is cheap."""
    start = list(STYLES).index(style)
    for number, (spot, direction) in enumerate(itertools.product(NESTED, ("forward", "backward")), start):
        is_backward = direction == "backward"
        if style != "torch, torch" and (number // 2 + start) % 2 != is_backward:
            continue
        faults = FORWARD[: 2 if spot == "scores" else 3] if direction == "forward" else BACKWARD
        side = (number // 2) % 2
        if spot == "inner" and STYLES[style][side] is TorchFlatBlock:
            side = 1
        yield spot, direction, faults[number % len(faults)], side


@pytest.mark.parametrize("style", STYLES)
def test_the_place_is_right_wherever_the_fault_is(style):
    wrong, whole = [], []
    for spot, direction, fault, side in cases(style):
        blocks = STYLES[style]
        pair = [model(block, *((spot, fault) if number == side else ())) for number, block in enumerate(blocks)]
        place = planted.place(*pair).divergence
        found = place and (place.path, place.direction, place.between)
        path, right = expected(style, side, spot, direction)
        row = (spot, fault, side, found, (path, right))
        if not found or (found[0], found[1]) != (path, direction) or (found[2] not in right and found[2] is not None):
            wrong.append(row)
        elif found[2] not in right:
            whole.append(row)  # the module is right, the code in it is not narrowed down
    assert not wrong, "\n".join(map(str, wrong))
    assert len(whole) <= 2, "\n".join(map(str, whole))
