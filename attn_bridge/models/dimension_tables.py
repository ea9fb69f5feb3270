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


# Symbols of attention by what the tensor is called below its module. "input", "context" and "output" are the width of
# the model in a block of one. Which of "queries", "keys" and "values" are equal depends on the kind of attention.
PLAIN: dict[str, tuple[str, ...]] = {
    "W_query.weight": ("queries", "input"),
    "W_key.weight": ("keys", "context"),
    "W_value.weight": ("values", "context"),
    "W_gate.weight": ("queries", "input"),
    "W_head_gate.weight": ("heads", "input"),
    "W_head_gate.bias": ("heads",),
    "W_query.bias": ("queries",),
    "W_key.bias": ("keys",),
    "W_value.bias": ("values",),
    "W_gate.bias": ("queries",),
    "W_query": ("input", "queries"),
    "W_key": ("context", "keys"),
    "W_value": ("context", "values"),
    "out_proj.weight": ("output", "mixed"),
    "out_proj.bias": ("output",),
    "q_norm.scale": ("query norm",),
    "k_norm.scale": ("key norm",),
    "q_norm.shift": ("query norm",),
    "k_norm.shift": ("key norm",),
    "context_norm.scale": ("mixed",),
    "sinks": ("heads",),
    "relative_bias": ("", "heads"),
    **{f"lambda_{letter}{number}": ("head",) for letter in "qk" for number in (1, 2)},
}


LATENT: dict[str, tuple[str, ...]] = {
    **PLAIN,
    "W_query_latent.weight": ("query latent", "input"),
    "W_query_latent.bias": ("query latent",),
    "query_norm.scale": ("query latent",),
    "W_latent.weight": ("latent", "input"),
    "W_latent.bias": ("latent",),
    "latent_norm.scale": ("latent",),
    "W_key_rope.weight": ("rotary", "input"),
    "W_key_rope.bias": ("rotary",),
    "W_key.weight": ("keys", "latent"),
    "W_value.weight": ("values", "latent"),
    "indexer.W_index_query.weight": ("index queries", "input"),
    "indexer.W_index_key.weight": ("index key", "input"),
    "indexer.key_norm.scale": ("index key",),
    "indexer.key_norm.shift": ("index key",),
    "indexer.W_index_weights.weight": ("index heads", "input"),
}


FROM_QUERY_LATENT = {"W_query.weight", "indexer.W_index_query.weight"}
"""Leaves of latent attention whose input is the latent of queries where there is one."""


_DELTA: dict[str, tuple[str, ...]] = {
    **PLAIN,
    "W_gate.weight": ("values", "input"),
    "W_beta.weight": ("heads", "input"),
    "W_alpha.weight": ("heads", "input"),
    "dt_bias": ("heads",),
    "A_log": ("heads",),
    "conv1d.weight": ("convolved", "1", ""),
    "norm.scale": ("value head",),
}


_CHANNEL_DELTA: dict[str, tuple[str, ...]] = {
    **PLAIN,
    "W_beta.weight": ("heads", "input"),
    "W_decay_down.weight": ("decay latent", "input"),
    "W_decay_up.weight": ("keys", "decay latent"),
    "W_gate_down.weight": ("gate latent", "input"),
    "W_gate_up.weight": ("values", "gate latent"),
    "dt_bias": ("keys",),
    "A_log": ("heads",),
    "conv1d.weight": ("convolved", "1", ""),
    "norm.scale": ("value head",),
}


_STATE_SPACE: dict[str, tuple[str, ...]] = {
    **{f"{name}.weight": ("values", "input") for name in ("W_gate", "W_value")},
    **{f"{name}.bias": ("values",) for name in ("W_gate", "W_value")},
    **{f"{name}.weight": ("keys", "input") for name in ("W_key", "W_query")},
    **{f"{name}.bias": ("keys",) for name in ("W_key", "W_query")},
    "W_step.weight": ("heads", "input"),
    "W_step.bias": ("heads",),
    "dt_bias": ("heads",),
    "A_log": ("heads",),
    "D": ("heads",),
    "conv1d.weight": ("channels", "1", ""),
    "conv1d.bias": ("channels",),
    "norm.scale": ("values",),
    "out_proj.weight": ("output", "values"),
    "out_proj.bias": ("output",),
}


_CONVOLUTION: dict[str, tuple[str, ...]] = {
    **{f"{name}.weight": ("channels", "input") for name in ("W_query", "W_key", "W_value")},
    **{f"{name}.bias": ("channels",) for name in ("W_query", "W_key", "W_value")},
    "conv1d.weight": ("channels", "1", ""),
    "conv1d.bias": ("channels",),
    "out_proj.weight": ("output", "channels"),
    "out_proj.bias": ("output",),
}


_SELECTIVE: dict[str, tuple[str, ...]] = {
    **{f"{name}.weight": ("values", "input") for name in ("W_gate", "W_value")},
    **{f"{name}.bias": ("values",) for name in ("W_gate", "W_value")},
    "W_step_down.weight": ("step latent", "values"),
    **{f"{name}.weight": ("state", "values") for name in ("W_key", "W_query")},
    **{f"{name}_norm.scale": ("state",) for name in ("k", "q")},
    "step_norm.scale": ("step latent",),
    "W_step_up.weight": ("values", "step latent"),
    "dt_bias": ("values",),
    "A_log": ("values", "state"),
    "D": ("values",),
    "conv1d.weight": ("values", "1", ""),
    "conv1d.bias": ("values",),
    "out_proj.weight": ("output", "values"),
    "out_proj.bias": ("output",),
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


FEED_FORWARD: dict[str, tuple[str, ...]] = {
    "layers.0.weight": ("hidden", "input"),
    "layers.0.bias": ("hidden",),
    "layers.1.alpha_p": ("1",),
    "layers.1.alpha_n": ("1",),
    "layers.1.beta": (),
    "layers.1.eps": (),
    "layers.2.weight": ("input", "hidden"),
    "layers.2.bias": ("input",),
    **{f"fc{number}.weight": ("hidden", "input") for number in (1, 2)},
    **{f"fc{number}.bias": ("hidden",) for number in (1, 2)},
    "fc3.weight": ("input", "hidden"),
    "fc3.bias": ("input",),
    "hidden_norm.scale": ("hidden",),
    "router.weight": ("experts", "input"),
    "router.bias": ("experts",),
    "router.correction_bias": ("experts",),
    "router.expert_scale": ("experts",),
    "shared_gate.weight": ("1", "input"),
    "shared_gate.bias": ("1",),
}


ENDS: dict[str, tuple[str, ...]] = {
    "tok_emb.weight": ("vocab", "token width"),
    "pos_emb.weight": ("positions", "token width"),
    "type_emb.weight": ("types", "token width"),
    "emb_linear.weight": ("width", "token width"),
    "emb_linear.bias": ("width",),
    "out_head.weight": ("vocab", "logit width"),
    "out_head.bias": ("vocab",),
    "logits_bias": ("1", "vocab"),
    "out_bias": ("vocab",),
    "layer_emb.weight": ("layer vocab", "layer parts"),
    "layer_linear.weight": ("layer parts", "width"),
    "layer_norm.scale": ("layer part",),
    "head_linear.weight": ("logit width", "width"),
    "head_linear.bias": ("logit width",),
    "conv1.weight": ("width", "", ""),
    "conv1.bias": ("width",),
    "conv2.weight": ("width", "width", ""),
    "conv2.bias": ("width",),
}
"""Parameters in front of the blocks of a model and after them, except norms."""
