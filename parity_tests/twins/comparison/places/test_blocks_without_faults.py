"""The blocks that faults are planted in are right without one, on one device and in both frameworks.

What each fault does to them is tested in `twins/mutation`, and on several devices in `faults`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from attn_bridge import backends, torch_to_flax
from attn_parity.sides.subject import Arguments, load_adapter
from fault_lab.adapters import load_mutants
from fault_lab.mesh.configs import draw_mesh_config
from fault_lab.planted import mutants
from parity_tests.support.calls.blocks import find_config

from ...models.block_reference import reference

MASKED = {
    "padding alone": {"causal": False, "window": None, "padding": "right"},
    "a window": {"causal": False, "window": 3, "padding": "none"},
    "padding and causal": {"causal": True, "padding": "left", "rope": True},
}


def outputs_of(side, config, weights):
    module = load_mutants(side, "mutants").build("Block", {"config": config})
    held = torch_to_flax(weights, mutants.block_rules({name: one.shape for name, one in weights.items()}))
    given = held if side == "flax" else weights
    return load_adapter(side).subject_of(module).run(given, Arguments((), config.inputs()), None, dtype="float64")


@pytest.mark.parametrize("name", MASKED)
def test_the_block_computes_what_its_reference_does(name):
    config = find_config(300_000, lambda one: all(getattr(one, key) == value for key, value in MASKED[name].items()))
    module = load_mutants("torch", "mutants").build("Block", {"config": config})
    shapes = {key: shape for key, (shape, _) in backends.load("torch").describe_weights(module).items()}
    weights = mutants.draw_weights(shapes, config.seed, config.gain or 1.0)
    expected = reference(config, weights, **config.inputs())[0]
    for side in ("torch", "flax"):
        found = outputs_of(side, config, weights).outputs[0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


@pytest.mark.parametrize("seed", [1, 3])
def test_the_block_for_many_devices_is_one_function_on_one(seed):
    config, random = draw_mesh_config(seed, {"tensor": 2, "context": 2}), np.random.default_rng(seed)
    weights = {
        name: (random.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in config.shapes().items()
    }
    x = random.normal(size=(2, config.tokens, config.d_model)).astype(np.float32)
    mask = np.arange(config.tokens) < np.array([[config.tokens], [config.tokens - 3]])
    build = {side: load_mutants(side, "mesh_mutants.block").build for side in ("torch", "flax")}
    ours = build["torch"](config, weights)(torch.from_numpy(x), torch.from_numpy(mask)).detach().numpy()
    theirs = build["flax"](config, weights)(jnp.asarray(x), jnp.asarray(mask))
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=3e-6 * np.abs(ours).max())
