"""Calls of sharded torch modules in gloo processes, beside the plain modules: masks, weights, dropout, caches.

The variants by themselves are what `mesh_matrix` runs; here is what a call may ask for beside its input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_bridge import masks
from attn_bridge.specs import (
    Alibi,
    CrossAttentionConfig,
    GatedConvolutionConfig,
    GatedDeltaNetConfig,
    GroupedQueryAttentionConfig,
    KimiDeltaAttentionConfig,
    LightningAttentionConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MambaConfig,
    MultiHeadLatentAttentionConfig,
    RelativeBias,
    Rotary,
)

WIDTH, TOKENS, HEADS = 16, 16, 8
Make = Callable[..., nn.Module]


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process runs: everything on a mesh by some methods.

    Attributes:
        sizes: of the axes of the mesh.
        methods: how queries meet keys.
        folder: where the processes meet.
        rank: number of the process.
    """

    sizes: tuple[tuple[str, int], ...]
    methods: tuple[str, ...]
    folder: Path
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
    """A module, made anew for each method, and the arguments of one call of it."""

    name: str
    make: Make
    x: Tensor
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: bool = False
    with_rngs: bool = False
    least_tokens: int | None = None


def run_job(job: Job) -> dict[str, float]:
    """Return the largest relative difference of outputs and gradients, by call and method."""
    from attn_parity.frameworks.torch import meshes

    mesh = meshes.simulate(dict(job.sizes), job.rank, job.folder)
    try:
        found = {
            f"{call.name}, {method}": _apart(call, mesh, dict(job.sizes), method)
            for call in calls()
            for method in job.methods
        }
        return found | _cached(mesh, dict(job.sizes))
    finally:
        meshes.leave()


def calls() -> Iterator[Call]:
    """Yield what is called."""
    from torch_attn import (
        CrossAttention,
        GatedDeltaNet,
        GroupedQueryAttention,
        LinearAttention,
        MultiHeadAttention,
        MultiHeadLatentAttention,
    )

    source = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    def hidden(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=source) > 0.4

    def of(kind: Any, config: Any) -> Make:
        return lambda **options: kind(config, dtype=torch.float64, **options)

    def grouped(**options: Any) -> Make:
        return of(GroupedQueryAttention, GroupedQueryAttentionConfig(WIDTH, HEADS, 4, **options))

    def plain(**options: Any) -> nn.Module:
        return MultiHeadAttention(WIDTH, WIDTH, TOKENS, 0.2, HEADS, True, dtype=torch.float64, **options)

    linear = of(LinearAttention, LinearAttentionConfig(WIDTH, HEADS))
    delta = of(GatedDeltaNet, GatedDeltaNetConfig(WIDTH, 4, 8, 4, 2))
    cross = of(CrossAttention, CrossAttentionConfig(WIDTH, HEADS, d_context=12, num_kv_heads=2))
    latent_config = MultiHeadLatentAttentionConfig(
        WIDTH, HEADS, latent_dim=6, nope_dim=4, rope_dim=2, value_dim=3, position=Rotary()
    )
    latent = of(MultiHeadLatentAttention, latent_config)
    x, x2, per_head = normal(2, TOKENS, WIDTH), normal(TOKENS, WIDTH), hidden(2, HEADS, TOKENS, TOKENS)
    per_head[0, 0, 3] = per_head[1, :, 5] = False  # rows that see nothing
    numbers = torch.randint(0, 3, (2, TOKENS), generator=source)
    capped = grouped(mask=masks.full(), sinks=True, softcap=3.0, position=Alibi())
    shown = {
        "padding": hidden(2, TOKENS),
        "per head": per_head,
        "per query": hidden(2, 1, TOKENS, TOKENS),
        "keys alone": hidden(2, 1, 1, TOKENS),
        "lengths": masks.padding([5, TOKENS]) & masks.prefix(3),
        "documents": masks.documents(numbers) | hidden(2, TOKENS),
    }
    for name, mask in shown.items():
        yield Call(f"MHA, {name}", plain, x, {"attention_mask": mask})
        yield Call(f"capped, {name}", capped, x, {"attention_mask": mask})
        yield Call(f"linear, {name}", linear, x, {"attention_mask": mask})
    yield Call("delta net, padding", delta, x, {"attention_mask": shown["padding"]})
    yield Call("dropout of torch", plain, x, train=True)
    yield Call("dropout of JAX", grouped(dropout=0.3, sinks=True), x, train=True, with_rngs=True)
    windowed = grouped(position=Rotary(), mask=masks.sliding_window(4))
    yield Call("weights", windowed, x, {"return_weights": True, "attention_mask": shown["padding"]})
    yield Call("weights without a batch", windowed, x2, {"return_weights": True})
    yield Call("weights of linear attention", linear, x2, {"return_weights": True})
    yield Call("delta net without a batch", delta, x2)
    yield Call("positions", grouped(position=Rotary()), x, {"positions": torch.arange(TOKENS).flip(0) * 2})
    in_rows = grouped(head_dim=6, position=Rotary(axes=(1, 1, 1), layout="interleaved"))
    rows = torch.randint(0, 30, (3, 2, TOKENS), generator=torch.Generator().manual_seed(4))
    yield Call("positions in rows", in_rows, x, {"positions": rows, "attention_mask": shown["padding"]})
    yield Call("context that does not divide", cross, x, {"context": normal(2, 7, 12), "attention_mask": hidden(2, 7)})
    yield Call("context that divides", cross, x, {"context": normal(2, 8, 12), "attention_mask": hidden(2, 8)})
    yield Call("absorbed", latent, x, {"absorbed": True, "attention_mask": per_head, "return_weights": True})
    relative = grouped(position=RelativeBias(8, 6), scale=1.0)
    yield Call("relative bias", relative, x, {"attention_mask": shown["padding"], "return_weights": True})
    balanced = {"least_tokens": 2}
    yield Call("balanced", grouped(), x, {"attention_mask": shown["padding"]}, **balanced)
    yield Call("balanced dropout", grouped(dropout=0.3), x, {"attention_mask": per_head}, train=True, **balanced)


def _apart(call: Call, mesh: Any, sizes: dict[str, int], method: str) -> float:
    from torch_attn.parallel import parallelize

    wanted = _results(_made(call), call)
    with _balancing(call.least_tokens):
        ours = _results(parallelize(_made(call), mesh, **{name: name for name in sizes}, method=method), call)
    assert wanted.keys() == ours.keys()
    return max(_distance(wanted[name], ours[name]) for name in wanted)


def _distance(wanted: Tensor, found: Tensor) -> float:
    apart = float(((wanted - found).abs() / wanted.abs().clamp(min=1.0)).max())
    return apart if math.isfinite(apart) else math.inf


def _made(call: Call) -> nn.Module:
    from torch_attn.random import JaxRngs

    module = call.make(**({"rngs": JaxRngs(7)} if call.with_rngs else {})).train(call.train)
    return _drawn(module)


def _drawn(module: nn.Module) -> nn.Module:
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=source, dtype=parameter.dtype))
    return module


def _results(module: nn.Module, call: Call) -> dict[str, Tensor]:
    from torch_attn.shards import cut_as, whole

    torch.manual_seed(5)
    x = call.x.clone().requires_grad_()
    outputs = module(x, **call.options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss: Any = 0.0
    for number, output in enumerate(outputs):
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(number), dtype=output.dtype)
        loss = loss + (output * cut_as(weights, output)).sum()
    loss.backward()
    found = {f"output {number}": whole(output).detach() for number, output in enumerate(outputs)} | {"x": x.grad}
    return found | {name: whole(one.grad) for name, one in module.named_parameters() if one.grad is not None}


@contextlib.contextmanager
def _balancing(least_tokens: int | None) -> Iterator[None]:
    """Let the exchange pay from so few tokens on."""
    from torch_attn.parallel.schemes import balance

    former = balance.LEAST_TOKENS
    balance.LEAST_TOKENS = former if least_tokens is None else least_tokens
    try:
        yield
    finally:
        balance.LEAST_TOKENS = former


def _cached(mesh: Any, sizes: dict[str, int]) -> dict[str, float]:
    """Return how far decoding with a cache is from that of the plain module; rows change their places on the way."""
    from torch_attn import (
        GatedConvolution,
        GatedDeltaNet,
        GroupedQueryAttention,
        KimiDeltaAttention,
        LightningAttention,
        Mamba,
        Mamba2,
    )
    from torch_attn.parallel import parallelize
    from torch_attn.shards import whole

    kinds: dict[str, tuple[Any, Any]] = {
        "grouped": (
            GroupedQueryAttention,
            GroupedQueryAttentionConfig(WIDTH, HEADS, 4, position=Rotary(), mask=masks.sliding_window(5)),
        ),
        "delta net": (GatedDeltaNet, GatedDeltaNetConfig(WIDTH, 4, 8, 4, 2)),
        "kimi": (KimiDeltaAttention, KimiDeltaAttentionConfig(WIDTH, 8, 3, 2)),
        "lightning": (LightningAttention, LightningAttentionConfig(WIDTH, 8, 3)),
        "convolution": (GatedConvolution, GatedConvolutionConfig(WIDTH, bias=True)),
        "mamba": (Mamba, MambaConfig(WIDTH, 12, 3, bias=True)),
        "mamba2": (Mamba2, Mamba2Config(WIDTH, 8, 4, 3, 4, bias=True)),
    }
    x = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = {}
    for name, (kind, config) in kinds.items():
        outputs = []
        for sharded in (False, True):
            module = _drawn(kind(config, dtype=torch.float64)).eval()
            if sharded:
                # Their channels mix in the projections: tensor has no heads to cut.
                cut = [axis for axis in sizes if axis != "tensor" or name not in ("convolution", "mamba")]
                parallelize(module, mesh, **{axis: axis for axis in cut})
            cache, steps = module.init_cache(2, 16), []
            with torch.no_grad():
                for first, last in ((0, 6), (6, 7), (7, 10), (10, 11), (11, 12)):
                    output, cache = module(x[:, first:last], cache=cache)
                    steps.append(whole(output))
                    cache = cache.reorder(torch.tensor([1, 0]))
            outputs.append(torch.cat(steps, 1))
        found[f"cache of {name}"] = _distance(*outputs)
    return found
