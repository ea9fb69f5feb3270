"""Every number that the chapter 3 notebook prints, from the torch twin by its seed and from the Flax twin by transfer.

One interpreter reads an entry's recipe (`parity_tests.goldens.interpreter`); what differs between the backends is in
`Torch` and `Flax`. That Flax prints the same without torch is tested in ``jax_side``.
"""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import attn_bridge
import jax_attn
import jax_attn.backend
import torch_attn
import torch_attn.backend
from attn_bridge import specs
from parity_tests import goldens
from parity_tests.goldens.interpreter import ARRAYS, ENTRIES, PARAMETERS, as_numpy, finish, routes


class Torch:
    """The torch twin: weights and dropout masks come from torch's generator, seeded as in the book."""

    package = torch_attn
    backend = torch_attn.backend

    def array(self, values: Any, dtype: Any = np.float32) -> Any:
        return self.backend.from_numpy(np.array(values, dtype))

    def build(self, recipe: dict[str, Any]) -> Any:
        """Seed, then construct the module, or draw the three matrices where the chapter has no module yet."""
        torch.manual_seed(recipe["seed"])
        if recipe["variant"] == "manual_projection":
            assert {draw["distribution"] for draw in recipe["draws"]} == {"uniform"}
            return SimpleNamespace(**{draw["name"]: torch.rand(*draw["shape"]) for draw in recipe["draws"]})
        return getattr(torch_attn, recipe["variant"])(**recipe["constructor"])

    def norm(self, entry: dict[str, Any]) -> Any:
        module = getattr(torch_attn, entry["variant"])(**entry["constructor"])
        module.load_state_dict(
            {name: torch.tensor(values) for name, values in entry["parameters"].items()}, strict=False
        )
        return module

    def drop(self, weights: Any, dropout: dict[str, Any]) -> Any:
        torch.manual_seed(dropout["seed"])
        return torch_attn.implementations.reference.drop(weights, dropout["rate"])


class Flax:
    """The Flax twin: weights come from the torch twin, and so does the dropout mask, as stored."""

    package = jax_attn
    backend = jax_attn.backend

    def array(self, values: Any, dtype: Any = np.float32) -> Any:
        return self.backend.from_numpy(np.array(values, dtype))

    def build(self, recipe: dict[str, Any]) -> Any:
        """Build the torch twin and transfer its weights, or convert the three matrices."""
        source = Torch().build(recipe)
        if recipe["variant"] == "manual_projection":
            drawn = {name: torch_attn.backend.to_numpy(weight) for name, weight in vars(source).items()}
            rules = specs.SelfAttentionV1Config(**recipe["constructor"]).rules()
            converted = attn_bridge.torch_to_flax(drawn, rules)
            return SimpleNamespace(**{name: self.backend.from_numpy(weight) for name, weight in converted.items()})
        target = getattr(jax_attn, recipe["variant"])(**recipe["constructor"], rngs=nnx.Rngs(0))
        attn_bridge.transfer(source, target)
        return target

    def norm(self, entry: dict[str, Any]) -> Any:
        """Build the torch twin and transfer its weights."""
        target = getattr(jax_attn, entry["variant"])(**entry["constructor"], rngs=nnx.Rngs(0))
        attn_bridge.transfer(Torch().norm(entry), target)
        return target

    def drop(self, weights: Any, dropout: dict[str, Any]) -> Any:
        keep = self.array(ARRAYS[dropout["keep_mask"]], bool)
        return jax_attn.steps.apply_dropout(weights, keep, dropout["rate"])


TWINS = pytest.mark.parametrize("twin", [Torch(), Flax()], ids=["torch", "flax"])


@pytest.fixture(autouse=True)
def _full_float32_products() -> Iterator[None]:
    """On a GPU, JAX multiplies float32 matrices in TF32 unless told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@TWINS
@pytest.mark.parametrize("name", ENTRIES)
def test_a_printed_result_is_reproduced(name: str, twin: Any) -> None:
    entry = ENTRIES[name]
    found = routes(twin, entry)
    assert found, f"{name}: no route"
    for route, result in found.items():
        goldens.assert_reproduced(finish(as_numpy(twin, result), entry["recipe"]["returns"]), entry, route)


@TWINS
@pytest.mark.parametrize("entry", goldens.norms(), ids=lambda entry: entry["id"])
def test_a_norm_gives_its_golden_values(entry: dict[str, Any], twin: Any) -> None:
    result = twin.norm(entry)(twin.array(entry["input"]))
    goldens.assert_reproduced(twin.backend.to_numpy(result), entry)


def test_all_printed_results_are_there() -> None:
    assert len(goldens.load()["entries"]) == len(ENTRIES) == 44


@TWINS
def test_every_module_of_the_chapter_is_called(twin: Any) -> None:
    called = {entry["recipe"]["variant"] for entry in ENTRIES.values() if "module" in routes(twin, entry)}
    assert called == {
        "plain_dot_product",
        "SelfAttention_v1",
        "SelfAttention_v2",
        "CausalAttention",
        "MultiHeadAttentionWrapper",
        "MultiHeadAttention",
    }


SEEDED = {
    f"{recipe['parameters']}-{recipe['variant']}": recipe
    for recipe in (entry["recipe"] for entry in ENTRIES.values())
    if recipe.get("parameters")
}


def test_all_stored_weights_belong_to_an_entry() -> None:
    assert {recipe["parameters"] for recipe in SEEDED.values()} == set(PARAMETERS)


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_yields_the_stored_weights_to_the_last_bit(name: str) -> None:
    recipe = SEEDED[name]
    stored = PARAMETERS[recipe["parameters"]]
    assert stored["seed"] == recipe["seed"]
    built = Torch().build(recipe)
    drawn = vars(built) if isinstance(built, SimpleNamespace) else built.state_dict()
    assert list(drawn) == list(stored["arrays"])
    for parameter, values in stored["arrays"].items():
        expected = np.array(values, np.float32)
        result = torch_attn.backend.to_numpy(drawn[parameter])
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, expected, err_msg=parameter, strict=True)


def test_the_stored_dropout_mask_is_what_the_seed_draws() -> None:
    dropout = ENTRIES["dropout.ones"]["recipe"]["dropout"]
    keep = np.array(ARRAYS["dropout_keep_mask"])
    np.testing.assert_array_equal(Torch().drop(torch.ones(keep.shape), dropout).numpy() != 0, keep == 1)


@TWINS
def test_the_stored_dropout_mask_gives_the_printed_result(twin: Any) -> None:
    entry = ENTRIES["dropout.ones"]
    keep = twin.array(ARRAYS["dropout_keep_mask"], bool)
    dropped = twin.package.steps.apply_dropout(
        twin.array(np.ones(keep.shape)), keep, entry["recipe"]["dropout"]["rate"]
    )
    goldens.assert_reproduced(as_numpy(twin, dropped), entry)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("variant",), "LinearAttention", r"^self_attention_v2\.weights: variant \(LinearAttention\) must be one of "),
        (("returns", "quantity"), "entropy", r"returns\.quantity \(entropy\) must be one of "),
        (("returns", "then"), "max", r"returns\.then \(max\) must be one of None, sum, sum_last_axis, shape$"),
        (("steps", "mask"), "window", r"steps\.mask \(window\) must be one of None, zero_above_diagonal, "),
        (("steps", "scale"), "sqrt_d_in", r"steps\.scale \(sqrt_d_in\) must be one of None, sqrt_key_dim$"),
        (("steps", "normalise"), "sigmoid", r"steps\.normalise \(sigmoid\) must be one of None, divide_by_sum, "),
        (("steps", "softcap"), 30.0, r"recipe field steps\.softcap is unknown$"),
        (("steps", "renormalise_rows"), True, r"steps\.renormalise_rows needs steps\.mask zero_above_diagonal$"),
        (("rope",), True, r"recipe field rope is unknown$"),
    ],
)
@TWINS
def test_an_entry_that_the_interpreter_does_not_know_is_refused(twin: Any, path: Any, value: Any, message: str) -> None:
    entry = copy.deepcopy(ENTRIES["self_attention_v2.weights"])
    *outer, last = path
    field = entry["recipe"]
    for name in outer:
        field = field[name]
    field[last] = value
    with pytest.raises(ValueError, match=message):
        routes(twin, entry)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0 + 2e-4, -np.inf], [0.5, 0.5]], r": 1 of 4 elements differ; worst at \(0, 0\): 1\.0002, expected 1\.0 "),
        ([[1.0, 0.0], [0.5, 0.5]], r"1 of 4 elements differ; worst at \(0, 1\): 0\.0, expected -inf within"),
        ([[1.0, np.inf], [0.5, 0.5]], r"worst at \(0, 1\): inf, expected -inf within"),
        ([[1.0, np.nan], [0.5, 0.5]], r"worst at \(0, 1\): nan, expected -inf within"),
        ([[1.0, -np.inf], [0.5, -np.inf]], r"worst at \(1, 1\): -inf, expected 0\.5 within"),
        ([[1.0, -np.inf], [np.nan, 0.5]], r"worst at \(1, 0\): nan, expected 0\.5 within"),
        ([[1.0, -np.inf]], r"shape \(1, 2\), expected \(2, 2\)(\n|$)"),
        ([1.0, -np.inf, 0.5, 0.5], r"shape \(4,\), expected \(2, 2\)(\n|$)"),
    ],
)
def test_a_wrong_result_is_refused(value: Any, message: str) -> None:
    entry = {"id": "example", "value": [[1.0, "-inf"], [0.5, 0.5]], "decimals": 4, "printed": "fixed"}
    goldens.assert_reproduced([[1.0 + 4e-5, -np.inf], [0.5, 0.5 - 4e-5]], entry)
    with pytest.raises(AssertionError, match=message):
        goldens.assert_reproduced(value, entry)


def test_a_shape_is_compared_exactly() -> None:
    entry = {"id": "example", "value": [6, 2], "decimals": 0, "printed": "shape"}
    goldens.assert_reproduced((6, 2), entry)
    with pytest.raises(AssertionError, match=r"worst at \(1,\): 3\.0, expected 2\.0 within 0\.0$"):
        goldens.assert_reproduced((6, 3), entry)


@TWINS
def test_masking_weights_and_masking_scores_agree(twin: Any) -> None:
    tokens = 6
    steps = twin.package.steps
    scores = twin.array(np.random.default_rng(0).standard_normal((2, 3, tokens, tokens)) * 3.0)
    mask = steps.causal_mask(tokens)
    after = as_numpy(twin, steps.mask_weights(steps.softmax(scores), mask))
    before = as_numpy(twin, steps.softmax(steps.mask_scores(scores, mask)))
    # Each way rounds at most two sums of `tokens` positive terms, two divisions and the exponents (below 32 in size).
    np.testing.assert_allclose(after, before, rtol=(2 * tokens + 2 + 32) * np.finfo(np.float32).eps, atol=0.0)
    assert np.all(before[..., ~np.tri(tokens, dtype=bool)] == 0.0)
    assert not np.allclose(before, as_numpy(twin, steps.softmax(scores)), atol=1e-2)


@TWINS
def test_naive_softmax_overflows_where_softmax_does_not(twin: Any) -> None:
    steps = twin.package.steps
    large = twin.array([[89.0, 88.0, 0.0]])
    assert np.isnan(as_numpy(twin, steps.naive_softmax(large))[0, 0])
    shifted = twin.array([[1.0, 0.0, -88.0]])
    np.testing.assert_array_equal(as_numpy(twin, steps.softmax(large)), as_numpy(twin, steps.softmax(shifted)))
    assert np.all(np.isfinite(as_numpy(twin, steps.softmax(large))))
