"""Uses of `torch.nn.MultiheadAttention` in models and tools of torch: the drop-in gives the same results."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from torch_attn import compat, functional

N, L, E, H = 2, 5, 8, 4
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
PADDING = torch.arange(L) >= torch.tensor([[3], [5]])
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)


def make(kind, **options):
    """Return a layer in float64 whose weights are all drawn."""
    torch.manual_seed(0)
    layer = kind(E, H, **{"dtype": torch.float64, **options})
    for weight in layer.parameters():
        if not weight.is_meta:
            nn.init.normal_(weight)
    return layer


def draw(*shape, seed=1):
    torch.manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64)


def differentiate(module, *inputs, **options):
    """Return the outputs and all gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    result = module(*inputs, **options)
    outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    loss = sum((x * torch.arange(x.numel()).reshape(x.shape).cos()).sum() for x in outputs)
    gradients = torch.autograd.grad(loss, [*inputs, *module.parameters()], allow_unused=True)
    return [*outputs, *(x for x in gradients if x is not None)]


def of_trained_masks(kind):
    masks = {"attn_mask": draw(N * H, L, L, seed=3), "key_padding_mask": draw(N, L, seed=4)}
    masks = {name: mask.requires_grad_() for name, mask in masks.items()}
    q, layer = draw(L, N, E), make(kind)
    return torch.autograd.grad(layer(q, q, q, need_weights=False, **masks)[0].sin().sum(), [*masks.values()])


def without_keys(kind):
    return differentiate(make(kind), draw(L, N, E), draw(0, N, E), draw(0, N, E))


def without_a_batch_of_sequences(kind):
    q = draw(L, 0, E)
    return make(kind)(q, q, q)


def viewed(kind):
    q = draw(L, N, E)
    output, weights = make(kind)(q, q, q)
    return output.view(L * N, E), weights.view(-1)


def copied(kind):
    buffer, q = io.BytesIO(), draw(L, N, E)
    torch.save(make(kind), buffer)
    buffer.seek(0)
    layers = [copy.deepcopy(make(kind)), pickle.loads(pickle.dumps(make(kind)))]
    return [layer(q, q, q) for layer in (*layers, torch.load(buffer, weights_only=False))]


def from_old_state(kind):
    """Restore the state of a stock layer of torch 1.1, which lacked an attribute."""
    state = dict(make(nn.MultiheadAttention).__dict__)
    del state["_qkv_same_embed_dim"]
    layer, q = kind.__new__(kind), draw(L, N, E)
    layer.__setstate__(state)
    return layer(q, q, q)


def by_change_of_class(kind):
    layer, q = make(nn.MultiheadAttention), draw(L, N, E)
    layer.__class__ = kind
    return layer(q, q, q)


def assigned_on_meta(kind):
    layer, q = make(kind, device="meta"), draw(L, N, E)
    shapes = layer(q.to("meta"), q.to("meta"), q.to("meta"), attn_mask=CAUSAL.to("meta"))
    layer.load_state_dict(make(nn.MultiheadAttention).state_dict(), assign=True)
    return layer(q, q, q), [torch.zeros(x.shape) for x in shapes]


def exported(kind):
    q, batch = draw(N, L, E), {0: torch.export.Dim("batch", max=64)}
    shapes = {"query": batch, "key": batch, "value": batch, "need_weights": None}
    program = torch.export.export(
        make(kind, batch_first=True), (q, q, q), {"need_weights": False}, dynamic_shapes=shapes
    )
    q = draw(7, L, E)
    return program.module()(q, q, q, need_weights=False)


def compiled(kind):
    q, layer = draw(L, N, E), torch.compile(make(kind), backend="aot_eager", fullgraph=True)
    return layer(q, q, q, attn_mask=CAUSAL, key_padding_mask=PADDING, need_weights=False)


def traced(kind):
    q = draw(L, N, E)
    return torch.jit.trace(make(kind), (q, q, q))(q, q, q)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attention = make(kind)

    def forward(self, x):
        output, weights = self.attention(x, x, x, average_attn_weights=False)
        return x + output, weights


def traced_by_fx(kind):
    return torch.fx.symbolic_trace(Block(kind))(draw(L, N, E))


def of_functions(kind):
    layer, x = make(kind), draw(3, L, N, E)
    weights = dict(layer.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(layer, weights, (x, x, x))[0].sin().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    return [gradients[name] for name in sorted(gradients)]


def second_derivatives(kind):
    layer, q = make(kind), draw(L, N, E).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(q, q, q)[0].sin().sum(), q, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), q)


def make_encoder(kind, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, dtype=torch.float64, **options)
    layer.self_attn = make(kind, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def encoder_in_training(kind):
    return differentiate(make_encoder(kind), draw(N, L, E), mask=CAUSAL, is_causal=True)


def encoder_by_the_fused_kernel(kind):
    with torch.no_grad():
        return make_encoder(kind).eval()(draw(N, L, E), src_key_padding_mask=PADDING)


def encoder_with_a_hook(kind):
    """Record the attention of a layer: it gets the nested tensors that the encoder makes of padding."""
    encoder, rows = make_encoder(kind).eval(), []
    encoder.layers[1].self_attn.register_forward_hook(lambda layer, inputs, output: rows.extend(output[0].unbind()))
    with torch.no_grad():
        return [encoder(draw(N, L, E), src_key_padding_mask=PADDING), *rows]


def whole_transformer(kind):
    torch.manual_seed(0)
    model = nn.Transformer(E, H, 2, 2, 16, 0.0, dtype=torch.float64)
    for module in [*model.modules()]:
        for name in {"self_attn", "multihead_attn"} & {name for name, _ in module.named_children()}:
            layer = kind(E, H, dtype=torch.float64)
            layer.load_state_dict(getattr(module, name).state_dict())
            setattr(module, name, layer)
    mask = model.generate_square_subsequent_mask(L, dtype=torch.float64)
    x = draw(L, N, E)
    return differentiate(model, x, x.flip(0), tgt_mask=mask, src_key_padding_mask=PADDING, tgt_is_causal=True)


USES = [
    of_trained_masks, without_keys, without_a_batch_of_sequences, viewed, copied, from_old_state, by_change_of_class,
    assigned_on_meta, exported, compiled, traced, traced_by_fx, of_functions, second_derivatives, encoder_in_training,
    encoder_by_the_fused_kernel, encoder_with_a_hook, whole_transformer,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:`torch.jit", "ignore:enable_nested_tensor is")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_use_gives_what_the_stock_layer_gives(use):
    expected, got = use(nn.MultiheadAttention), use(compat.MultiheadAttention)
    torch.testing.assert_close(got, expected, **CLOSE)


def test_jagged_sequences_get_what_each_gets_alone():
    layer = make(compat.MultiheadAttention, batch_first=True)
    rows, keys = ([draw(size, E, seed=size) for size in sizes] for sizes in ((3, 5), (4, 2)))
    nested, nested_keys = (torch.nested.as_nested_tensor(some, layout=torch.jagged) for some in (rows, keys))
    output = layer(nested, nested_keys, nested_keys)[0] + nested
    for row, key, got in zip(rows, keys, output.unbind(), strict=True):
        torch.testing.assert_close(got, layer(row, key, key)[0] + row, **CLOSE)


def test_parameters_are_drawn_again_as_the_constructor_does():
    torch.manual_seed(7)
    expected = compat.MultiheadAttention(E, H, kdim=6, add_bias_kv=True)
    layer = compat.MultiheadAttention(E, H, kdim=6, add_bias_kv=True, device="meta").to_empty(device="cpu")
    torch.manual_seed(7)
    layer.reset_parameters()
    torch.testing.assert_close(layer.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", functional.IMPLEMENTATIONS)
def test_an_implementation_computes_the_calls_or_refuses(name):
    q, stock = draw(L, N, E).float(), make(nn.MultiheadAttention, dtype=torch.float32)
    layer = make(compat.MultiheadAttention, dtype=torch.float32, implementation=name)
    try:
        output = layer(q, q, q, need_weights=False)[0]
    except NotImplementedError:
        assert functional.explain(*[q.reshape(N, L, H, 2)] * 3)[name] is not None
    else:
        torch.testing.assert_close(output, stock(q, q, q)[0], rtol=1e-4, atol=1e-5)
    if name != "reference":
        with pytest.raises(NotImplementedError, match="does not support this call"):
            layer(q, q, q)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_bad_implementations_calls_and_scripts_are_refused():
    with pytest.raises(ValueError, match=r"^implementation \('fast'\) must be one of "):
        compat.MultiheadAttention(E, H, implementation="fast")
    layer, q = make(compat.MultiheadAttention), draw(L, N, E)
    with pytest.raises(NotImplementedError, match=r"can't be scripted; use torch\.export or torch\.jit\.trace$"):
        torch.jit.script(layer)
    with pytest.raises(ValueError, match=r"^key must have 3 axes and 8 channels, got shape \(5, 8\)$"):
        layer(q[:, :1], q[:, 0], q[:, 0])
    with pytest.raises(ValueError, match=r"^nested tensors need batch_first=True, and neither attn_mask nor key_pad"):
        layer(*[torch.nested.as_nested_tensor([q[0]], layout=torch.jagged)] * 3)
    with pytest.raises(TypeError, match=r"^attn_mask must be a torch\.Tensor, got list$"):
        layer(q, q, q, attn_mask=[[0.0] * L] * L)
