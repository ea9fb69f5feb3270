"""Random options, masks and calls of `torch_attn.compat.MultiheadAttention` give what torch's own layer gives."""

from __future__ import annotations

import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from torch_attn import compat

same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def chosen(rng, *values):
    return values[rng.integers(len(values))]


def draw_options(rng):
    """Return the arguments of a layer."""
    heads = int(chosen(rng, 1, 2, 3))
    options = {
        "embed_dim": heads * int(chosen(rng, 2, 4, 5)),
        "num_heads": heads,
        "bias": bool(rng.random() < 0.7),
        "add_bias_kv": bool(rng.random() < 0.3),
        "add_zero_attn": bool(rng.random() < 0.3),
        "batch_first": bool(rng.random() < 0.5),
        "dtype": torch.float64,
    }
    if rng.random() < 0.4:
        options |= {"kdim": int(chosen(rng, 3, 6)), "vdim": int(chosen(rng, 4, 7))}
    return options


def normal(rng, *shape):
    return torch.from_numpy(rng.normal(size=shape))


def draw_mask(rng, shape):
    """Return a mask that hides no key for all queries: bool, numbers, or numbers and -inf."""
    kind = chosen(rng, "bool", "float", "infinite")
    if kind == "float":
        return normal(rng, *shape)
    hidden = torch.from_numpy(rng.random(shape) < 0.4)
    hidden[..., 0] = False
    return hidden if kind == "bool" else normal(rng, *shape).masked_fill(hidden, -torch.inf)


def draw_call(rng, layer):
    """Return inputs and options of a call."""
    batch, queries, keys = (int(rng.integers(1, 5)) for _ in range(3))
    options = {"need_weights": bool(rng.random() < 0.5), "average_attn_weights": bool(rng.random() < 0.5)}
    of_itself = layer.kdim == layer.vdim == layer.embed_dim and rng.random() < 0.5
    keys = queries if of_itself else keys
    is_batch = rng.random() < 0.75
    shapes = [(batch, queries, layer.embed_dim), (batch, keys, layer.kdim), (batch, keys, layer.vdim)]
    inputs = [normal(rng, *shape) for shape in shapes]
    if not is_batch:
        inputs = [x[0] for x in inputs]
    elif not layer.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    inputs = inputs[:1] if of_itself else inputs
    batch = batch if is_batch else 1
    kind = chosen(rng, "none", "2-D", "3-D", "causal")
    if kind in ("2-D", "3-D"):
        shape = (queries, keys) if kind == "2-D" else (batch * layer.num_heads, queries, keys)
        options["attn_mask"] = draw_mask(rng, shape)
    elif kind == "causal":
        options |= {"attn_mask": torch.ones(queries, keys, dtype=torch.bool).triu(1), "is_causal": True}
    if rng.random() < 0.4:
        padding = draw_mask(rng, (batch, keys))
        other = options.get("attn_mask")
        if other is not None and other.dtype != padding.dtype:  # the stock layer warns of two kinds
            padding = padding.bool() & False if other.dtype == torch.bool else padding.to(torch.float64)
        options["key_padding_mask"] = padding if is_batch else padding[0]
    appended = layer.bias_k is not None or layer.add_zero_attn
    if appended and options.get("is_causal") and not options["need_weights"]:
        options["need_weights"] = True  # without weights, the stock layer hides the appended keys from nearly all
    return inputs, options


def results(layer, inputs, options):
    """Return output, weights and all gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    output, weights = layer(*(inputs * 3 if len(inputs) == 1 else inputs), **options)
    loss = (output * torch.arange(output.numel()).reshape(output.shape).cos()).sum()
    loss = loss if weights is None else loss + (weights**2).sum()
    gradients = torch.autograd.grad(loss, [*inputs, *layer.parameters()], allow_unused=True)
    return [output, weights, *gradients]


def copied(rng, layer):
    return chosen(rng, lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)))(layer)


@pytest.mark.parametrize("seed", range(150))
def test_a_random_call_gives_what_the_stock_layer_gives(seed):
    rng = np.random.default_rng(seed)
    options = draw_options(rng)
    stock, ours = nn.MultiheadAttention(**options), compat.MultiheadAttention(**options)
    for weight in ours.parameters():
        nn.init.normal_(weight)
    stock.load_state_dict(ours.state_dict())
    ours.load_state_dict(stock.state_dict())
    ours = copied(rng, ours).train(rng.random() < 0.5)
    inputs, call = draw_call(rng, stock)
    same(results(ours, inputs, call), results(stock, inputs, call))


LAYERS = {"encoder": nn.TransformerEncoderLayer, "decoder": nn.TransformerDecoderLayer}


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", LAYERS)
def test_a_random_layer_of_a_transformer_keeps_its_results(kind, seed):
    rng = np.random.default_rng(seed)
    heads, batch, tokens, keys = (int(rng.integers(1, 4)) for _ in range(4))
    options = {
        "d_model": 4 * heads,
        "nhead": heads,
        "dim_feedforward": 7,
        "dropout": 0.0,
        "activation": chosen(rng, "relu", "gelu"),
        "batch_first": bool(rng.random() < 0.5),
        "norm_first": bool(rng.random() < 0.5),
        "bias": bool(rng.random() < 0.7),
        "dtype": torch.float64,
    }
    stock = LAYERS[kind](**options).train(rng.random() < 0.5)
    ours = copy.deepcopy(stock)
    for name, part in stock.named_children():
        if isinstance(part, nn.MultiheadAttention):
            drop_in = compat.MultiheadAttention(
                4 * heads, heads, bias=options["bias"], batch_first=options["batch_first"], dtype=torch.float64
            )
            drop_in.load_state_dict(part.state_dict())
            setattr(ours, name, drop_in.train(stock.training))
    x, memory = normal(rng, batch, tokens, 4 * heads), normal(rng, batch, keys, 4 * heads)
    inputs = [x, memory][: 1 + (kind == "decoder")]
    call = {}
    prefix = "tgt" if kind == "decoder" else "src"
    if rng.random() < 0.5:
        lengths = rng.integers(1, tokens + 1, size=batch)
        call[f"{prefix}_key_padding_mask"] = torch.from_numpy(np.arange(tokens) >= lengths[:, None])
    if rng.random() < 0.5:
        call[f"{prefix}_mask"] = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        call["tgt_is_causal" if kind == "decoder" else "is_causal"] = bool(rng.random() < 0.5)
    if not options["batch_first"]:
        inputs = [one.transpose(0, 1) for one in inputs]
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            same(ours(*inputs, **call), stock(*inputs, **call))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_sequences_of_an_encoder_get_what_the_stock_encoder_gives(layout):
    torch.manual_seed(0)
    stock = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64).eval()
    drop_in = compat.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval()
    drop_in.load_state_dict(stock.self_attn.state_dict())
    rows = [torch.randn(size, 8, dtype=torch.float64) for size in (3, 1, 5)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    found, _ = drop_in(nested, nested, nested, need_weights=False)
    for row, part in zip(rows, found.unbind(), strict=True):
        one, _ = stock.self_attn(row[None], row[None], row[None])
        same(part, one[0])


def test_a_compiled_layer_gives_what_the_stock_layer_gives():
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True, dtype=torch.float64)
    ours = compat.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True, dtype=torch.float64)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for call in ({"key_padding_mask": hidden}, {"need_weights": False, "attn_mask": later}):
        same(results(compiled, [x], call), results(stock, [x], call))


@pytest.mark.parametrize("mask", ["attn_mask", "key_padding_mask"])
def test_a_compiled_layer_takes_its_first_mask_at_another_length(mask):
    torch.compiler.reset()
    torch.manual_seed(0)
    ours = compat.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    compiled(*[torch.randn(3, 4, 8, dtype=torch.float64)] * 3)  # the sizes of x are open from the second call on
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    masks = {
        "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.arange(5).expand(2, -1) >= 3,
    }
    same(results(compiled, [x], {mask: masks[mask]}), results(ours, [x], {mask: masks[mask]}))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_a_quantised_model_runs():
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ours = compat.MultiheadAttention(8, 2, batch_first=True).eval()
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, 8)
    models = [torch.ao.quantization.quantize_dynamic(nn.ModuleDict({"a": one}), {nn.Linear}) for one in (stock, ours)]
    found = [one["a"](x, x, x)[0] for one in models]
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[1], stock(x, x, x)[0], rtol=0.1, atol=0.05)
