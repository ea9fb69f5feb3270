"""A submodule that computes what the other side's code computes in front of its counterpart, or behind it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from attn_bridge.parity import compare

RANDOM = np.random.default_rng(0)


class Part(nn.Module):
    """A part with one layer, as a port writes it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


class Styled(nn.Module):
    """Mixes the features of two arrays, whose activation is in the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 6)

    def forward(self, x, y):
        x, y = self.encoder(x), self.encoder(y)
        return self.decoder(x * torch.exp(-y))


class OtherStyled(nn.Module):
    """The same with the activation behind the encoder, and a sign that may be wrong."""

    def __init__(self, sign=-1.0):
        super().__init__()
        self.encode, self.decode, self.sign = Part(nn.Linear(6, 8)), Part(nn.Linear(8, 6)), sign

    def forward(self, x, y):
        x, y = torch.relu(self.encode(x)), torch.relu(self.encode(y))
        return self.decode(x * torch.exp(self.sign * y))


class Skipping(nn.Module):
    """Joins an image and its half, which pools in front of its convolution; the padding of the last is outside."""

    def __init__(self):
        super().__init__()
        self.into = nn.Conv2d(3, 4, 1)
        self.down = nn.Sequential(nn.MaxPool2d(2), Part(nn.Conv2d(4, 4, 1)))
        self.pad, self.last = nn.ReflectionPad2d(1), nn.Conv2d(8, 2, 3)

    def forward(self, x):
        x = self.into(x)
        small = nn.functional.interpolate(self.down(x), scale_factor=2.0)
        return self.last(self.pad(torch.cat([x, small], 1)))


class OtherSkipping(nn.Module):
    def __init__(self, is_turned=False):
        super().__init__()
        self.into, self.down = nn.Conv2d(3, 4, 1), Part(nn.Conv2d(4, 4, 1))
        self.last, self.is_turned = nn.Conv2d(8, 2, 3, padding=1, padding_mode="reflect"), is_turned

    def forward(self, x):
        x = self.into(x)
        small = self.down(nn.functional.max_pool2d(x, 2)).repeat_interleave(2, 2).repeat_interleave(2, 3)
        return self.last(torch.cat([small, x] if self.is_turned else [x, small], 1))


def draw(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


def test_an_activation_behind_a_submodule_is_no_difference_of_it():
    inputs = draw(3, 6), draw(3, 6)
    assert compare(Styled(), OtherStyled(), inputs, seeds=1).verdict == "equal"
    found = compare(Styled(), OtherStyled(1.0), inputs, seeds=1).first_divergence
    assert (found.path, found.between[1]) == ("", "decoder")
    assert "relu" not in found.hint


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_pool_or_a_border_in_front_of_a_submodule_is_no_difference_of_it(is_turned):
    report = compare(Skipping(), OtherSkipping(is_turned), draw(2, 3, 6, 4), seeds=1)
    if not is_turned:
        assert report.verdict == "equal"
        return
    found = report.first_divergence
    assert found.path == ""
    assert any(place.between and place.between[1] == "last" for place in found.candidates)
    assert not any(place.between and place.between[1].startswith("down") for place in found.candidates)
