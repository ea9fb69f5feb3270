"""Attention as a function with gradients that are written by hand, whichever code computes the one and the others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Float

from ..block_operands import varying_alike
from ..block_plan import BlockPlan
from .slopes import INPUTS, Operands, Slopes, tangents_of


class Passes(NamedTuple):
    """The functions that compute attention and its gradients, each from a plan and ``operands``.

    Those are query, key, value, bias, sinks, the arrays of the mask and the words of the dropout's key.
    """

    forward: Callable[..., tuple[Array, Array, Array]]
    """Returns the context and, per row, the largest score and the sum of ``exp(scores - largest)``."""

    backward: Callable[..., tuple[Array | None, ...]]
    """Takes the operands, those results, and the gradients of context and sums; returns five gradients."""

    at_once: Callable[..., tuple[Array, Array]]
    """Returns context and sums by code that JAX can differentiate, also twice."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def attention(passes: Passes, plan: BlockPlan, *operands: Array) -> tuple[Array, Array]:
    """Return the context and, per row, the logarithm of the sum of ``exp(scores)``; both have gradients."""
    operands = varying_alike(operands)
    context, top, total = _differentiable(passes, plan, *operands)
    # Of the sum alone, so that its gradient is the one of the logarithm; the top is a shift that cancels.
    sums = jnp.where(total != 0.0, lax.stop_gradient(top) + jnp.log(jnp.where(total != 0.0, total, 1.0)), -jnp.inf)
    return context.astype(operands[0].dtype), sums


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(passes: Passes, plan: BlockPlan, *operands: object) -> tuple[Array, Array, Array]:
    return passes.forward(plan, *operands)


@functools.partial(_differentiable.defjvp, symbolic_zeros=True)
def _differentiate(
    passes: Passes, plan: BlockPlan, operands: Operands, tangents: Operands
) -> tuple[Operands, Operands]:
    # A bias is often constant, and its gradient as large as the scores.
    is_asked = tangents[3] is not None and not isinstance(tangents[3], SymbolicZero)
    asking = dataclasses.replace(plan, is_differentiated=True, differentiates_bias=is_asked)
    with jax.default_matmul_precision(plan.precision):
        results = _differentiable(passes, asking, *operands)
    slopes = tangents_of(Slopes(_at_once, _backward, (passes, asking), plan.precision), operands, results, tangents)
    if not is_asked:
        return results, slopes
    # Other code may compute the gradient of a bias; its context is rounded here, after its derivatives have used it.
    dtype = jax.eval_shape(functools.partial(passes.forward, plan), *operands)[0].dtype
    return (results[0].astype(dtype), *results[1:]), (slopes[0].astype(dtype), *slopes[1:])


def _at_once(passes: Passes, plan: BlockPlan, *operands: object) -> tuple[Array | None, ...]:
    context, total = passes.at_once(plan, *operands)
    return context, None, total


def _backward(passes: Passes, plan: BlockPlan, operands: Operands, results: Operands, cotangents: Operands) -> Operands:
    return _gradients(passes, plan, operands, results, (cotangents[0], cotangents[2]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(
    passes: Passes, plan: BlockPlan, operands: Operands, results: Operands, cotangents: Operands
) -> Operands:
    """Return the gradients of query, key, value, bias (if asked for) and sinks; theirs take T times S, being rare."""
    return passes.backward(plan, *operands, *results, *cotangents)


@_gradients.defjvp
def _differentiate_gradients(
    passes: Passes, plan: BlockPlan, primals: tuple[Operands, ...], tangents: tuple[Operands, ...]
) -> tuple[Operands, Operands]:
    operands, _, cotangents = primals
    *inputs, arrays, seed = operands

    def gradients(inputs: Operands, cotangents: Operands) -> Operands:
        cotangents_of_inputs = list(
            jax.vjp(lambda *inputs: passes.at_once(plan, *inputs, arrays, seed), *inputs)[1](cotangents)
        )
        cotangents_of_inputs[3] = cotangents_of_inputs[3] if plan.differentiates_bias else None
        return tuple(cotangents_of_inputs)

    moved = tuple(tangents[0][:INPUTS]), tangents[2]
    with jax.default_matmul_precision(plan.precision):
        return _gradients(passes, plan, *primals), jax.jvp(gradients, (tuple(inputs), cotangents), moved)[1]


def gradient_of_sinks(
    sinks: Float[Array, "H"], top: Float[Array, "B H T"], total: Float[Array, "B H T"], slope: Float[Array, "B H T"]
) -> Float[Array, "H"]:
    """Return the gradient of the sinks from the results of a forward pass and the slopes of its rows.

    The slope of a row is the common factor in the gradients of its weights, over `total`; a hidden row contributes
    nothing.
    """
    weights = jnp.exp(jnp.where(total != 0.0, sinks.astype(top.dtype)[:, None] - top, -jnp.inf))
    return -(weights * slope).sum((0, 2)).astype(sinks.dtype)
