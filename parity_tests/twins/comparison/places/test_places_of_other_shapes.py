"""A submodule that returns other shapes, in front of others that differ: the place is where the shapes part."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

X = np.random.default_rng(0).normal(size=(1, 4, 6, 6)).astype(np.float32)


class Bottleneck(nn.Module):
    """Halves the image in its second convolution, as ResNet v1.5 does."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 2, 1, bias=False)
        self.conv2 = nn.Conv2d(2, 2, 3, stride=2, padding=1, bias=False)
        self.conv3 = nn.Conv2d(2, 4, 1, bias=False)
        self.shortcut = nn.Conv2d(4, 4, 1, stride=2, bias=False)

    def forward(self, x):
        return self.conv3(self.conv2(self.conv1(x)).relu()) + self.shortcut(x)


class FlaxBottleneck(nnx.Module):
    """Halves it in the first one, as the paper does."""

    def __init__(self, strides=(2, 1), kernel=3):
        def conv(width_in, width, size, stride):
            return nnx.Conv(width_in, width, (size, size), stride, padding=size // 2, use_bias=False, rngs=nnx.Rngs(0))

        self.conv1, self.conv2 = conv(4, 2, 1, strides[0]), conv(2, 2, kernel, strides[1])
        self.conv3, self.shortcut = conv(2, 4, 1, 1), conv(4, 4, 1, 2)

    def __call__(self, x):
        x = x.transpose(0, 2, 3, 1)
        found = self.conv3(nnx.relu(self.conv2(self.conv1(x)))) + self.shortcut(x)
        return found.transpose(0, 3, 1, 2)


def test_a_stride_on_the_first_of_two_convolutions_begins_there():
    divergence = compare(Bottleneck(), FlaxBottleneck(), X, seeds=1).first_divergence
    assert divergence.path == "conv1"
    assert [one.path for one in divergence.candidates] == ["conv1", "conv2"]
    assert divergence.hint == "stride is (1, 1) in torch and 2 in Flax"
    assert "its outputs have other shapes: (1, 2, 6, 6) and (1, 3, 3, 2)" in divergence.message


def test_a_right_stride_is_equal():
    assert compare(Bottleneck(), FlaxBottleneck((1, 2)), X, seeds=1).verdict == "equal"


class Padded(nn.Module):
    """A causal convolution that returns 2 positions more, which are cut off; the projection behind it scales."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 4, 3, padding=2), nn.LayerNorm(4)

    def forward(self, x):
        return self.out(self.conv(x)[..., :-2].transpose(1, 2))


class FlaxPadded(nnx.Module):
    def __init__(self, epsilon=1e-2, dilation=1):
        self.conv = nnx.Conv(4, 4, (3,), padding="CAUSAL", kernel_dilation=dilation, rngs=nnx.Rngs(0))
        self.out = nnx.LayerNorm(4, epsilon=epsilon, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.out(self.conv(x.transpose(0, 2, 1)))


def test_other_shapes_that_are_made_up_for_are_not_the_place():
    divergence = compare(Padded(), FlaxPadded(), X[:, :, 0], seeds=1).first_divergence
    assert [one.path for one in divergence.candidates] == ["out"]


def test_the_setting_of_a_submodule_whose_numbers_no_hint_has_is_the_hint():
    """Its outputs have other shapes in a right pair as well, so that the numbers are those of the module around."""
    divergence = compare(Padded(), FlaxPadded(1e-5, dilation=2), X[:, :, 0], seeds=1).first_divergence
    assert (divergence.path, divergence.between) == ("conv", None)
    assert divergence.hint == "in conv, dilation is (1,) in torch and 2 in Flax"


class Pooled(nn.Module):
    """The largest value over time of two convolutions, and a highway around it."""

    def __init__(self):
        super().__init__()
        self.conv2, self.conv3 = nn.Conv1d(4, 3, 2), nn.Conv1d(4, 5, 3)
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        pooled = torch.cat([self.conv2(x).amax(-1), self.conv3(x).amax(-1)], -1)
        gate = self.gate(pooled).sigmoid()
        return gate * pooled.cos() / (1 + pooled.square())


class FlaxPooled(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv2, self.conv3 = nnx.Conv(4, 3, (2,), rngs=rngs), nnx.Conv(4, 5, (3,), rngs=rngs)
        self.gate = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        x = x.transpose(0, 2, 1)
        pooled = jnp.concatenate([self.conv2(x).max(1), self.conv3(x).max(1)], -1)
        gate = nnx.sigmoid(self.gate(pooled))
        return jnp.log(3 + gate) - jnp.tanh(2 * pooled)


def test_settings_of_places_that_were_not_excluded_are_the_hint():
    divergence = compare(Pooled(), FlaxPooled(), X[:, :, 0], seeds=1).first_divergence
    assert "in conv3, padding is (0,) in torch and 'SAME' in Flax" in divergence.hint


class Patches(nn.Module):
    """Normalises the channels of patches, of which there are as many as channels, with series and variables merged."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(64, 5)

    def forward(self, x):
        x = x / (x.var(-1, keepdim=True) + 1e-5).sqrt()
        patches = self.norm(x.flatten(0, 1).transpose(1, 2)).transpose(1, 2)
        return self.head(patches.reshape(*x.shape[:2], 64))


class FlaxPatches(nnx.Module):
    def __init__(self, ddof):
        self.norm = nnx.BatchNorm(8, epsilon=1e-5, use_running_average=True, rngs=nnx.Rngs(0))
        self.head, self._ddof = nnx.Linear(64, 5, rngs=nnx.Rngs(0)), ddof

    def __call__(self, x):
        x = x / jnp.sqrt(x.var(-1, keepdims=True, ddof=self._ddof) + 1e-5)
        return self.head(self.norm(x).reshape(*x.shape[:2], 64))


def test_channels_may_stand_elsewhere_where_rows_are_merged():
    x = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)
    assert compare(Patches().eval(), FlaxPatches(1), x, seeds=1).verdict == "equal"
    assert compare(Patches().eval(), FlaxPatches(0), x, seeds=1).first_divergence.between == ("", "norm")
