"""Dropout of any JAX code, driven by given masks: whatever asks `jax.random.bernoulli` for one gets ours."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import Array
from jax.extend import core
from jax.typing import ArrayLike

from jax_attn.implementations import blocked
from jax_attn.random import TorchRngs

from ...sides.dropout_masks import MaskPlan, Masks, asking
from ...sides.patching import original, replaced
from ...sides.subject import ModuleFailedError


def drawing(source: Masks | MaskPlan | None, module: nnx.Module) -> contextlib.AbstractContextManager[None]:
    """Have everything in an NNX module that drops draw its masks from `source`; None drops nothing.

    Args:
        source: of the masks.
        module: the module that runs; its submodules are named as those that draw.

    Raises:
        ModuleFailedError: inside, something drops in a way that masks can't be given to.
    """
    children = list(nnx.iter_modules(module))
    owners = {id(child): (".".join(map(str, path)), setting_of(child)) for path, child in children}
    return drawn_from(source, owners, {kind.__module__ for _, child in children for kind in type(child).__mro__})


@contextlib.contextmanager
def drawn_from(
    source: Masks | MaskPlan | None, owners: Mapping[int, tuple[str, str]], spaces: Collection[str]
) -> Iterator[None]:
    """Make all dropout take its masks from `source`; None makes every draw an error. Other threads are unaffected.

    Args:
        source: of the masks.
        owners: id of a submodule -> its path and setting, to name the submodule that draws.
        spaces: Python modules that may bind `jax.random.bernoulli` to another name.

    Raises:
        ModuleFailedError: dropout inside the context cannot take given masks.
    """

    def _keep(key: object, p: ArrayLike, shape: Sequence[int] | int | None) -> Array:
        if source is None:
            raise ModuleFailedError("dropout=False, but the Flax module draws a dropout mask by itself")
        if type(key).__name__ == "BatchTracer":
            raise ModuleFailedError("a dropout mask per element of jax.vmap is not driven by given masks")
        try:
            probability = float(p)
        except (TypeError, jax.errors.JAXTypeError):
            raise ModuleFailedError(
                "jax.random.bernoulli with a probability that is an array is not driven by given masks"
            ) from None
        sizes = jnp.shape(p) if shape is None else (shape,) if isinstance(shape, int) else tuple(map(int, shape))
        return jnp.asarray(source.draw(sizes, probability, *(asking(owners) or ("", ""))))

    def _bernoulli(
        key: object, p: ArrayLike = 0.5, shape: Sequence[int] | int | None = None, *args: object, **kwargs: object
    ) -> Array:
        return _keep(key, p, shape)

    def _of_a_stream(
        stream: object, p: ArrayLike = 0.5, shape: Sequence[int] | int | None = None, *args: object, **kwargs: object
    ) -> Array:
        return _keep(None, p, shape)

    own = original(jax.random, "bernoulli")
    patches: list[tuple[object, str, Callable[..., object]]] = [
        (jax.random, "bernoulli", _bernoulli),
        (nnx.RngStream, "bernoulli", _of_a_stream),
        (nnx.Rngs, "bernoulli", _of_a_stream),
        (TorchRngs, "bernoulli", _of_a_stream),
        (blocked, "_is_threefry", lambda rng: False),  # its kernel draws inside
    ]
    for space in filter(None, map(sys.modules.get, sorted(spaces))):  # ``from jax.random import bernoulli``
        names = [name for name in list(vars(space)) if original(space, name) is own]
        patches += [(space, name, _bernoulli) for name in names if space is not jax.random]
    with contextlib.ExitStack() as stack:
        for home, name, replacement in patches:
            stack.enter_context(replaced(home, name, _always(replacement)))
        yield


def _always(replacement: Callable[..., object]) -> Callable[[object], Callable[..., object]]:
    """Return a function that replaces any function by `replacement`."""
    return lambda _: replacement


def _prepare(module: nnx.Module) -> None:
    """Put a module into train mode; one that drops and was given no stream gets one, as it draws nothing itself."""
    module.train()
    for _, child in nnx.iter_modules(module):
        rate = getattr(child, "rate" if isinstance(child, nnx.Dropout) else "dropout_rate", 0.0)
        if isinstance(child, (nnx.Dropout, nnx.MultiHeadAttention)) and rate and getattr(child, "rngs", 0) is None:
            child.rngs = nnx.data(nnx.Rngs(dropout=0).dropout)


def _draws_more(closed: core.ClosedJaxpr) -> bool:
    """Whether a traced program draws random numbers other than the given masks."""
    return "random_bits[" in str(closed.jaxpr)


def setting_of(child: object) -> str:
    """Describe how a submodule shares its masks; "" is not at all."""
    if isinstance(child, (nnx.Dropout, linen.Dropout)) and child.broadcast_dims:
        return f"broadcast_dims={tuple(child.broadcast_dims)}"
    if isinstance(child, (nnx.MultiHeadAttention, linen.MultiHeadDotProductAttention)) and child.broadcast_dropout:
        return "broadcast_dropout=True"
    return ""
