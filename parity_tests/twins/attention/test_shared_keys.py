"""Attention that reads the keys and values of an earlier layer, in both backends against the formula in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge.masks import sliding_window
from attn_bridge.reference.grouped_query_attention import keys_and_values, reference
from attn_bridge.reference.rotary import number
from attn_bridge.specs import GroupedQueryAttentionConfig, QKNorm, Rotary
from jax_attn.backend import get_weights as get_flax_weights
from torch_attn.backend import get_weights

pytestmark = pytest.mark.usefixtures("x64")

LENDER = GroupedQueryAttentionConfig(
    12, 4, 2, 6, position=Rotary(50.0), qk_norm=QKNorm(), mask=sliding_window(4), value_norm=1e-3, key_is_value=True
)
BORROWER = LENDER.replace(value_norm=None, key_is_value=False, shared=True)
X, Y = np.random.default_rng(5).normal(size=(2, 3, 9, 12))
MASK = np.arange(9) >= np.array([0, 2, 5])[:, None]


class Side:
    """Both layers in one backend."""

    def __init__(self, name):
        self.name = name
        if name == "torch":
            with torch.random.fork_rng():
                torch.manual_seed(3)
                kinds = (torch_attn.GroupedQueryAttention(one, dtype=torch.float64) for one in (LENDER, BORROWER))
                self.lender, self.borrower = (kind.eval() for kind in kinds)
            self.array, self.weights = torch.tensor, get_weights
        else:
            options = {"rngs": nnx.Rngs(3), "param_dtype": jnp.float64}
            self.lender, self.borrower = (jax_attn.GroupedQueryAttention(one, **options) for one in (LENDER, BORROWER))
            self.array, self.weights = jnp.asarray, get_flax_weights

    def parameters(self, module):
        """Return the weights under torch names."""
        weights = self.weights(module)
        if self.name == "torch":
            return weights
        return {key.replace(".kernel", ".weight"): one.T if "kernel" in key else one for key, one in weights.items()}


@pytest.fixture(params=["torch", "flax"])
def side(request):
    return Side(request.param)


def test_shared_keys_give_what_the_formula_gives(side):
    mask = side.array(MASK)
    first, shared = side.lender(side.array(X), attention_mask=mask, return_shared=True)
    second = side.borrower(side.array(Y), shared=shared)
    own = side.parameters(side.lender)
    keys = keys_and_values(LENDER, own, X, number(X, MASK))
    for found, (config, parameters, given) in zip(
        (first, second),
        ((LENDER, own, {}), (BORROWER, side.parameters(side.borrower), {"shared": keys})),
        strict=True,
    ):
        x = X if config is LENDER else Y
        wanted, _ = reference(config, parameters, x, MASK, **given)
        assert np.abs(np.asarray(found.detach() if side.name == "torch" else found) - wanted)[MASK].max() < 1e-12
    assert not {"W_key.weight", "W_value.weight", "k_norm.scale"} & side.parameters(side.borrower).keys()


@pytest.mark.parametrize("rolling", [False, True])
@torch.no_grad()
def test_a_cache_of_the_lender_changes_nothing(side, rolling):
    _, shared = side.lender(side.array(X), return_shared=True)
    whole = side.borrower(side.array(Y), shared=shared)
    cache, parts = side.lender.init_cache(3, 9, rolling=rolling), []
    for begin, end in ((0, 4), (4, 5), (5, 6), (6, 9)):
        x, y = side.array(X[:, begin:end]), side.array(Y[:, begin:end])
        _, shared, cache = side.lender(x, cache=cache, return_shared=True)
        parts.append(side.borrower(y, shared=shared))
    join = torch.cat if side.name == "torch" else jnp.concatenate
    assert float(abs(join(parts, 1) - whole).max()) < 1e-12


def test_keys_that_are_missing_or_superfluous_are_refused(side):
    x = side.array(X)
    with pytest.raises(ValueError, match=r"^shared must be given to attention that does not project keys$"):
        side.borrower(x)
    _, shared = side.lender(x, return_shared=True)
    with pytest.raises(ValueError, match=r"^shared must be None for attention that projects keys$"):
        side.lender(x, shared=shared)
