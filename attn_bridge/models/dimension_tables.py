"""Tables of the names of axes: our tensors, by kind of layer, and the symbols of their sizes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A size that several axes share.

    Attributes:
        scope: path of the module or model that has it.
        kind: a key of `WORDS`.
    """

    scope: str
    kind: str


WORDS = {
    "width": "width of the model",
    "input": "width of the input",
    "context": "width of the context",
    "output": "width of the output",
    "token width": "width of the embeddings",
    "logit width": "width of the input of the head",
    "vocab": "number of tokens",
    "positions": "number of positions",
    "types": "number of token types",
    "hidden": "width of the feed-forward layers",
    "expert": "width of an expert",
    "shared": "width of the shared expert",
    "experts": "number of experts",
    "queries": "width of all query heads",
    "keys": "width of all key heads",
    "values": "width of all value heads",
    "head": "width of a head",
    "heads": "number of heads",
    "value head": "width of a value head",
    "query latent": "width of the latent of queries",
    "latent": "width of the latent of keys and values",
    "gate latent": "width of the latent of gates",
    "decay latent": "width of the latent of decays",
    "index queries": "width of all heads of the indexer",
    "index key": "width of a head of the indexer",
    "index heads": "number of heads of the indexer",
    "rotary": "number of rotary channels",
    "norm": "width of the norm",
    "channels": "number of channels of the convolution",
    "state": "width of the state of a channel",
    "step latent": "width of the latent of steps",
    "layer vocab": "number of tokens with per-layer embeddings",
    "layer parts": "width of the per-layer embeddings of all layers",
    "layer part": "width of the per-layer embedding of a layer",
    "laurel": "rank of LAuReL",
    "streams": "number of streams",
    "coefficients": "number of coefficients of streams",
}
"""Kind of a symbol -> its name in messages."""


Table = dict[str, tuple[str, ...]]
"""Name of a tensor below its module -> the symbols of its axes."""


def _weights(output: str, context: str, *names: str) -> Table:
    """Return the symbols of the matrices of linear layers without biases."""
    return {f"{name}.weight": (output, context) for name in names}


def _linear(output: str, context: str, *names: str) -> Table:
    """Return the symbols of linear layers, which may have biases."""
    return {**_weights(output, context, *names), **{f"{name}.bias": (output,) for name in names}}


# Symbols of attention by what the tensor is called below its module. "input", "context" and "output" are the width of
# the model in a block of one. Which of "queries", "keys" and "values" are equal depends on the kind of attention.
PLAIN: Table = {
    **_linear("queries", "input", "W_query", "W_gate"),
    **_linear("keys", "context", "W_key"),
    **_linear("values", "context", "W_value"),
    **_linear("heads", "input", "W_head_gate"),
    **_linear("output", "mixed", "out_proj"),
    "W_query": ("input", "queries"),
    "W_key": ("context", "keys"),
    "W_value": ("context", "values"),
    **dict.fromkeys(("q_norm.scale", "q_norm.shift"), ("query norm",)),
    **dict.fromkeys(("k_norm.scale", "k_norm.shift"), ("key norm",)),
    "context_norm.scale": ("mixed",),
    "sinks": ("heads",),
    "relative_bias": ("", "heads"),
    **{f"lambda_{letter}{number}": ("head",) for letter in "qk" for number in (1, 2)},
}

LATENT: Table = {
    **PLAIN,
    **_linear("query latent", "input", "W_query_latent"),
    "query_norm.scale": ("query latent",),
    **_linear("latent", "input", "W_latent"),
    "latent_norm.scale": ("latent",),
    **_linear("rotary", "input", "W_key_rope"),
    **_weights("keys", "latent", "W_key"),
    **_weights("values", "latent", "W_value"),
    **_weights("index queries", "input", "indexer.W_index_query"),
    **_weights("index key", "input", "indexer.W_index_key"),
    **dict.fromkeys(("indexer.key_norm.scale", "indexer.key_norm.shift"), ("index key",)),
    **_weights("index heads", "input", "indexer.W_index_weights"),
}

FROM_QUERY_LATENT = {"W_query.weight", "indexer.W_index_query.weight"}
"""Leaves of latent attention whose input is the latent of queries where there is one."""

_RULE: Table = {
    **PLAIN,
    **_weights("heads", "input", "W_beta"),
    "A_log": ("heads",),
    "conv1d.weight": ("convolved", "1", ""),
    "norm.scale": ("value head",),
}

_DELTA: Table = {
    **_RULE,
    **_weights("values", "input", "W_gate"),
    **_weights("heads", "input", "W_alpha"),
    "dt_bias": ("heads",),
}

_CHANNEL_DELTA: Table = {
    **_RULE,
    **_weights("decay latent", "input", "W_decay_down"),
    **_weights("keys", "decay latent", "W_decay_up"),
    **_weights("gate latent", "input", "W_gate_down"),
    **_weights("values", "gate latent", "W_gate_up"),
    "dt_bias": ("keys",),
}

_STATE_SPACE: Table = {
    **_linear("values", "input", "W_gate", "W_value"),
    **_linear("keys", "input", "W_key", "W_query"),
    **_linear("heads", "input", "W_step"),
    **dict.fromkeys(("dt_bias", "A_log", "D"), ("heads",)),
    "conv1d.weight": ("channels", "1", ""),
    "conv1d.bias": ("channels",),
    "norm.scale": ("values",),
    **_linear("output", "values", "out_proj"),
}

_CONVOLUTION: Table = {
    **_linear("channels", "input", "W_query", "W_key", "W_value"),
    "conv1d.weight": ("channels", "1", ""),
    "conv1d.bias": ("channels",),
    **_linear("output", "channels", "out_proj"),
}

_SELECTIVE: Table = {
    **_linear("values", "input", "W_gate", "W_value"),
    **_weights("step latent", "values", "W_step_down"),
    **_weights("state", "values", "W_key", "W_query"),
    **dict.fromkeys(("k_norm.scale", "q_norm.scale"), ("state",)),
    "step_norm.scale": ("step latent",),
    **_weights("values", "step latent", "W_step_up"),
    **dict.fromkeys(("dt_bias", "D", "conv1d.bias"), ("values",)),
    "A_log": ("values", "state"),
    "conv1d.weight": ("values", "1", ""),
    **_linear("output", "values", "out_proj"),
}

ATTENTION_KINDS = {
    "plain": PLAIN,
    "latent": LATENT,
    "delta": _DELTA,
    "channel delta": _CHANNEL_DELTA,
    "state space": _STATE_SPACE,
    "selective": _SELECTIVE,
    "convolution": _CONVOLUTION,
}


OWN_NORMS = {
    "plain": "queries",
    "latent": "values",
    "delta": "value head",
    "channel delta": "value head",
    "state space": "values",
    "selective": "values",
    "convolution": "channels",
}
"""Kind of attention -> the symbol of its norm's size."""


FEED_FORWARD: Table = {
    **_linear("hidden", "input", "layers.0", "fc1", "fc2"),
    **_linear("input", "hidden", "layers.2", "fc3"),
    **dict.fromkeys(("layers.1.alpha_p", "layers.1.alpha_n"), ("1",)),
    **dict.fromkeys(("layers.1.beta", "layers.1.eps"), ()),
    "hidden_norm.scale": ("hidden",),
    **_linear("experts", "input", "router"),
    **dict.fromkeys(("router.correction_bias", "router.expert_scale"), ("experts",)),
    **_linear("1", "input", "shared_gate"),
}

ENDS: Table = {
    **_weights("vocab", "token width", "tok_emb"),
    **_weights("positions", "token width", "pos_emb"),
    **_weights("types", "token width", "type_emb"),
    **_linear("width", "token width", "emb_linear"),
    **_linear("vocab", "logit width", "out_head"),
    "logits_bias": ("1", "vocab"),
    "out_bias": ("vocab",),
    **_weights("layer vocab", "layer parts", "layer_emb"),
    **_weights("layer parts", "width", "layer_linear"),
    "layer_norm.scale": ("layer part",),
    **_linear("logit width", "width", "head_linear"),
    "conv1.weight": ("width", "", ""),
    "conv2.weight": ("width", "width", ""),
    **dict.fromkeys(("conv1.bias", "conv2.bias"), ("width",)),
}
"""Parameters in front of the blocks of a model and after them, except norms."""

OF_BLOCK: Table = {
    **_weights("layer part", "width", "layer_gate"),
    **_weights("width", "layer part", "layer_proj"),
    "scalar": ("1",),
    **_weights("laurel", "width", "laurel_down"),
    **_weights("width", "laurel", "laurel_up"),
    "altup.corrected_scale": ("width",),
    **_weights("streams", "streams", "altup.correction"),
    **_weights("coefficients", "streams", "altup.prediction"),
    **_weights("streams", "width", "altup.stream_router"),
}
"""Parameters that are a block's own."""

STREAMS = dict.fromkeys(("stream_in", "stream_out"), ("width", "width"))
"""Projections into streams and out of them, which are numbered."""
