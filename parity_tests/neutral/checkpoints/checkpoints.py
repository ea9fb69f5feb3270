"""Weights under our torch names, every element of its own value, for the tests of layouts and checkpoints."""

from __future__ import annotations

import numpy as np

from attn_bridge.models import layouts
from attn_bridge.models.layout import FLAGS

WIDTH = 6

SIZES = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 2,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 2,
    "head_dim": 2,
    "mamba_groups": 2,
    "mamba_state": 4,
    "mamba_heads": 8,
    "expert_width": 12,
}
"""Settings that fit what `whole` makes."""

CONFIG = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_groups": 2,
    "mamba_d_state": 4,
    "state_size": 4,
    "ssm_state_size": 4,
    "mamba_n_heads": 8,
    "attn_config": {"kv_n_heads": 2},
    "ffn_config": {"ffn_hidden_size": 12},
}
"""The same as a config.json says them."""


def attention(path="", *, seed=0, bias=True, out=True):
    """Return a multi-head attention of width 6 and 8, below a path."""
    random = np.random.default_rng([seed, 1])
    found = {}
    for name in ("query", "key", "value"):
        found[f"{path}W_{name}.weight"] = _draw(random, 8, WIDTH)
        if bias:
            found[f"{path}W_{name}.bias"] = _draw(random, 8)
    if out:
        found[f"{path}out_proj.weight"], found[f"{path}out_proj.bias"] = _draw(random, 5, 8), _draw(random, 5)
    return found


def gpt(layers, *, seed=0, width=WIDTH, words=11, tied=True):
    """Return a GPT-2."""
    random = np.random.default_rng([seed, 2])
    found = {"tok_emb.weight": _draw(random, words, width), "pos_emb.weight": _draw(random, 7, width)}
    for i in range(layers):
        block = f"trf_blocks.{i}."
        for name in ("W_query", "W_key", "W_value", "out_proj"):
            found[f"{block}att.{name}.weight"], found[f"{block}att.{name}.bias"] = (
                _draw(random, width, width),
                _draw(random, width),
            )
        for layer, shape in ((0, (4 * width, width)), (2, (width, 4 * width))):
            found[f"{block}ff.layers.{layer}.weight"] = _draw(random, *shape)
            found[f"{block}ff.layers.{layer}.bias"] = _draw(random, shape[0])
        for norm in ("norm1", "norm2"):
            found[f"{block}{norm}.scale"], found[f"{block}{norm}.shift"] = _draw(random, width), _draw(random, width)
    found["final_norm.scale"], found["final_norm.shift"] = _draw(random, width), _draw(random, width)
    found["out_head.weight"] = found["tok_emb.weight"].copy() if tied else _draw(random, words, width)
    return found


def bert(layers, *, seed=0):
    """Return a BERT encoder."""
    random = np.random.default_rng([seed, 3])
    found = {f"{name}_emb.weight": _draw(random, size, WIDTH) for name, size in (("tok", 11), ("pos", 9), ("type", 2))}
    norms = ["emb_norm"]
    for i in range(layers):
        block = f"layers.{i}."
        for name in ("W_query", "W_key", "W_value", "out_proj"):
            found[f"{block}att.{name}.weight"], found[f"{block}att.{name}.bias"] = (
                _draw(random, WIDTH, WIDTH),
                _draw(random, WIDTH),
            )
        for layer, shape in ((0, (10, WIDTH)), (2, (WIDTH, 10))):
            found[f"{block}ff.layers.{layer}.weight"] = _draw(random, *shape)
            found[f"{block}ff.layers.{layer}.bias"] = _draw(random, shape[0])
        norms += [f"{block}norm1", f"{block}norm2"]
    for norm in norms:
        found[f"{norm}.scale"], found[f"{norm}.shift"] = _draw(random, WIDTH), _draw(random, WIDTH)
    return found


def llama(layers, *, seed=0):
    """Return a Llama with grouped queries and norms of queries and keys."""
    random = np.random.default_rng([seed, 4])
    found = {"tok_emb.weight": _draw(random, 11, WIDTH), "out_head.weight": _draw(random, 11, WIDTH)}
    for i in range(layers):
        block = f"trf_blocks.{i}."
        for name, rows in (("W_query", 8), ("W_key", 4), ("W_value", 4)):
            found[f"{block}att.{name}.weight"] = _draw(random, rows, WIDTH)
        found[f"{block}att.out_proj.weight"] = _draw(random, WIDTH, 8)
        for name, shape in (("fc1", (10, WIDTH)), ("fc2", (10, WIDTH)), ("fc3", (WIDTH, 10))):
            found[f"{block}ff.{name}.weight"] = _draw(random, *shape)
        for norm, size in (("norm1", WIDTH), ("norm2", WIDTH), ("att.q_norm", 2), ("att.k_norm", 2)):
            found[f"{block}{norm}.scale"] = _draw(random, size)
    found["final_norm.scale"] = _draw(random, WIDTH)
    return found


def whole(name, layers, *, seed=0):
    """Return a model of that layout; where its blocks are of two kinds, they take turns."""
    random = np.random.default_rng([seed, 5])
    rows = [row for row in layouts.find(name).rows if row.ours]
    found = {}
    alternatives = {}
    for row in rows:
        alternatives.setdefault(row.choice, {}).update(
            dict.fromkeys(one for one in row.alternatives if one not in FLAGS)
        )
    for row in rows:
        for i in range(layers):
            mine = list(alternatives[row.choice])
            if (mine and mine[i % len(mine)] not in row.alternatives) or (row.last and i < layers - 1):
                continue
            for j in range(3):
                for template in row.ours:
                    key = template.format(i=i, j=j)
                    if key not in found:
                        found[key] = _draw(random, *_shape(key, row, rows))
    for row in rows:
        found |= {one: found[row.ours[0]].copy() for one in row.tied}
    return found


_RIGHT = {
    "tok_emb.weight": (11, WIDTH),
    "pos_emb.weight": (9, WIDTH),
    "out_head.weight": (11, WIDTH),
    "logits_bias": (1, 11),
    "out_bias": (11,),
    **{f"{name}.weight": (WIDTH, WIDTH) for name in ("emb_linear", "head_linear")},
    **{f"{name}.bias": (WIDTH,) for name in ("emb_linear", "head_linear")},
    "conv1d.bias": (32,),
    "conv1.weight": (WIDTH, 3, 2),
    "conv2.weight": (WIDTH, WIDTH, 2),
    "conv1d.weight": (32, 1, 2),
    "dt_bias": (8,),
    "A_log": (8,),
    "linear_att.norm.scale": (2,),
    **{f"{name}_norm.{array}": (2,) for name in "qk" for array in ("scale", "shift")},
    "W_head_gate.weight": (4, WIDTH),
    "context_norm.scale": (8,),
    "hidden_norm.scale": (10,),
    "query_norm.scale": (7,),
    "latent_norm.scale": (5,),
    "W_index_query.weight": (6, 7),
    "W_index_key.weight": (3, WIDTH),
    "key_norm.scale": (3,),
    "key_norm.shift": (3,),
    "W_index_weights.weight": (2, WIDTH),
    "sinks": (4,),
    "relative_bias": (6, 4),
    "linear_att.D": (8,),
    **{f"lambda_{letter}{number}": (2,) for letter in "qk" for number in (1, 2)},
    "router.weight": (3, WIDTH),
    "router.bias": (3,),
    "correction_bias": (3,),
    "shared_gate.weight": (1, WIDTH),
    "expert_scale": (3,),
    "layer_emb.weight": (11, 6),
    "layer_linear.weight": (6, WIDTH),
    "layer_norm.scale": (3,),
    "layer_gate.weight": (3, WIDTH),
    "layer_proj.weight": (WIDTH, 3),
    "scalar": (1,),
    "laurel_down.weight": (2, WIDTH),
    "laurel_up.weight": (WIDTH, 2),
    "correction.weight": (3, 3),
    "prediction.weight": (9, 3),
    "alpha_p": (1,),
    "alpha_n": (1,),
    "beta": (),
    "layers.1.eps": (),
}
"""End of a name -> its shape in a model of 4 heads of 2 channels, 3 experts and 11 tokens."""


_SELECTIVE = {
    **dict.fromkeys(("W_gate.weight", "W_value.weight"), (16, WIDTH)),
    **dict.fromkeys(("W_gate.bias", "W_value.bias", "dt_bias", "D", "conv1d.bias"), (16,)),
    **dict.fromkeys(("W_query.weight", "W_key.weight"), (4, 16)),
    **dict.fromkeys(("q_norm.scale", "k_norm.scale"), (4,)),
    "W_step_down.weight": (3, 16),
    "W_step_up.weight": (16, 3),
    "step_norm.scale": (3,),
    "A_log": (16, 4),
    "conv1d.weight": (16, 1, 2),
    "out_proj.weight": (WIDTH, 16),
    "out_proj.bias": (WIDTH,),
}
"""Name in Mamba -> its shape for 16 channels with states of 4 numbers."""

_DELTA = {
    **dict.fromkeys(("W_query.weight", "W_key.weight", "W_value.weight"), (8, WIDTH)),
    **dict.fromkeys(("W_decay_down.weight", "W_gate_down.weight"), (4, WIDTH)),
    **dict.fromkeys(("W_decay_up.weight", "W_gate_up.weight"), (8, 4)),
    "W_beta.weight": (2, WIDTH),
    "conv1d.weight": (24, 1, 2),
    "dt_bias": (8,),
    "A_log": (2,),
    "norm.scale": (4,),
    "out_proj.weight": (WIDTH, 8),
}
"""Name in Kimi Delta Attention -> its shape for 2 heads of 4 channels."""

_CONVOLUTION = {
    **{f"{name}.weight": (WIDTH, WIDTH) for name in ("W_query", "W_key", "W_value", "out_proj")},
    "conv1d.weight": (WIDTH, 1, 2),
}
"""Name in a gated convolution -> its shape; biases are as wide as the model."""


def _shape(name, row, rows):
    layer = name.partition(".linear_att.")[2]
    names = {name for row in rows for name in row.ours}
    if layer and any(one.endswith(".W_step_up.weight") for one in names):
        return _SELECTIVE[layer]
    if layer and any(one.endswith(".W_decay_up.weight") for one in names):
        return _DELTA[layer]
    if (
        layer
        and any(one.endswith(".conv1d.weight") for one in names)
        and not any(one.endswith(("A_log", "dt_bias")) for one in names)
    ):
        return _CONVOLUTION.get(layer, (WIDTH,))
    if name.endswith("linear_att.norm.scale") and _inner(rows):
        return (_inner(rows),)
    right = next((shape for end, shape in _RIGHT.items() if name.endswith(end)), None)
    if right is not None:
        return right
    *above, module, leaf = name.split(".")
    if leaf not in ("weight", "bias") or module.startswith("conv"):
        return (WIDTH,)
    if name.startswith("stream_"):
        return WIDTH, WIDTH
    if ".ff." in name or ".dense." in name:
        hidden = 12 if "experts" in above else 14 if "shared" in above else 10
        shape = (WIDTH, hidden) if f"{above[-1]}.{module}".endswith(("fc3", "layers.2")) else (hidden, WIDTH)
    elif module == "out_proj":
        shape = WIDTH, (_inner(rows) or 16) if _is_latent(rows) or "linear_att" in above else 8
    else:
        columns = 7 if "q_b_proj" in row.theirs else 5 if _is_latent(rows) and module in ("W_key", "W_value") else WIDTH
        shape = 2 if module == "type_emb" else _outputs(module, rows, above[-1] if above else ""), columns
    return shape if leaf == "weight" else shape[:1]


def _is_latent(rows):
    return any(name.endswith("W_latent.weight") for row in rows for name in row.ours)


def _inner(rows):
    """Return the width of the context of a recurrent layer whose norm spans all heads; 0 for any other."""
    names = {name for row in rows for name in row.ours if ".linear_att." in name}
    if any(name.endswith("W_step.weight") for name in names):
        return 16
    return 8 if names and not any(name.endswith("A_log") for name in names) else 0


def _outputs(module, rows, attention):
    """Return the rows of a projection of the input; keys are as many as queries where one tensor has all three."""
    sizes = {"W_query": 8, "W_gate": 8, "W_beta": 8, "W_alpha": 8, "W_query_latent": 7, "W_latent": 5, "W_key_rope": 3}
    if _is_latent(rows):
        sizes |= {"W_query": 20, "W_value": 16, "W_key": 8}
    elif attention == "linear_att":
        inner = _inner(rows) or 16
        sizes |= {"W_gate": inner, "W_value": inner, "W_key": 8, "W_step": 8}
    else:
        keys = 8 if any(row.part and len(row.ours) == 3 for row in rows) else 4
        shares = next((row.shares for row in rows if row.shares), ())
        keys = {"num_heads": 8, 1: 2}.get(shares[1], keys) if shares else keys
        sizes |= {"W_key": keys, "W_value": keys}
    return sizes[module]


def _draw(random, *shape):
    return random.normal(size=shape).astype(np.float32)


def drawn(shapes, dtype="float32", seed=3):
    """Return arrays of these shapes by name."""
    random = np.random.default_rng(seed)
    return {name: _draw(random, *shape).astype(np.dtype(dtype)) for name, shape in shapes.items()}
