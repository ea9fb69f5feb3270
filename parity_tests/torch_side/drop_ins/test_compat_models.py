"""Models in the style of public ones, with the drop-in in the line that makes their attention layer."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from torch_attn import compat

E, H, N, L, S = 8, 2, 3, 5, 7


class ClipBlock(nn.Module):
    """A residual block as OpenCLIP has it, whose mask is an attribute in float32."""

    def __init__(self, attention):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.attn = attention(E, H, batch_first=True)
        layers = [("c_fc", nn.Linear(E, 16)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(16, E))]
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.register_buffer("attn_mask", torch.empty(L, L).fill_(float("-inf")).triu_(1), persistent=False)
        nn.init.normal_(self.attn.in_proj_weight, std=0.5)
        nn.init.normal_(self.attn.out_proj.weight, std=0.5)

    def attention(self, q_x, k_x=None, v_x=None, attn_mask=None):
        k_x = k_x if k_x is not None else q_x
        v_x = v_x if v_x is not None else q_x
        attn_mask = attn_mask.to(q_x.dtype) if attn_mask is not None else None
        return self.attn(q_x, k_x, v_x, need_weights=False, attn_mask=attn_mask)[0]

    def forward(self, x):
        x = x + self.attention(self.ln_1(x), attn_mask=self.attn_mask)
        return x + self.mlp(self.ln_2(x))


class AttentionalPooler(nn.Module):
    """A pooler by learned queries, which `expand` to the batch, with keys of another width."""

    def __init__(self, attention):
        super().__init__()
        self.query = nn.Parameter(torch.randn(4, 12))
        self.attn = attention(12, 3, kdim=E, vdim=E, batch_first=True)
        self.ln_q, self.ln_k = nn.LayerNorm(12), nn.LayerNorm(E)

    def forward(self, x):
        x = self.ln_k(x)
        q = self.ln_q(self.query)
        return self.attn(q.unsqueeze(0).expand(x.shape[0], -1, -1), x, x, need_weights=False)[0]


class DetrDecoderLayer(nn.Module):
    """A layer of DETR: positions are added to queries and keys alone, and the memory is padded."""

    def __init__(self, attention):
        super().__init__()
        self.self_attn = attention(E, H, dropout=0.1)
        self.multihead_attn = attention(E, H, dropout=0.1)
        self.norm1, self.norm2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.register_buffer("query_pos", torch.randn(L, 1, E))
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, x):
        tgt, memory = x.transpose(0, 1)[:L], x.transpose(0, 1)
        padding = torch.arange(x.shape[1], device=x.device) >= torch.tensor([[4], [7], [6]], device=x.device)
        q = k = tgt + self.query_pos
        tgt = self.norm1(tgt + self.self_attn(q, k, value=tgt, attn_mask=None, key_padding_mask=None)[0])
        output, weights = self.multihead_attn(
            query=tgt + self.query_pos, key=memory, value=memory, attn_mask=None, key_padding_mask=padding
        )
        return self.norm2(tgt + output).transpose(0, 1) + weights.sum()


class VitEncoder(nn.Module):
    """Blocks as torchvision has them, whose self-attention is unpacked from a tuple."""

    def __init__(self, attention):
        super().__init__()
        self.layers = nn.Sequential()
        for index in range(2):
            self.layers.add_module(f"encoder_layer_{index}", VitBlock(attention))

    def forward(self, input: torch.Tensor):
        return self.layers(input)


class VitBlock(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln_1 = nn.LayerNorm(E, eps=1e-6)
        self.self_attention = attention(E, H, dropout=0.1, batch_first=True)
        self.dropout = nn.Dropout(0.0)

    def forward(self, input: torch.Tensor):
        torch._assert(input.dim() == 3, f"Expected (batch_size, seq_length, hidden_dim) got {input.shape}")
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        return self.dropout(x) + input


class Conformer(nn.Module):
    """Self-attention of torchaudio's Conformer, by keywords, with the batch second and padding of all layers."""

    def __init__(self, attention):
        super().__init__()
        self.norm, self.self_attn = nn.LayerNorm(E), attention(E, H, dropout=0.0)

    def forward(self, x):
        padding = torch.arange(x.shape[1])[None] >= torch.tensor([4, 7, 6])[:, None]
        y = self.norm(x.transpose(0, 1))
        y, _ = self.self_attn(query=y, key=y, value=y, key_padding_mask=padding, need_weights=False)
        return x + y.transpose(0, 1)


class LanguageModel(nn.Module):
    """The encoder of torch's tutorial on language models, with a square mask and copied layers."""

    def __init__(self, attention):
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0)
        layer.self_attn = attention(E, H)
        self.transformer_encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.transformer_encoder(x.transpose(0, 1), mask).transpose(0, 1)


LENGTHS = {ClipBlock: L, AttentionalPooler: S, DetrDecoderLayer: S, VitEncoder: L, Conformer: S, LanguageModel: L}
every_model = pytest.mark.parametrize("model", LENGTHS, ids=lambda model: model.__name__)


def pair(model):
    """Return the model with the stock layer, and with ours and its weights, in float64."""
    torch.manual_seed(0)
    stock, ours = model(nn.MultiheadAttention).double(), model(compat.MultiheadAttention).double()
    for weight in stock.parameters():
        nn.init.normal_(weight, std=0.5)
    for name, buffer in ours.named_buffers():
        buffer.copy_(stock.get_buffer(name))
    ours.load_state_dict(stock.state_dict(), strict=True)
    return stock.eval(), ours.eval()


def draw(model):
    torch.manual_seed(1)
    return torch.randn(N, LENGTHS[model], E, dtype=torch.float64)


@every_model
def test_a_model_keeps_its_outputs_and_gradients(model):
    results = []
    for layers in pair(model):
        x = draw(model).requires_grad_()
        output = layers(x)
        loss = (output * torch.arange(output.numel()).reshape(output.shape).cos()).sum()
        with torch.no_grad():
            again = layers(x)
        results.append([output, again, *torch.autograd.grad(loss, [x, *layers.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


@every_model
def test_a_model_learns_the_same_weights(model):
    """Three steps of Adam, with dropout where weights are asked for."""
    results = []
    for layers in pair(model):
        layers.train(model is DetrDecoderLayer)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-2)
        torch.manual_seed(3)
        for _ in range(3):
            optimizer.zero_grad()
            layers(draw(model)).square().mean().backward()
            optimizer.step()
        results.append(layers.state_dict())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


@every_model
def test_a_model_may_be_copied_and_cast(model):
    stock, ours = (copy.deepcopy(layers).to(torch.bfloat16) for layers in pair(model))
    x = draw(model).to(torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), stock(x), rtol=0.1, atol=0.1)


def test_features_of_a_traced_model_are_those_of_the_stock_layer():
    stock, ours = (torch.fx.symbolic_trace(layers) for layers in pair(VitEncoder))
    targets = [[node.target for node in graph.graph.nodes if node.op == "call_module"] for graph in (stock, ours)]
    assert targets[0] == targets[1]
    torch.testing.assert_close(ours(draw(VitEncoder)), stock(draw(VitEncoder)), rtol=1e-10, atol=1e-12)
