"""Operations of JAX that this processor computes another way: plain code everywhere else, and what derives from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def replaced(name: str, plain: Callable[..., object], lower: Callable[..., object]) -> Primitive:
    """Return an operation with one result that computes the same as plain code.

    Args:
        name: of the operation.
        plain: the computation of exported programs, other devices, derivatives and `vmap`.
        lower: takes the context and the operands of a lowering for processors; None where plain code is as good.
    """
    operation = Primitive(name)
    lower_plain = mlir.lower_fun(plain, multiple_results=False)

    def lower_here(context: mlir.LoweringRuleContext, *operands: Array) -> object:
        lowered = None if context.module_context.lowering_parameters.for_export else lower(context, *operands)
        return lower_plain(context, *operands) if lowered is None else lowered

    def evaluate(*shapes: jax.core.ShapedArray) -> jax.core.ShapedArray:
        shapes_of_results = jax.eval_shape(plain, *(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in shapes))
        return shapes[0].update(shape=shapes_of_results.shape, dtype=shapes_of_results.dtype)

    def differentiate(operands: Sequence[Array], tangents: Sequence[Array | ad.Zero]) -> tuple[Array, Array]:
        places = [place for place, one in enumerate(tangents) if type(one) is not ad.Zero]

        def of_some(*some: Array) -> object:
            moved = dict(zip(places, some, strict=True))
            return plain(*(moved.get(place, one) for place, one in enumerate(operands)))

        some = ([one[place] for place in places] for one in (operands, tangents))
        return operation.bind(*operands), jax.jvp(of_some, *some)[1]

    operation.def_abstract_eval(evaluate)
    operation.def_impl(jax.jit(operation.bind))
    mlir.register_lowering(operation, lower_here, platform="cpu")
    mlir.register_lowering(operation, lower_plain)
    ad.primitive_jvps[operation] = differentiate
    batching.primitive_batchers[operation] = lambda arrays, axes: (jax.vmap(plain, axes)(*arrays), 0)
    return operation
