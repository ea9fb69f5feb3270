"""Convolutional networks: NCHW in torch, NHWC in JAX. b image, i and o channels, h and w."""

from __future__ import annotations

from ..gallery import Case, entry, fault, inside
from ..weights import carry, fresh, held, linen, numbers, onto, rules

STATISTICS = """
{path}running_mean | {path}mean
{path}running_var | {path}var
"""


@entry(
    "BatchNorm",
    "stride",
    faults={
        "same-padding": fault("conv1"),
        "batch-norm-eps": fault("bn1"),
        "flattened-channels-last": fault(*inside("", "conv2", "bn2", "fc")),
        "relu-before-the-norm": fault(*inside("", "conv1", "bn1", "conv2")),
    },
)
def batch_norm_network(wrong: str | None) -> Case:
    """Pair a stem with stride 2 and explicit padding, BatchNorm, max pooling, and a flattened head."""
    import jax
    import torch
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(16, 5)

        def forward(self, x):
            x = torch.relu(self.bn1(self.conv1(x)))
            x = self.pool(torch.relu(self.bn2(self.conv2(x))))
            return self.fc(x.flatten(1))

    rngs = nnx.Rngs(0)

    class Port(nnx.Module):
        def __init__(self) -> None:
            padding = "SAME" if wrong == "same-padding" else ((1, 1), (1, 1))
            self.conv1 = nnx.Conv(3, 8, (3, 3), 2, padding=padding, use_bias=False, rngs=rngs)
            self.bn1 = nnx.BatchNorm(8, epsilon=1e-3 if wrong == "batch-norm-eps" else 1e-5, rngs=rngs)
            self.conv2 = nnx.Conv(8, 4, (3, 3), padding="SAME", use_bias=False, rngs=rngs)
            self.bn2, self.fc = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(16, 5, rngs=rngs)

        def __call__(self, x):
            x = self.conv1(x)
            x = self.bn1(jax.nn.relu(x)) if wrong == "relu-before-the-norm" else jax.nn.relu(self.bn1(x))
            x = nnx.max_pool(jax.nn.relu(self.bn2(self.conv2(x))), (2, 2), (2, 2))
            x = x if wrong == "flattened-channels-last" else x.transpose(0, 3, 1, 2)
            return self.fc(x.reshape(x.shape[0], -1))

    names = f"""
    conv{{i}}.weight | conv{{i}}.kernel | o i h w -> h w i o
    bn{{i}}.weight | bn{{i}}.scale
    fc.weight | fc.kernel | o d -> d o
    {{path}}bias | {{path}}bias
    {STATISTICS}
    """
    first = fresh(Torch())
    image = numbers(2, 3, 8, 8)
    return Case(first, onto(first, Port(), names), image, {"second_inputs": image.transpose(0, 2, 3, 1)})


@entry(
    "squeeze-excite",
    "1x1 convolution and linear",
    "Linen",
    faults={
        "sigmoid-forgotten": fault(*inside("", "fc1", "fc2", "project")),
        "squeezed-by-the-maximum": fault(*inside("", "expand", "fc1")),
        "reduced-by-relu6": fault(*inside("", "fc1", "fc2")),
    },
)
def squeeze_excite(wrong: str | None) -> Case:
    """1x1 convolutions in torch are ``Dense`` layers in the port (arXiv 1709.01507)."""
    import jax.numpy as jnp
    import torch
    from flax import linen as nn_
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expand = nn.Conv2d(6, 12, 1)
            self.fc1, self.fc2 = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
            self.project = nn.Conv2d(12, 6, 1)

        def forward(self, x):
            y = nn.functional.silu(self.expand(x))
            scale = self.fc2(nn.functional.silu(self.fc1(y.mean((2, 3), keepdim=True))))
            return x + self.project(y * torch.sigmoid(scale))

    class Port(nn_.Module):
        @nn_.compact
        def __call__(self, x):
            x = x.transpose(0, 2, 3, 1)
            y = nn_.silu(nn_.Dense(12, name="expand")(x))
            squeeze = jnp.max if wrong == "squeezed-by-the-maximum" else jnp.mean
            act = nn_.relu6 if wrong == "reduced-by-relu6" else nn_.silu
            scale = nn_.Dense(12, name="fc2")(act(nn_.Dense(4, name="fc1")(squeeze(y, (1, 2), keepdims=True))))
            y = y * (scale if wrong == "sigmoid-forgotten" else nn_.sigmoid(scale))
            return (x + nn_.Dense(6, name="project")(y)).transpose(0, 3, 1, 2)

    first, image = fresh(Torch()), numbers(2, 6, 4, 4)
    names = "{path}weight | {path}kernel | o i 1 1 -> i o\n{path}bias | {path}bias"
    carried = carry(held(first), rules(names))
    return Case(first, linen(Port(), carried, image), image)


@entry(
    "ConvNeXt",
    "depthwise",
    "layer scale",
    faults={
        "kernel-turned": fault("dwconv"),
        "layer-scale-missing": fault(*inside("", "pwconv2"), "", ("pwconv1", "pwconv2")),
        "norm-eps": fault("norm"),
    },
)
def convnext(wrong: str | None) -> Case:
    """Depthwise 7x7, LayerNorm over channels, an MLP, a scale per channel (arXiv 2201.03545)."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dwconv = nn.Conv2d(6, 6, 7, padding=3, groups=6)
            self.norm = nn.LayerNorm(6, eps=1e-6)
            self.pwconv1, self.pwconv2 = nn.Linear(6, 24), nn.Linear(24, 6)
            self.gamma = nn.Parameter(torch.ones(6))

        def forward(self, x):
            y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
            y = self.gamma * self.pwconv2(nn.functional.gelu(self.pwconv1(y)))
            return x + y.permute(0, 3, 1, 2)

    rngs = nnx.Rngs(0)

    class Depthwise(nnx.Conv):
        def __call__(self, x):
            if wrong != "kernel-turned":
                return super().__call__(x)
            return super().__call__(x.swapaxes(1, 2)).swapaxes(1, 2)

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.dwconv = Depthwise(6, 6, (7, 7), feature_group_count=6, rngs=rngs)
            eps = 1e-5 if wrong == "norm-eps" else 1e-6
            self.norm = nnx.LayerNorm(6, epsilon=eps, use_fast_variance=False, rngs=rngs)
            self.pwconv1, self.pwconv2 = nnx.Linear(6, 24, rngs=rngs), nnx.Linear(24, 6, rngs=rngs)
            self.gamma = nnx.Param(jnp.ones(6))

        def __call__(self, x):
            y = self.norm(self.dwconv(x.transpose(0, 2, 3, 1)))
            y = self.pwconv2(jax.nn.gelu(self.pwconv1(y), approximate=False))
            y = y + 0 * self.gamma[...] if wrong == "layer-scale-missing" else self.gamma[...] * y
            return x + y.transpose(0, 3, 1, 2)

    names = """
    dwconv.weight | dwconv.kernel | o i h w -> h w i o
    norm.weight | norm.scale
    gamma | gamma
    {path}weight | {path}kernel | o d -> d o
    {path}bias | {path}bias
    """
    first = fresh(Torch())
    return Case(first, onto(first, Port(), names), numbers(2, 6, 8, 8))


@entry(
    "GroupNorm",
    "upsampling",
    faults={
        "one-group-per-channel": fault("norm1"),
        "upsampled-bilinearly": fault(*inside("", "norm2", "conv2")),
        "skip-missing": fault(*inside("", "conv2", "shortcut"), "shortcut"),
    },
)
def group_norm(wrong: str | None) -> Case:
    """Pair a residual block of a diffusion model: GroupNorm, SiLU, nearest upsampling, a 1x1 shortcut."""
    import jax
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(2, 8, eps=1e-6), nn.Conv2d(8, 4, 3, padding=1)
            self.norm2, self.conv2 = nn.GroupNorm(2, 4, eps=1e-6), nn.Conv2d(4, 4, 3, padding=1)
            self.shortcut = nn.Conv2d(8, 4, 1)

        def forward(self, x):
            silu, up = nn.functional.silu, nn.functional.interpolate
            y = self.conv1(silu(self.norm1(x)))
            y = self.conv2(up(silu(self.norm2(y)), scale_factor=2.0))
            return up(self.shortcut(x), scale_factor=2.0) + y

    rngs = nnx.Rngs(0)

    class Port(nnx.Module):
        def __init__(self) -> None:
            groups = 8 if wrong == "one-group-per-channel" else 2
            self.norm1 = nnx.GroupNorm(8, groups, use_fast_variance=False, rngs=rngs)
            self.norm2 = nnx.GroupNorm(4, 2, use_fast_variance=False, rngs=rngs)
            self.conv1, self.conv2 = nnx.Conv(8, 4, (3, 3), rngs=rngs), nnx.Conv(4, 4, (3, 3), rngs=rngs)
            self.shortcut = nnx.Conv(8, 4, (1, 1), rngs=rngs)

        def __call__(self, x):
            def up(x, method="nearest"):
                b, h, w, c = x.shape
                return jax.image.resize(x, (b, 2 * h, 2 * w, c), method)

            x = x.transpose(0, 2, 3, 1)
            y = jax.nn.silu(self.norm2(self.conv1(jax.nn.silu(self.norm1(x)))))
            y = self.conv2(up(y, "bilinear") if wrong == "upsampled-bilinearly" else up(y))
            skip = up(self.shortcut(x))
            y = y + 0 * skip if wrong == "skip-missing" else skip + y
            return y.transpose(0, 3, 1, 2)

    names = """
    norm{i}.weight | norm{i}.scale
    {path}weight | {path}kernel | o i h w -> h w i o
    {path}bias | {path}bias
    """
    first = fresh(Torch())
    return Case(first, onto(first, Port(), names), numbers(2, 8, 4, 4))


@entry(
    "transposed convolution",
    faults={"kernel-not-flipped": fault("up"), "output-cropped-elsewhere": fault("", "up", ("up", "out"))},
)
def conv_transpose(wrong: str | None) -> Case:
    """``ConvTranspose2d(k=4, s=2, p=1)``; with ``transpose_kernel`` Flax's kernel lies and turns as torch's does."""
    import jax
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.Conv2d(6, 3, 3)

        def forward(self, x):
            return self.out(nn.functional.elu(self.up(x)))

    rngs = nnx.Rngs(0)

    class Port(nnx.Module):
        def __init__(self) -> None:
            flipped = wrong != "kernel-not-flipped"
            padding = ((1, 3), (1, 3)) if wrong == "output-cropped-elsewhere" else ((2, 2), (2, 2))
            if flipped:
                self.up = nnx.ConvTranspose(4, 6, (4, 4), 2, padding=padding, transpose_kernel=True, rngs=rngs)
            else:
                self.up = Unflipped(4, 6, (4, 4), 2, padding=padding, transpose_kernel=True, rngs=rngs)
            self.out = nnx.Conv(6, 3, (3, 3), padding="VALID", rngs=rngs)

        def __call__(self, x):
            return self.out(jax.nn.elu(self.up(x.transpose(0, 2, 3, 1)))).transpose(0, 3, 1, 2)

    class Unflipped(nnx.ConvTranspose):
        def __call__(self, x):
            return super().__call__(x[:, ::-1, ::-1])[:, ::-1, ::-1]

    names = """
    up.weight | up.kernel | i o h w -> h w o i
    out.weight | out.kernel | o i h w -> h w i o
    {path}bias | {path}bias
    """
    first = fresh(Torch())
    return Case(first, onto(first, Port(), names), numbers(2, 4, 4, 4))


@entry(
    "weight norm",
    "1-d",
    "dilation",
    faults={
        "normed-over-the-wrong-axis": fault("conv", ""),
        "not-causal": fault("conv", ""),
    },
)
def weight_norm(wrong: str | None) -> Case:
    """Pair a causal, dilated convolution whose weight is a direction and a length per channel (WaveNet, 1609.03499)."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx
    from torch import nn

    class TorchConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight_v, self.weight_g = nn.Parameter(torch.zeros(8, 6, 3)), nn.Parameter(torch.zeros(8, 1, 1))
            self.bias = nn.Parameter(torch.zeros(8))

        def forward(self, x):
            weight = torch._weight_norm(self.weight_v, self.weight_g, 0)
            return nn.functional.conv1d(nn.functional.pad(x, (4, 0)), weight, self.bias, dilation=2)

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = TorchConv(), nn.Conv1d(4, 5, 1)

        def forward(self, x):
            gate, value = self.conv(x).chunk(2, 1)
            return self.out(torch.sigmoid(gate) * torch.tanh(value))

    rngs = nnx.Rngs(0)

    class Conv(nnx.Module):
        def __init__(self) -> None:
            self.weight_v, self.weight_g = nnx.Param(jnp.zeros((3, 6, 8))), nnx.Param(jnp.zeros((1, 1, 8)))
            self.bias = nnx.Param(jnp.zeros(8))

        def __call__(self, x):
            v = self.weight_v[...]
            axes = (1,) if wrong == "normed-over-the-wrong-axis" else (0, 1)
            kernel = self.weight_g[...] * v / jnp.sqrt((v * v).sum(axes, keepdims=True))
            padding = [(2, 2)] if wrong == "not-causal" else [(4, 0)]
            y = jax.lax.conv_general_dilated(
                x, kernel, (1,), padding, rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
            )
            return y + self.bias[...]

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.conv, self.out = Conv(), nnx.Conv(4, 5, (1,), rngs=rngs)

        def __call__(self, x):
            gate, value = jnp.split(self.conv(x.swapaxes(1, 2)), 2, -1)
            return self.out(jax.nn.sigmoid(gate) * jnp.tanh(value)).swapaxes(1, 2)

    names = """
    conv.weight_v | conv.weight_v | o i w -> w i o
    conv.weight_g | conv.weight_g | o i w -> w i o
    out.weight | out.kernel | o i w -> w i o
    {path}bias | {path}bias
    """
    first = fresh(Torch())
    return Case(first, onto(first, Port(), names), numbers(2, 6, 9))
