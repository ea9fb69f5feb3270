"""Every number that the chapter 3 notebook prints, from Flax by the book's seeds, torch not being there."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn
import jax_attn.backend
from jax_attn.implementations.reference import drop
from jax_attn.random import TorchRngs
from parity_tests import goldens
from parity_tests.goldens.interpreter import ARRAYS, ENTRIES, PARAMETERS, as_numpy, finish, routes


class FlaxAlone:
    """The Flax twin: weights and dropout masks are drawn as torch draws them after the book's seed."""

    package = jax_attn
    backend = jax_attn.backend

    def array(self, values: Any, dtype: Any = np.float32) -> Any:
        return jnp.asarray(np.array(values, dtype))

    def build(self, recipe: dict[str, Any]) -> Any:
        rngs = TorchRngs(recipe["seed"])
        if recipe["variant"] == "manual_projection":
            return SimpleNamespace(**{draw["name"]: rngs.uniform(draw["shape"]) for draw in recipe["draws"]})
        return getattr(jax_attn, recipe["variant"])(**recipe["constructor"], rngs=rngs)

    def drop(self, weights: Any, dropout: dict[str, Any]) -> Any:
        return drop(weights, dropout["rate"], TorchRngs(dropout["seed"]))


TWIN = FlaxAlone()


@pytest.fixture(autouse=True)
def _full_float32_products() -> Iterator[None]:
    """On a GPU, JAX multiplies float32 matrices in TF32 unless told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("name", ENTRIES)
def test_a_printed_result_is_reproduced_by_its_seed(name: str) -> None:
    entry = ENTRIES[name]
    found = routes(TWIN, entry)
    assert found, f"{name}: no route"
    for route, result in found.items():
        goldens.assert_reproduced(finish(as_numpy(TWIN, result), entry["recipe"]["returns"]), entry, route)


@pytest.mark.parametrize("entry", goldens.norms(), ids=lambda entry: entry["id"])
def test_a_norm_gives_its_golden_values(entry: dict[str, Any]) -> None:
    module = getattr(jax_attn, entry["variant"])(**entry["constructor"], rngs=TorchRngs(0))
    for name, values in entry["parameters"].items():
        getattr(module, name)[...] = jnp.asarray(values)
    goldens.assert_reproduced(np.asarray(module(TWIN.array(entry["input"]))), entry)


def test_dropout_entries_are_among_them() -> None:
    recipes = [entry["recipe"] for entry in ENTRIES.values()]
    assert sum(bool(recipe.get("dropout")) and recipe["dropout"]["rate"] > 0 for recipe in recipes) >= 2


SEEDED = {
    f"{recipe['parameters']}-{recipe['variant']}": recipe
    for recipe in (entry["recipe"] for entry in ENTRIES.values())
    if recipe.get("parameters")
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_yields_the_stored_weights_to_the_last_bit(name: str) -> None:
    recipe = SEEDED[name]
    stored = PARAMETERS[recipe["parameters"]]
    built = TWIN.build(recipe)
    for parameter, values in stored["arrays"].items():
        expected = np.array(values, np.float32)
        leaf: Any = built
        path = parameter.split(".")
        for part in path[:-1]:
            leaf = leaf[int(part)] if part.isdigit() else getattr(leaf, part)
        if path[-1] == "weight":
            leaf, expected = leaf.kernel, expected.T
        else:
            leaf = getattr(leaf, path[-1])
        np.testing.assert_array_equal(np.asarray(leaf[...]), expected, err_msg=parameter, strict=True)


def test_the_stored_dropout_mask_is_what_the_seed_draws() -> None:
    keep = np.array(ARRAYS["dropout_keep_mask"])
    dropped = TWIN.drop(jnp.ones(keep.shape), ENTRIES["dropout.ones"]["recipe"]["dropout"])
    np.testing.assert_array_equal(np.asarray(dropped) != 0, keep == 1)
