"""Claims of a module: names, attributes and arguments by which it promises a law that not every module obeys."""

from __future__ import annotations

import re

from ...sides.arrays import is_float
from ..side import OneSide

FLAGS = ("is_causal", "causal")
"""Attributes and arguments of modules that are causal where they are true."""

CAUSAL_WORDS = frozenset({"causal", "autoregressive"})
"""Words in the name of a module or function that claim causality."""

MODEL_WORDS = frozenset({"gpt"})
"""The same of whole models, which take ids; their layers may get the mask from outside."""

ATTENTION_WORDS = frozenset({"attention", "attn"})

SETS = frozenset(
    {("torch.nn.modules.activation", "MultiheadAttention"), ("flax.nnx.nn.attention", "MultiHeadAttention")}
    | {("flax.linen.attention", name) for name in ("MultiHeadAttention", "MultiHeadDotProductAttention")}
)
"""Home and name of stock attention without positions."""


def words_of(name: str) -> list[str]:
    """Return the words of a name, in lower case: ``GPT2Model`` gives ``gpt``, ``2``, ``model``."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)]


def claims_causality(side: OneSide) -> str:
    """Return how a side claims to be causal; "" if it does not."""
    if "causality" in side.asserted:
        return "as you ask"
    for name in FLAGS:
        value = side.given.get(name, side.arguments.get(name))
        if value is True:
            return f"its argument {name} is True"
        if value is False:
            return ""
    name = getattr(side.root, "__name__", side.name) if not side.parts else side.name
    takes_ids = not is_float(side.call.leaves[0])
    if (CAUSAL_WORDS | (MODEL_WORDS if takes_ids else frozenset())) & set(words_of(name)):
        return f"its name is {name}"
    return _by_config(side.root) or _by_attributes(side) or _by_parts(side)


def _by_config(root: object) -> str:
    config = getattr(root, "config", None)
    mask: object = getattr(config, "mask", None)
    if type(mask).__module__.startswith("attn_bridge.") and hasattr(mask, "visibility"):
        # The second of two tokens may see the first, and the first must not see the second.
        sees = mask.visibility(range(1), range(1, 2))
        return "its config's mask is causal" if sees is False else ""
    return "its config's is_decoder is True" if getattr(config, "is_decoder", None) is True else ""


def _by_attributes(side: OneSide) -> str:
    for name in FLAGS:
        if getattr(side.root, name, None) is True and "attention_mask" not in side.arguments:
            return f"its {name} is True"
    if "input_ids" not in side.arguments or "decoder_input_ids" in side.arguments:
        return ""
    flags = [getattr(child, "is_causal", None) for child in side.parts.values()]
    values = [flag for flag in flags if isinstance(flag, bool)]
    return "is_causal of each attention is True" if values and all(values) else ""


def _by_parts(side: OneSide) -> str:
    """Return the class of the attention if every attention of a side has a causal name."""
    types = [one.type for one in side.subject.modules() if one.path]
    attentions = [name for name in types if ATTENTION_WORDS & set(words_of(name))]
    if attentions and all("causal" in words_of(name) for name in attentions):
        return f"its attention is {attentions[0]}"
    return ""


def claims_no_positions(side: OneSide) -> str:
    """Return how a side claims that the order of its tokens is free; "" if it does not."""
    if "keys" in side.asserted:
        return "as you ask"
    homes = {(base.__module__, base.__qualname__) for base in type(side.root).__mro__}
    return f"{side.name} has no positions" if homes & SETS else ""
