"""torch's random numbers in Flax: what torch's CPU generator draws after ``torch.manual_seed``, without torch.

`attn_bridge.rng.TorchGenerator` makes the numbers, in NumPy. The counterpart for torch is `torch_attn.random`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import io_callback
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attn_bridge import rng, validation

__all__ = ["Rngs", "TorchRngs"]


class TorchRngs:
    """Replaces `nnx.Rngs` in the modules of `jax_attn` and gives them torch's numbers.

    A module built with ``rngs=TorchRngs(seed)`` has the weights of its torch twin built after
    ``torch.manual_seed(seed)``, and its dropout continues with the same generator, as torch's does. All streams, forks
    and modules share this one generator, and so do `nnx.clone` and `nnx.merge`.

    Draws happen on the host, one after the other. Inside ``jax.jit`` masks are drawn each time that the compiled
    function runs, in order, by a callback, which is refused under ``jax.checkpoint`` and on several devices; under
    ``jax.vmap`` all examples share one mask, and ``jax.lax.scan`` draws a mask in each step if its `like` differs
    between steps. Weights are not drawn there, and no seed is set.

    Args:
        seed: an integer from -2**63 to 2**64 - 1, as `torch.manual_seed` takes it.

    Raises:
        TypeError: a seed that is not an integer.
        ValueError: a seed out of range.
        RuntimeError: inside ``jax.jit`` or another trace.
    """

    def __init__(self, seed: int):
        _on_the_host("seeded")
        self._generator = rng.TorchGenerator(seed)

    def manual_seed(self, seed: int) -> TorchRngs:
        """Start again from a seed, as ``torch.manual_seed(seed)`` does; for all that share the generator."""
        _on_the_host("seeded")
        self._generator.manual_seed(seed)
        return self

    def __getitem__(self, name: str) -> TorchRngs:
        return self

    def __call__(self) -> TorchRngs:
        """Return the generator itself as the key to draw with, as torch has no keys."""
        return self

    @property
    def default(self) -> TorchRngs:
        """The generator, under the name of a stream."""
        return self

    @property
    def params(self) -> TorchRngs:
        """The generator, under the name of a stream."""
        return self

    @property
    def dropout(self) -> TorchRngs:
        """The generator, under the name of a stream."""
        return self

    def fork(self) -> TorchRngs:
        """Return the generator itself: torch's layers share one."""
        return self

    def uniform(
        self, shape: int | Sequence[int] = (), minval: float = 0.0, maxval: float = 1.0, dtype: DTypeLike = jnp.float32
    ) -> Float[Array, "..."]:
        """Draw as ``torch.empty(shape).uniform_(minval, maxval)`` does, and as ``torch.rand(shape)`` by default.

        Raises:
            RuntimeError: inside ``jax.jit`` or another trace.
        """
        _on_the_host("asked for weights")
        return jnp.asarray(self._generator.uniform(shape, np.dtype(dtype), minval, maxval), dtype)

    def normal(self, shape: int | Sequence[int] = (), dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
        """Draw as ``torch.randn(shape)`` does; see `attn_bridge.rng.TorchGenerator.normal` for where to the last bit.

        Raises:
            NotImplementedError: another type than float32.
            RuntimeError: inside ``jax.jit`` or another trace.
        """
        _on_the_host("asked for weights")
        return jnp.asarray(self._generator.normal(shape, np.dtype(dtype)))

    def bernoulli(
        self, p: float = 0.5, shape: int | Sequence[int] = (), *, like: Array | None = None
    ) -> Bool[Array, "..."]:
        """Draw as ``torch.empty(shape).bernoulli_(p)`` does; a dropout at rate r draws with ``p = 1 - r``.

        Args:
            p: probability of True.
            shape: of the result.
            like: the array to be masked. Inside ``jax.lax.scan``, JAX hoists operations that depend on nothing that
                changes there, and so would draw once for all steps.

        Raises:
            NotImplementedError: under `jax.checkpoint` or `nnx.remat`.
        """
        if not is_tracing():
            jax.effects_barrier()
            return jnp.asarray(self._generator.bernoulli(shape, p))
        if _is_recomputed():
            raise NotImplementedError(
                "TorchRngs draws no masks under jax.checkpoint or nnx.remat, which would draw others when it "
                "recomputes; use nnx.Rngs for dropout, or module.eval()"
            )
        result = jax.ShapeDtypeStruct(rng.as_shape(shape), jnp.bool_)

        @jax.custom_batching.custom_vmap
        def draw(step: Array) -> Array:
            return io_callback(lambda _: self._generator.bernoulli(shape, p), result, step, ordered=True)

        @draw.def_vmap
        def draw_for_all(axis_size: int, in_batched: list[bool], step: Array) -> tuple[Array, bool]:
            del axis_size, in_batched
            return draw(step[0]), False

        step = jnp.zeros(()) if like is None else jax.lax.stop_gradient(like).ravel()[:1].sum()
        return draw(step)


Rngs: TypeAlias = nnx.Rngs | TorchRngs
"""The sources of random numbers that the modules of `jax_attn` take as ``rngs``."""

RandomSource: TypeAlias = Array | np.ndarray | nnx.RngStream | nnx.Rngs | TorchRngs | None
"""A source of random numbers for `generate`; None suffices where nothing is drawn."""


def check_rngs(rngs: object) -> None:
    """Check the ``rngs`` argument of a module: an `nnx.Rngs`, a stream of one, or a `TorchRngs`.

    Raises:
        TypeError: it is something else, such as a key or a seed.
    """
    kinds = (nnx.Rngs, nnx.RngStream, TorchRngs)
    validation.check_source("rngs", rngs, kinds, "an nnx.Rngs or a jax_attn.random.TorchRngs")


def is_tracing() -> bool:
    """Whether operations are recorded, to run later and maybe often; taking gradients is not that."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _is_recomputed() -> bool:
    """Return whether `jax.checkpoint` records operations, as far as traces show; it refuses the others itself."""
    trace = getattr(jnp.zeros(()), "_trace", None)
    while trace is not None:
        recorded = getattr(getattr(getattr(trace, "frame", None), "debug_info", None), "traced_for", None)
        if recorded == "checkpoint / remat":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def _on_the_host(what: str) -> None:
    """Refuse a trace, and wait for masks that compiled functions still draw."""
    if is_tracing():
        raise RuntimeError(f"TorchRngs must be {what} outside jax.jit, jax.eval_shape and other traces")
    jax.effects_barrier()
