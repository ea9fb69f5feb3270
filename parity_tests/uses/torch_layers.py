"""The layer, the model and the inputs that uses of torch are tried with, and the table that they join."""

from __future__ import annotations

import socket
from typing import Any

import torch
from torch.testing import assert_close

import torch_attn
from attn_bridge import specs

from .table import Uses

USES = Uses()
CONFIG = specs.GroupedQueryAttentionConfig(8, 4, num_kv_heads=2, position=specs.Rotary(), dropout=0.2)
BLOCK = specs.DecoderBlockConfig(
    specs.GroupedQueryAttentionConfig(8, 2), specs.FeedForwardConfig(8, 12), specs.RMSNormConfig(8)
)
MODEL = specs.DecoderConfig(11, 8, (BLOCK, BLOCK), specs.RMSNormConfig(8))
X, IDS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
PADDING = torch.tensor([[False, False, True, True, True], [True] * 5])


def layer(**options: Any) -> Any:
    torch.manual_seed(0)
    return torch_attn.GroupedQueryAttention(CONFIG, **options).eval()


def model() -> Any:
    torch.manual_seed(0)
    return torch_attn.DecoderModel(MODEL).eval()


def slopes(module: Any, call: Any = None) -> list[torch.Tensor]:
    module.zero_grad()
    ((module if call is None else call)(X) ** 2).sum().backward()
    return [one.grad.clone() for one in module.parameters()]


def same_slopes(call: Any) -> None:
    """Check that a way of calling gives the gradients of plain calls."""
    plain, module = slopes(layer()), layer()
    for found, wanted in zip(slopes(module, call(module)), plain, strict=True):
        assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class process_group:
    """A group of one process."""

    def __enter__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=1, rank=0)

    def __exit__(self, *error: object) -> None:
        torch.distributed.destroy_process_group()
