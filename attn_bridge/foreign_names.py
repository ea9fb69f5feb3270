"""Keywords that users know from other libraries: a call that gets one names ours, the same in both backends.

They are those of `torch.nn.MultiheadAttention`, `torch.nn.functional.scaled_dot_product_attention`,
`flax.nnx.MultiHeadAttention`, `jax.nn.dot_product_attention` and the models of `transformers`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

_MASKS = ("attention_mask", "mask")
_INPUTS = ("x", "query", "tokens", "ids")
_PROJECTED = "queries, keys and values are projected from it"
_WEIGHTS = "a bool, for the weights of each head"
_CACHE = "what init_cache returns; the call returns it, too"
_MODE = "dropout follows the mode of the module, train() or eval()"

OURS: dict[str, tuple[tuple[str, ...], str]] = {
    "attn_mask": (_MASKS, "bool, True = may be attended, a (T, S) mask as mask[None, None]"),
    "mask": (_MASKS, "bool, True = may be attended"),
    "key_padding_mask": (_MASKS, "True = may be attended, so ~key_padding_mask"),
    "padding_mask": (_MASKS, "True = may be attended"),
    "attention_mask": (_MASKS, "bool, True = may be attended"),
    "encoder_attention_mask": (("source_mask", *_MASKS), "True = may be attended"),
    "key_value_seq_lengths": (_MASKS, "attn_bridge.masks.padding(lengths)"),
    "local_window_size": (_MASKS, "attn_bridge.masks.sliding_window(size)"),
    "is_causal": (_MASKS, "attn_bridge.masks.causal(), where the class or the mask of its config is not causal"),
    "bias": ((), "a bias follows from the position of the config"),
    "query": (("x",), _PROJECTED),
    "key": (("context", "x"), "keys and values are projected from it"),
    "value": (("context", "x"), "keys and values are projected from it"),
    "inputs_q": (("x", "query"), _PROJECTED),
    "inputs_k": (("context", "x", "key"), "keys and values are projected from it"),
    "inputs_v": (("context", "x", "value"), "keys and values are projected from it"),
    "hidden_states": (_INPUTS, ""),
    "inputs_embeds": (_INPUTS, ""),
    "input_ids": (_INPUTS, ""),
    "decoder_input_ids": (_INPUTS, ""),
    "decoder_attention_mask": (("attention_mask",), "True = may be attended"),
    "input_features": (("source",), ""),
    "encoder_hidden_states": (("context",), ""),
    "key_value_states": (("context",), ""),
    "past_key_values": (("cache",), _CACHE),
    "past_key_value": (("cache",), _CACHE),
    "layer_past": (("cache",), _CACHE),
    "kv_cache": (("cache",), _CACHE),
    "use_cache": (("cache",), _CACHE),
    "decode": (("cache",), _CACHE),
    "position_ids": (("positions",), ""),
    "cache_position": (("positions",), ""),
    "need_weights": (("return_weights",), _WEIGHTS),
    "average_attn_weights": (("return_weights",), _WEIGHTS),
    "output_attentions": (("return_weights",), _WEIGHTS),
    "sow_weights": (("return_weights",), _WEIGHTS),
    "dropout_p": (("dropout",), "a rate"),
    "dropout_rate": (("dropout",), "a rate"),
    "dropout_rng": (("rng", "rngs"), ""),
    "enable_gqa": ((), "the shapes tell how heads share keys"),
    "deterministic": ((), _MODE),
    "rngs": ((), "rngs is an argument of the constructor"),
    "train": ((), _MODE),
    "training": ((), _MODE),
}
"""Name of a keyword elsewhere -> the names that may take its place, the first that a call has, and how they differ."""


def names_ours(call: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate a call, to refuse keywords of other libraries by a message that names ours.

    Raises:
        TypeError: a keyword in `OURS` that `call` has not; any other is left to Python.
    """
    foreign, parameters = foreign_names(call), inspect.signature(call).parameters

    @functools.wraps(call)
    def run(*arguments: P.args, **options: P.kwargs) -> Result:
        for name in options:
            if name in foreign:
                owner = type(arguments[0]).__name__ if "self" in parameters else call.__name__
                raise TypeError(advice(owner, name, parameters))
        return call(*arguments, **options)

    return run


def foreign_names(call: Callable[..., object]) -> frozenset[str]:
    """Return the names in `OURS` that a call does not take."""
    parameters = inspect.signature(call).parameters
    if any(row.kind is inspect.Parameter.VAR_KEYWORD for row in parameters.values()):
        return frozenset()
    return frozenset(OURS) - parameters.keys()


def advice(owner: str, name: str, parameters: Iterable[str]) -> str:
    """Return the message for a keyword of another library.

    Args:
        owner: class or function that got it.
        name: the keyword, in `OURS`.
        parameters: names that the call takes.
    """
    candidates, note = OURS[name]
    ours = next((candidate for candidate in candidates if candidate in parameters), None)
    if ours is not None:
        return f"{owner} takes no {name}=; give {ours}=" + (f" ({note})" if note else "")
    if not candidates:
        return f"{owner} takes no {name}=: {note}"
    arguments = [
        parameter for parameter in parameters if parameter not in ("self", "_misplaced", "deterministic", "rngs")
    ]
    return f"{owner} takes no {name}=, nor another name for it; its arguments are {', '.join(arguments)}"
