"""Arrays that a kernel with gradients alone computes from: forward-mode derivatives fail in one line.

JAX distinguishes the directions only when it computes: in both it takes tangents first, and for gradients transposes
them. The mark below is an operation on tangents alone. Transposed, it has no effect; computed, it raises, in front of
JAX's own error about `custom_vjp`, which names no remedy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..call import KernelCall

REASON = "has no forward-mode derivatives (jax.jvp, jax.jacfwd, jax.hessian)"
ADVICE = f"{REASON}: name 'blocked' or 'reference', by implementation= or functional.use_implementation"


def with_gradients_alone(name: str, call: KernelCall) -> KernelCall:
    """Return a call whose arrays refuse derivatives that go forward, for the kernel of that name."""
    line = f"implementation {name!r} {ADVICE}"
    mark = functools.partial(backward_only, line)
    sinks = None if call.sinks is None else mark(call.sinks)
    return dataclasses.replace(call, query=mark(call.query), key=mark(call.key), value=mark(call.value), sinks=sinks)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def backward_only(line: str, array: Array) -> Array:
    """Return an array whose tangents raise NotImplementedError with `line` if they are computed."""
    return array


@backward_only.defjvp
def _mark(line: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # Marked again for derivatives of derivatives.
    return backward_only(line, primals[0]), _TANGENT.bind(tangents[0], line=line)


def _operation() -> Primitive:
    operation = Primitive("attn_bridge_backward_only")

    def refuse(*_: object, line: str) -> NoReturn:
        raise NotImplementedError(line)

    def batch(arrays: Sequence[Array], axes: Sequence[int | None], *, line: str) -> Any:
        return operation.bind(*arrays, line=line), axes[0]

    operation.def_impl(refuse)
    operation.def_abstract_eval(lambda tangent, line: tangent)
    mlir.register_lowering(operation, refuse)
    ad.deflinear2(operation, lambda cotangent, _, line: [cotangent])
    batching.primitive_batchers[operation] = batch
    return operation


_TANGENT = _operation()
