"""Hints from settings: what layers are told, by one name for all frameworks, and what it means that two differ."""

from __future__ import annotations

import types

import numpy as np
import pytest

from attn_parity.hints.settings import differing, read

LABELS = ("torch", "Flax")


class FlaxLayer(types.SimpleNamespace):
    """A layer whose class Flax defines."""


FlaxLayer.__module__ = "flax.nnx.nn.normalization"


def test_the_same_setting_by_another_name_is_read_by_one():
    one = types.SimpleNamespace(eps=1e-5, momentum=0.1, padding=(1, 1), kernel_size=(3, 3), num_key_value_heads=2)
    two = FlaxLayer(epsilon=1e-5, momentum=0.9, padding="SAME", kernel_size=(3, 3), num_kv_heads=2)
    assert read(one)["eps"] == read(two)["eps"] == 1e-5
    assert read(one)["num_kv_heads"] == read(two)["num_kv_heads"] == 2
    assert differing(read(one), read(two), LABELS) == []


class Raises:
    eps = 1e-5

    @property
    def momentum(self):
        raise RuntimeError("not yet")

    padding = np.ones(3)
    stride = (1, None)


def test_settings_that_raise_are_skipped():
    assert read(Raises()) == {"eps": 1e-5}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"eps": 1e-5}, {"eps": 1e-6}, "eps is 1e-05 in torch and 1e-06 in Flax"),
        ({"momentum": 0.1}, {"momentum": 0.01}, ""),
        ({"stride": [2, 2]}, {"stride": (2, 2)}, ""),
        ({"approximate": "none"}, {"approximate": True}, "approximate is 'none' in torch and True in Flax"),
        ({"approximate": "tanh"}, {"approximate": True}, ""),
        ({"stride": (2, 2)}, {"stride": 2}, ""),
        ({"stride": (1, 1)}, {"stride": None}, ""),
        ({"stride": (2, 2)}, {"stride": (2, 1)}, "stride is (2, 2) in torch and (2, 1) in Flax"),
        ({"dilation": 1}, {"dilation": (1, 1)}, ""),
        ({"padding": 0}, {"padding": "VALID"}, ""),
        ({"padding": (1, 1), "kernel_size": (3, 3)}, {"padding": "SAME", "stride": 1}, ""),
        ({"padding": (2, 1), "kernel_size": (5, 3)}, {"padding": "SAME", "kernel_size": (5, 3)}, ""),
        (
            {"padding": (1, 1), "kernel_size": (3, 3)},
            {"padding": "SAME", "stride": (2, 2)},
            "padding is (1, 1) in torch",
        ),
        ({"padding": 1}, {"padding": ((1, 1), (1, 1))}, ""),
        ({"padding": 1}, {"padding": ((0, 1), (0, 1))}, "padding is 1 in torch and ((0, 1), (0, 1)) in Flax"),
        ({"padding": (3,), "kernel_size": (4,)}, {"padding": ((3, 0),), "kernel_size": (4,)}, ""),
        ({"padding": (6,), "kernel_size": (4,), "dilation": (2,)}, {"padding": ((6, 0),), "dilation": (2,)}, ""),
        (
            {"padding": (3,), "kernel_size": (4,)},
            {"padding": ((2, 0),), "kernel_size": (4,)},
            "padding is (3,) in torch and ((2, 0),) in Flax",
        ),
        (
            {"padding": (3,), "kernel_size": (4,), "stride": (2,)},
            {"padding": ((3, 0),), "kernel_size": (4,), "stride": (2,)},
            "padding is (3,) in torch and ((3, 0),) in Flax",
        ),
        ({"padding": (3,), "kernel_size": (4,)}, {"padding": "CAUSAL", "kernel_size": (4,)}, ""),
        (
            {"padding": (4,), "kernel_size": (3,), "dilation": (2,)},
            {"padding": "CAUSAL", "kernel_size": (3,), "dilation": 3},
            "dilation is (2,) in torch and 3 in Flax",
        ),
        (
            {"padding": (2,), "kernel_size": (3,), "dilation": (2,)},
            {"padding": "CAUSAL", "kernel_size": (3,), "dilation": 2},
            "padding is (2,) in torch and 'CAUSAL' in Flax",
        ),
        ({"padding": "same", "kernel_size": 3}, {"padding": "SAME", "kernel_size": 3}, ""),
        ({"padding_idx": 0}, {"padding_idx": 0}, ""),
        (
            {"padding": (2,), "kernel_size": (3,), "dilation": (2,)},
            {"padding": "SAME", "kernel_size": (3,), "dilation": 1},
            "dilation is (2,) in torch and 1 in Flax",
        ),
        ({"groups": 2}, {"groups": 1}, "groups is 2 in torch and 1 in Flax"),
        ({"base": 10000}, {"base": 500000.0}, "the base of the rotary angles is 10000 in torch and 500000 in Flax"),
        ({"dropout": 0.1}, {"dropout": 0.2}, ""),
    ],
)
def test_settings_are_compared_by_what_they_mean(first, second, said):
    found = differing(first, second, LABELS)
    assert (found[0].startswith(said) and len(found) == 1) if said else found == []


def test_torchs_padding_idx_is_reported():
    found = differing({"padding_idx": 0}, {}, LABELS, ("Embedding", "Embed"))
    assert found == ["padding_idx is 0 in torch, and Embed has none: row 0 gets no gradient there"]
    assert differing({"padding_idx": None}, {}, LABELS, ("Embedding", "Embed")) == []
