"""Weights under our torch names, every element of its own value, for the tests of layouts and checkpoints."""

from __future__ import annotations

import numpy as np

WIDTH = 6


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


def _draw(random, *shape):
    return random.normal(size=shape).astype(np.float32)
