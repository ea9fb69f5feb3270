"""Invalid sides are refused in one line that names them."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx

from attn_parity.frameworks.jax.subject import subject_of
from attn_parity.sides.function import Function
from attn_parity.sides.subject import Arguments, CannotPromoteError, ModuleFailedError

from .modules import Twice, X, affine

BAD = {
    "no variables": (lambda: Twice(), r"the Linen module Twice comes without variables; give \(module, variables\)"),
    "variables empty": (lambda: (Twice(), {}), "the Linen module Twice has no variables"),
    "only params": (
        lambda: (Twice(), {"Dense_0": {"kernel": jnp.ones((4, 4))}}),
        r"must be \{'params': \{...\}\}, as init returns them; got Dense_0",
    ),
    "no arrays": (
        lambda: (Twice(), {"params": {"Dense_0": {"kernel": "a"}}}),
        r"must be arrays, got str at params.Dense_0.kernel",
    ),
    "a function's weights": (
        lambda: Function(affine, {"w": jnp.ones(2), "rate": 0.5}),
        "the weights of the JAX function affine must be arrays, got float at rate",
    ),
    "something else": (lambda: 3, "a JAX side is an NNX module, .* got int"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_sides_are_refused_in_one_line(case):
    build, message = BAD[case]
    with pytest.raises(ModuleFailedError, match=message) as caught:
        subject_of(build())
    assert "\n" not in str(caught.value)


def test_variables_of_another_module_are_named():
    variables = {"params": {"Dense_0": {"kernel": jnp.ones((4, 4))}, "other": {"bias": jnp.ones(4)}}}
    message = "its variables are those of another module: it has no Dense_0.bias, and there are other.bias"
    subject = subject_of((Twice(), variables))
    with pytest.raises(ModuleFailedError, match=message):
        subject.describe_outputs(subject.weights(), Arguments((X,)))


def test_wrong_widths_are_shown_with_their_arguments():
    subject = subject_of(nnx.Linear(5, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ModuleFailedError, match=r"Flax module Linear raised .*called with inputs float32 \(2, 3, 4\)"):
        subject.describe_outputs(subject.weights(), Arguments((X,)))
    with pytest.raises(CannotPromoteError, match=r"called with inputs float64|called with inputs float32"):
        subject.run(subject.weights(), Arguments((X,)), dtype="float64")


def test_tied_parameters_are_known_by_their_first_name():
    with nnx.set_graph_mode(True):  # in tree mode, NNX refuses shared references itself
        check_tied_names()


def check_tied_names():
    module = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(3)))
    names = list(subject_of(module).parameters())
    assert subject_of(module).tied() == {}
    module.layers[2].kernel = module.layers[0].kernel
    kernels = [name for name in names if name.endswith("kernel")]
    assert subject_of(module).tied() == {kernels[2]: kernels[0]}
