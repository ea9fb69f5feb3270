"""Recurrent attention over devices: each has some heads, and some tokens; states go from each device to the next."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias, TypedDict, Unpack

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from attn_bridge.masks import Mask, as_mask
from attn_bridge.sharding.plan import Role
from attn_bridge.specs import Mamba2Config

from ... import functional
from ...decoding.recurrent_cache import RecurrentCache
from ...gated_convolution import GatedConvolution
from ...gated_delta_net import GatedDeltaNet
from ...kimi_delta_attention import KimiDeltaAttention
from ...lightning_attention import LightningAttention
from ...linear_attention import LinearAttention
from ...mamba import Mamba
from ...mamba2 import Mamba2
from ...recurrent import recurrence
from ...recurrent.short_convolution import ShortConvolution
from ...shards import is_sharded, whole
from ..classes import tokens_cut
from ..devices import Cut, Devices
from ..masks import part_of
from ..region import local_parameters, on_parts

Output: TypeAlias = Tensor | tuple[Tensor | RecurrentCache, ...]
"""The output of a module, with its weights or its cache behind it if asked for."""


class CallOptions(TypedDict, total=False):
    """Keyword arguments of a call of a recurrent layer, or of `LightningAttention._attend`."""

    attention_mask: Mask | Tensor | None
    positions: Tensor | None
    cache: RecurrentCache | None
    return_weights: bool
    form: str | None


@dataclasses.dataclass(frozen=True)
class DeviceLine:
    """Devices that share the tokens of a sequence in order: each starts from the final state of the one before.

    Attributes:
        group: the devices.
        rank: this device's place among them.
        devices: number of devices.
    """

    group: ProcessGroup
    rank: int
    devices: int

    def recur(
        self,
        run: Callable[..., tuple[Tensor, Tensor]],
        sequences: tuple[Tensor, ...],
        state: Tensor,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the context of the device's tokens and the state that they leave."""
        context, state = run(*sequences, self.before(state, *sequences), chunk_size)
        return self.behind(context, state), state

    def before(self, state: Tensor, *beside: Tensor) -> Tensor:
        """Return the state of the previous device; the first device gets the initial state.

        Args:
            state: the initial state, or another tensor of its shape and dtype.
            *beside: further inputs of the result: if any has a gradient, so does the state.
        """
        if self.rank == 0:
            return state
        received: Tensor = _Receive.apply(self, state, *beside)
        return received

    def behind(self, result: Tensor, state: Tensor) -> Tensor:
        """Return a result after its state has gone to the next device; both then have the same gradient."""
        if self.rank == self.devices - 1:
            return result
        sent: Tensor = _Send.apply(self, result, state)
        return sent

    def send(self, tensor: Tensor, hops: int) -> None:
        """Send a tensor `hops` devices ahead."""
        distributed.send(tensor.contiguous(), self._peer(hops), group=self.group)

    def receive(self, like: Tensor, hops: int) -> Tensor:
        """Return a tensor from the device `hops` ahead."""
        received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        distributed.recv(received, self._peer(hops), group=self.group)
        return received

    def _peer(self, hops: int) -> int:
        return distributed.get_global_rank(self.group, self.rank + hops)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, line: DeviceLine, state: Tensor, *beside: Tensor) -> Tensor:
        ctx.line, ctx.count = line, len(beside)
        return line.receive(state, -1)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, ...]:
        ctx.line.send(gradient, -1)
        return None, None, *[None] * ctx.count


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, line: DeviceLine, result: Tensor, state: Tensor) -> Tensor:
        ctx.line = line
        ctx.save_for_backward(state)
        line.send(state, 1)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, gradient, ctx.line.receive(ctx.saved_tensors[0], 1)


def short_convolution(self: ShortConvolution, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Convolve the device's tokens, behind the last ones of the device before."""
    line: DeviceLine | None = getattr(self, "line", None)
    if line is None:
        return ShortConvolution.forward(self, x, state)
    start = x.new_zeros(x.shape[0], self.kernel_size[0] - 1, x.shape[2])
    output, state = ShortConvolution.forward(self, x, line.before(start, x, self.weight))
    return line.behind(output, state), state


def linear_attention(self: LinearAttention, x: Tensor, **options: Unpack[CallOptions]) -> Output:
    """Compute the device's heads and tokens; all tokens, where weights are asked for or a mask needs them."""
    mask, cache = options.get("attention_mask"), options.get("cache")
    has_weights = bool(options.get("return_weights"))
    needs_all = has_weights or cache is not None or not recurrence.hides_tokens_only(mask)
    return _recurrent(self, x, LinearAttention.forward, options, needs_all, {})


def gated_convolution(self: GatedConvolution, x: Tensor, **options: Unpack[CallOptions]) -> Output:
    """Compute the device's tokens of all channels."""
    return _recurrent(self, x, GatedConvolution.forward, options, options.get("cache") is not None, {}, by_heads=False)


def gated_delta_net(self: GatedDeltaNet, x: Tensor, **options: Unpack[CallOptions]) -> Output:
    """Compute the device's heads and tokens."""
    channels = _channels(self, self.config.key_width, self.config.key_width, self.config.value_width)
    picked = {"conv1d.weight": channels}
    return _recurrent(self, x, GatedDeltaNet.forward, options, options.get("cache") is not None, picked)


def kimi_delta_attention(self: KimiDeltaAttention, x: Tensor, **options: Unpack[CallOptions]) -> Output:
    """Compute the device's heads and tokens."""
    channels = _channels(self, self.config.key_width, self.config.key_width, self.config.value_width)
    picked = {"conv1d.weight": channels}
    return _recurrent(self, x, KimiDeltaAttention.forward, options, options.get("cache") is not None, picked)


def mamba(self: Mamba, x: Tensor, **options: Unpack[CallOptions]) -> Output:
    """Compute the device's tokens of all channels, as every key and query reads all channels."""
    picked = {"conv1d.weight": torch.arange(self.config.width)}
    return _recurrent(self, x, Mamba.forward, options, options.get("cache") is not None, picked, by_heads=False)


def mamba2(self: Mamba2, x: Tensor, **options: Unpack[CallOptions]) -> Output:
    """Compute the device's groups of heads, and its tokens."""
    config: Mamba2Config = self.config
    channels = _channels(self, config.width, config.key_width, config.key_width)
    names = ("conv1d.weight", "conv1d.bias") if config.conv_bias else ("conv1d.weight",)
    picked = dict.fromkeys(names, channels)
    return _recurrent(self, x, Mamba2.forward, options, options.get("cache") is not None, picked)


def lightning_attention(self: LightningAttention, batch: Tensor, **options: Unpack[CallOptions]) -> Output:
    """Compute the contexts and gates of the device's heads and tokens; the norm of all heads follows outside."""
    needs_all = options.get("cache") is not None
    return _recurrent(self, batch, LightningAttention._attend, options, needs_all, {}, features=2)


def _channels(self: nn.Module, *widths: int) -> Tensor:
    """Return the device's channels of a convolution over arrays of these widths, each of which has all heads."""
    starts = itertools.accumulate(widths, initial=0)
    parts = [
        torch.arange(start, start + size)[self.sharding.slice_of("tensor", size, _has_tensor(self))]
        for start, size in zip(starts, widths, strict=False)
    ]
    return torch.cat(parts)


def _has_tensor(self: nn.Module) -> bool:
    return bool(self.sharding.plan.size("tensor") > 1)


def _recurrent(
    self: nn.Module,
    x: Tensor,
    run: Callable[..., Output],
    options: CallOptions,
    needs_all: bool,
    picked: dict[str, Tensor],
    *,
    features: int = 0,
    by_heads: bool = True,
) -> Output:
    """Run a method of the module on the device's heads and tokens.

    Args:
        self: the module.
        x: its input.
        run: the method of its class.
        options: the keyword arguments of the call.
        needs_all: whether every device of a context needs all tokens.
        picked: parameter -> indices of the device's rows, of those that no single cut gives.
        features: how many of the first results hold features of the device's heads; 0: the first is a summand of the
            output.
        by_heads: whether devices share the heads.
    """
    if not is_sharded(x):
        return run(self, x, **options)
    sharding: Devices = self.sharding
    functional.as_batch(x, self.W_query, d_in=self.config.d_in, cache=options.get("cache"), cached="state")
    cut = dict(tokens_cut(sharding, x))
    if needs_all:
        cut["context"] = None
    by_heads = by_heads and _has_tensor(self)
    working: list[Role] = [role for role, number in cut.items() if number is not None]
    if by_heads:
        working.append("tensor")
    parts = local_parameters(self, sharding, working)
    for name, rows in picked.items():
        parts[name] = parts[name][rows]
    if by_heads and "out_proj.bias" in parts:  # is added once
        parts["out_proj.bias"] = parts["out_proj.bias"] * float(sharding.rank("tensor") == 0)
    config, line = _config_of_heads(self.config, sharding) if by_heads else self.config, None
    if cut["context"] is not None:
        line = DeviceLine(sharding.group("context"), sharding.rank("context"), sharding.plan.size("context"))
    channels = picked.get("conv1d.weight")
    own = options.copy()
    own["attention_mask"] = _mask_of(self, x, options, cut, by_heads)
    cache = options.get("cache")
    if cache is not None:
        own["cache"] = _part_of_cache(sharding, cache, cut, working, channels)
    attributes = {"config": config, "sharding": line}
    with on_parts(self, parts, **attributes):
        if hasattr(self, "conv1d"):
            self.conv1d.line = line
        result = run(self, sharding.local(x, cut, working), **own)
        if hasattr(self, "conv1d"):
            self.conv1d.line = None
    outputs = list(result) if isinstance(result, tuple) else [result]
    if cache is not None:
        outputs[-1] = _whole_cache(sharding, cache, outputs[-1], cut, channels, by_heads)
    for number in range(features):
        outputs[number] = sharding.joined(outputs[number], {**cut, "tensor": x.ndim - 1 if by_heads else None})
    if not features:
        outputs[0] = sharding.joined(outputs[0], cut, ["tensor"] if by_heads else [])
    if options.get("return_weights"):
        first = x.ndim - 2
        outputs[1] = sharding.joined(outputs[1], {"fsdp": cut["fsdp"], "tensor": first if by_heads else None})
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _config_of_heads(config: Any, sharding: Devices) -> Any:
    """Return the config of a device's heads."""
    devices = sharding.plan.size("tensor")
    changes = {"num_heads": config.num_heads // devices}
    if hasattr(config, "decay_rates"):
        changes["decay_rates"] = config.decay_rates[sharding.slice_of("tensor", config.num_heads, devices > 1)]
    for name in ("num_value_heads", "num_groups", "norm_groups"):
        if hasattr(config, name):
            changes[name] = getattr(config, name) // devices
    return config.replace(**changes) if devices > 1 else config


def _mask_of(self: nn.Module, x: Tensor, options: CallOptions, cut: Cut, by_heads: bool) -> Mask | Tensor | None:
    """Return a device's part of the attention mask of a call."""
    mask, sharding = options.get("attention_mask"), self.sharding
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        mask = whole(mask)
    batch = 1 if x.ndim == 2 else x.shape[0]
    rows = sharding.slice_of("fsdp", batch, cut["fsdp"] is not None)
    if cut["context"] is not None:
        batched = x if x.ndim == 3 else x[None]
        visible = recurrence.visible_tokens(mask, batched, None)
        assert visible is not None, "there is a mask"
        return visible[rows, sharding.slice_of("context", x.shape[-2], True)]
    if not isinstance(mask, Mask) and recurrence.hides_tokens_only(mask):
        mask = torch.as_tensor(mask)
        return mask[rows] if mask.shape[0] > 1 else mask
    tokens = x.shape[-2]
    mask = as_mask(mask).with_arrays(lambda array: whole(torch.as_tensor(array)))
    mask = mask.with_bool_arrays(functional.as_visible).placed(tokens, tokens)
    heads = sharding.slice_of("tensor", self.config.num_heads, True) if by_heads else slice(None)
    return part_of(mask, rows, heads)


def _part_of_cache(
    sharding: Devices, cache: RecurrentCache, cut: Cut, working: list[Role], channels: Tensor | None
) -> RecurrentCache:
    """Return the states of a device's heads."""
    by_heads = 1 if "tensor" in working else None
    state = sharding.local(cache.state, {"fsdp": cut["fsdp"], "tensor": by_heads}, working)
    conv_state = None
    if cache.conv_state is not None:
        conv_state = sharding.local(cache.conv_state, {"fsdp": cut["fsdp"]}, working)
        conv_state = conv_state if channels is None else conv_state[..., channels]
    return RecurrentCache(state, conv_state, cache.length, cache.capacity)


def _whole_cache(
    sharding: Devices,
    cache: RecurrentCache,
    part: RecurrentCache,
    cut: Cut,
    channels: Tensor | None,
    by_heads: bool,
) -> RecurrentCache:
    """Put the states of a device's heads back into the cache of all."""
    cache.state = sharding.joined(part.state, {"fsdp": cut["fsdp"], "tensor": 1 if by_heads else None})
    if cache.conv_state is not None and part.conv_state is not None and channels is not None:
        conv_state = part.conv_state.new_zeros((*part.conv_state.shape[:2], cache.conv_state.shape[2]))
        conv_state[..., channels] = part.conv_state
        sums: list[Role] = ["tensor"] if by_heads else []
        cache.conv_state = sharding.joined(conv_state, {"fsdp": cut["fsdp"]}, sums)
    cache.length = part.length
    return cache
