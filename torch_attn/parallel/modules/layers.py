"""Modules that know their own part of a computation, where operations on whole tensors would not do.

Each is a subclass of the module's class with its name; `placement` gives it to the parts of a sharded module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from attn_bridge.sharding.plan import Role
from attn_bridge.specs.model import check_range

from ...blocks.convolution import Convolution
from ...blocks.mixture_of_experts import MixtureOfExperts
from ...dropout import Dropout
from ...embedding import Embedding
from ...gated_convolution import GatedConvolution
from ...gated_delta_net import GatedDeltaNet
from ...implementations import reference
from ...kimi_delta_attention import KimiDeltaAttention
from ...layer_norm import LayerNorm
from ...lightning_attention import LightningAttention
from ...linear_attention import LinearAttention
from ...mamba import Mamba
from ...mamba2 import Mamba2
from ...multi_head_latent_attention import MultiHeadLatentAttention
from ...recurrent.short_convolution import ShortConvolution
from ...rms_norm import RMSNorm
from ...shards import is_sharded, whole
from ..classes import cut_of, same_name, tokens_cut
from ..devices import Cut, Devices
from ..region import local_parameters, on_parts, touched
from ..schemes import latent, recurrent
from .caches import place_caches
from .products import product


def _embedding(self: Embedding, ids: Tensor, name: str = "ids") -> Tensor:
    """Look up ids, which every device has; where the vocabulary is cut, a device has some of the rows."""
    sharding: Devices = self.sharding
    ids = whole(ids).long()
    if ids.numel():
        check_range(name, int(ids.min()), int(ids.max()), self.num_embeddings - self.first)
    cut: Cut = {
        "context": ids.ndim - 1 if ids.ndim and sharding.divides("context", ids.shape[-1]) else None,
        "fsdp": 0 if ids.ndim > 1 and sharding.divides("fsdp", ids.shape[0]) else None,
    }
    rows = sharding.local(ids, cut, ()) + self.first
    weight = self._parameters["weight"]
    axis = sharding.axis("tensor")
    is_cut = axis is not None and isinstance(weight.placements[axis], Shard)
    working: list[Role] = [role for role, number in cut.items() if number is not None]
    if not is_cut:
        table = sharding.local(weight, {}, working)
        return sharding.joined(nn.functional.embedding(rows, table), cut)
    table = sharding.local(weight, {"tensor": 0}, [*working, "tensor"])
    rows = rows - sharding.rank("tensor") * len(table)
    is_here = (rows >= 0) & (rows < len(table))
    rows_of_table = nn.functional.embedding(torch.where(is_here, rows, 0), table)
    return sharding.joined(torch.where(is_here[..., None], rows_of_table, 0.0), cut, ["tensor"])


def _linear(self: nn.Linear, x: Tensor) -> Tensor:
    """Multiply with the device's part of the matrix."""
    sharding: Devices = self.sharding
    weight = self._parameters["weight"]
    if not is_sharded(x) or not is_sharded(weight):
        return nn.Linear.forward(self, x)
    projected = product(sharding, x, weight.T, self._parameters["bias"])
    return (
        sharding.cut(projected, {**cut_of(sharding, projected), "tensor": None}) if sharding.whole_heads else projected
    )


def _norm(self: nn.Module, x: Tensor, *, base: type[nn.Module]) -> Tensor:
    """Norm the vectors that the device has."""
    sharding: Devices = self.sharding
    cut = cut_of(sharding, x) if is_sharded(x) else {}
    if not is_sharded(x) or x.ndim - 1 in cut.values():
        output: Tensor = base.forward(self, x)
        return output
    working: list[Role] = [role for role, number in cut.items() if number is not None]
    with on_parts(self, local_parameters(self, sharding, working)):
        return sharding.joined(base.forward(self, sharding.local(x, cut, working)), cut)


def _dropout(self: Dropout, x: Tensor) -> Tensor:
    """Apply the dropout mask of the whole module on one device; each device takes its part of it."""
    if not self.training or self.p == 0.0 or not is_sharded(x):
        return x if not self.training else Dropout.forward(self, x)
    keep = reference.draw(tuple(x.shape), self.p, self.rngs, x.dtype, x.device)
    return torch.where(self.sharding.shared(keep), x / (1.0 - self.p), 0.0)


def _mixture_of_experts(self: MixtureOfExperts, x: Tensor) -> Tensor:
    """Send the device's tokens to its part of every expert: there is one sum over devices, at the end."""
    sharding: Devices = self.sharding
    cut = tokens_cut(sharding, x)
    working: list[Role] = [role for role, number in cut.items() if number is not None]
    sums: list[Role] = ["tensor"] if sharding.plan.size("tensor") > 1 else []
    parts = local_parameters(self, sharding, [*working, *sums])
    for name, part in parts.items():
        if sums and name.endswith("fc3.bias"):  # is added once
            parts[name] = part * float(sharding.rank("tensor") == 0)
    with on_parts(self, parts):
        output = MixtureOfExperts.forward(self, sharding.local(x, cut, [*working, *sums]))
    # Experts that no token of this device goes to have gradients, too: all devices sum them up.
    return sharding.joined(touched(output, parts.values()), cut, sums)


def _convolution(self: Convolution, x: Tensor) -> Tensor:
    """Convolve all positions on every device; the output is cut by positions."""
    sharding: Devices = self.sharding
    rows: Cut = {"fsdp": 0 if sharding.divides("fsdp", x.shape[0]) else None}
    working: list[Role] = ["fsdp"] if rows["fsdp"] is not None else []
    parts = local_parameters(self, sharding, working)
    with on_parts(self, parts):
        output = Convolution.forward(self, sharding.local(x, rows, working))
    joined = sharding.joined(output, rows)
    return sharding.cut(joined, tokens_cut(sharding, joined))


FORWARDS: dict[type[nn.Module], Callable[..., object]] = {
    nn.Linear: _linear,
    LayerNorm: functools.partial(_norm, base=LayerNorm),
    RMSNorm: functools.partial(_norm, base=RMSNorm),
    Embedding: _embedding,
    Dropout: _dropout,
    MixtureOfExperts: _mixture_of_experts,
    Convolution: _convolution,
    ShortConvolution: recurrent.short_convolution,
    LinearAttention: recurrent.linear_attention,
    GatedConvolution: recurrent.gated_convolution,
    GatedDeltaNet: recurrent.gated_delta_net,
    KimiDeltaAttention: recurrent.kimi_delta_attention,
    Mamba: recurrent.mamba,
    Mamba2: recurrent.mamba2,
}
"""Class -> its forward on devices, called instead of that of the class."""


@functools.cache
def local_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a part of a sharded module: its own, or a subclass of it."""
    forward = next((own for base, own in FORWARDS.items() if issubclass(kind, base)), None)
    members: dict[str, object] = {}
    if forward is not None:

        def call(self: nn.Module, *arguments: object, **options: object) -> object:
            return forward(self, *arguments, **options)

        members["forward"] = functools.wraps(kind.forward)(call)
    if issubclass(kind, MultiHeadLatentAttention):
        members["_absorbed"] = latent.absorbed
    if issubclass(kind, LightningAttention):
        members["_attend"] = recurrent.lightning_attention
    if hasattr(kind, "init_cache"):

        def init_cache(self: nn.Module, *arguments: int, **options: int) -> object:
            return place_caches(self.sharding, kind.init_cache(self, *arguments, **options))

        members["init_cache"] = functools.wraps(kind.init_cache)(init_cache)
    return same_name(kind, members) if members else kind
