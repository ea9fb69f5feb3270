"""Submodules that do what the other side's code does around their counterparts are no places by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from . import planted_places as planted
from .planted_places import WIDTH, TorchLinear


class Part(nn.Module):
    """A part whose layers alone are in it, or also what comes before them (`enter`) and after them (`leave`)."""

    def __init__(self, is_whole):
        super().__init__()
        self.fc1, self.fc2, self.is_whole = TorchLinear(WIDTH, WIDTH), TorchLinear(WIDTH, WIDTH), is_whole

    def enter(self, x):
        return x

    def leave(self, x, y):
        return y

    def middle(self, y):
        return torch.relu(y)

    def core(self, x):
        return self.fc2(self.middle(self.fc1(x)))

    def forward(self, x):
        return self.leave(x, self.core(self.enter(x))) if self.is_whole else self.core(x)


class Residual(Part):
    def leave(self, x, y):
        return x + y


class Scaled(Part):
    def leave(self, x, y):
        return 0.5 * y


class LogSoftmax(Part):
    def leave(self, x, y):
        return torch.log_softmax(y, -1)


class Normed(Part):
    def enter(self, x):
        return torch.nn.functional.normalize(x, dim=-1)

    def leave(self, x, y):
        return x + y


class Entered(Part):
    def enter(self, x):
        return torch.abs(x)


class Gate(Entered):
    def leave(self, x, y):
        return x * torch.sigmoid(y)


class PooledGate(Gate):
    def enter(self, x):
        return x.mean(1, keepdim=True)


class OneLayer(Part):
    """A part with a layer of its own and no submodule."""

    def __init__(self, is_whole):
        nn.Module.__init__(self)
        self.weight, self.is_whole = nn.Parameter(torch.ones(WIDTH)), is_whole

    def enter(self, x):
        return 2.0 * x

    def leave(self, x, y):
        return y + 1.0

    def core(self, x):
        return torch.sin(self.weight * x)


KINDS = [Residual, Scaled, LogSoftmax, Normed, Entered, Gate, PooledGate, OneLayer]


def bent(x):
    return x + 0.1 * x * x


def half_detached(x):
    return 0.5 * x + 0.5 * x.detach()


class Model(nn.Module):
    """A part between two layers, twice; `fault` changes the numbers at some places."""

    def __init__(self, kind, is_whole, at=None, fault=bent):
        super().__init__()
        self.start, self.middle, self.end = (TorchLinear(WIDTH, WIDTH) for _ in range(3))
        self.part, self.second_part, self.place, self.fault = kind(is_whole), kind(is_whole), at, fault

    def at(self, name, x):
        return self.fault(x) if name == self.place else x

    def around(self, part, x):
        return part(x) if part.is_whole else part.leave(x, part(part.enter(x)))

    def forward(self, x):
        x = self.around(self.part, self.at("in front", torch.tanh(self.start(x))))
        x = torch.tanh(self.middle(self.at("behind", x)))
        x = self.around(self.second_part, self.at("between", x))
        return self.at("end", self.end(torch.sin(x)))


BOTH_WAYS = pytest.mark.parametrize("is_whole", [True, False])


@BOTH_WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_other_extent_agree(kind, is_whole):
    assert planted.place(Model(kind, is_whole), Model(kind, not is_whole)).divergence is None


FAULTS = {
    "in front": ("start", "part"),
    "behind": ("part", "middle"),
    "between": ("middle", "second_part"),
    "end": ("end", ""),
}
"""Fault -> between which submodules of the model it is."""


@BOTH_WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_elsewhere_is_not_placed_in_them(kind, is_whole):
    for at, ends in FAULTS.items():
        found = planted.place(Model(kind, is_whole), Model(kind, not is_whole, at)).divergence
        places = [
            (one.path, one.between and tuple(end.split(".")[0] for end in one.between)) for one in found.candidates
        ]
        # Nothing inside a part without layers tells what differs in front of it from what does behind it.
        assert ("", ends) in (places if kind is OneLayer else places[:1])


@pytest.mark.parametrize("at", ["behind", "end"])
@pytest.mark.parametrize("kind", [Residual, Scaled, Gate])
def test_a_lost_gradient_elsewhere_is_not_placed_in_them(kind, at):
    found = planted.place(Model(kind, True), Model(kind, False, at, half_detached)).divergence
    ends = ("part", "middle") if at == "behind" else ("end", "")
    assert (found.path, found.direction) == ("", "backward")
    assert tuple(end.split(".")[0] for end in found.between) == ends


@BOTH_WAYS
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not OneLayer])
def test_a_fault_between_their_layers_is_theirs(kind, is_whole):
    second = Model(kind, not is_whole)
    second.part.middle = torch.sigmoid
    found = planted.place(Model(kind, is_whole), second).divergence
    assert (found.path, found.between) == ("part", ("part.fc1", "part.fc2"))


@BOTH_WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_what_one_side_does_in_them_is_among_the_places(kind, is_whole):
    second = Model(kind, not is_whole)
    second.part.leave = lambda x, y: 1.1 * kind.leave(second.part, x, y)
    found = planted.place(Model(kind, is_whole), second).divergence
    places = {(one.path, one.between and tuple(end.split(".")[0] for end in one.between)) for one in found.candidates}
    assert places & ({("", ("part", "middle"))} if is_whole else {("part", None), ("part", ("part", "part"))})
