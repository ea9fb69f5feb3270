"""Two more questions to any torch module: what FlashAttention's formula loses, in any precision and in float64.

`LogSumExp` computes every softmax and every fused attention as ``exp(score - logsumexp(score))``, forward and backward;
`Flash` computes fused attention alone, and rounds where the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from ....sides.tables import STILL
from .rounding import Uncompiled, is_inexact, uniform

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket

aten = torch.ops.aten

Named = dict[str, Any]
"""Argument name -> tensor, number or None: the arguments of an operation of ATen, and its defaults."""

TWICE = 2.0
"""Units in the last place by which the two computations of a score differ: a unit each, as measured with MKL."""


class LogSumExp(Uncompiled):
    """While it is entered, softmax and fused attention recompute their weights as ``exp(score - logsumexp(score))``.

    The logarithm of the sum is rounded to the precision that scores are computed in: float32 for 16-bit inputs. Scores
    are computed twice, once for their sum and once for the weights, and nothing makes the two round alike: the second
    ones are moved by up to `TWICE` units in the last place. The backward pass subtracts the row's dot product of output
    and gradient as the fused kernels have it: of an output that is normalised by its sum.

    Args:
        given: weights and inputs: a softmax in a lower precision than all of them is left alone, as kernels compute in
            no lower one.
    """

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.moved = 0
        units = [torch.finfo(one.dtype).eps for one in tensors if one.is_floating_point()]
        self._coarsest = max(units, default=1.0)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        with torch._C.DisableTorchFunction():
            return self._replaced(func, args, kwargs or {})

    def _is_fine(self, dtype: torch.dtype) -> bool:
        return torch.finfo(dtype).eps <= self._coarsest

    def _replaced(self, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        packet = func.overloadpacket
        named = _named(func, args, kwargs)
        if packet in (aten._softmax, aten._safe_softmax) and is_inexact(args[0]) and self._is_fine(_result_of(named)):
            self.moved += 1
            return self._softmax(named, safe=packet is aten._safe_softmax)
        if packet is aten._softmax_backward_data and self._is_fine(named["output"].dtype):
            self.moved += 1
            return _backward_of_softmax(named["grad_output"], named["output"], named["dim"], named["input_dtype"])
        stage = _stage_of(packet, named)
        if stage and not self._is_fine(named["query"].dtype):
            return func(*args, **kwargs)
        if stage == "backward":
            self.moved += 1
            weights, factor = self._weights(named)
            return _backward_of_attention(func, named, weights, factor, lambda gradient: _inner(gradient, weights, -1))
        if stage == "forward":
            self.moved += 1
            whole = func(*args, **kwargs)
            weights = self._weights(named)[0]
            output = weights @ _repeated(named["value"].to(weights.dtype), named["query"])
            return _first_replaced(whole, output.to(named["query"].dtype))
        return func(*args, **kwargs)

    def _softmax(self, named: Named, safe: bool) -> Tensor:
        scores, dim, wanted = named["self"], named["dim"], _result_of(named)
        return _formula(scores.to(_wide(wanted)), dim, safe).to(wanted)

    @staticmethod
    def _weights(named: Named) -> tuple[Tensor, float]:
        """Return the weights of a fused attention by the formula, and the factor of its scores."""
        scores, factor = _scores(named)
        return _formula(scores, -1, safe=True), factor


class Flash(Uncompiled):
    """Mode that computes fused attention by plain operations which round where FlashAttention does.

    The backward pass of the kernels computes two quantities twice, with independent roundings: the scores (for their
    log-sum-exp and for the weights), and the term that a row's gradients share (in each gradient, and as the dot
    product of the output and its gradient, which should cancel it). No kernel runs: rounding of a kernel beyond this
    formula is not measured.

    Args:
        seed: of the roundings; `STILL` computes attention by softmax itself, where both cancel.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.moved = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        with torch._C.DisableTorchFunction():
            named = _named(func, args, kwargs or {})
            stage = _stage_of(func.overloadpacket, named)
            if stage:
                self.moved += 1
            if stage == "backward":
                return self._backward(func, named)
            whole = func(*args, **(kwargs or {}))
            return _first_replaced(whole, self._output(named)) if stage == "forward" else whole

    def _output(self, named: Named) -> Tensor:
        weights = aten._safe_softmax(_scores(named)[0], -1)
        value = _repeated(named["value"].to(weights.dtype), named["query"])
        return self._rounded(weights @ value, weights @ value.abs()).to(named["query"].dtype)

    def _backward(self, func: OpOverload, named: Named) -> tuple[Tensor | None, ...]:
        scores, factor = _scores(named)
        if self.seed == STILL:
            weights = aten._safe_softmax(scores, -1)
            return _backward_of_attention(
                func, named, weights, factor, lambda gradient: (weights * gradient).sum(-1, True)
            )
        # The kernels take sum(P dP) as the dot product of the output and its gradient (FlashAttention-2, algorithm 2);
        # its rounding errors do not cancel those of P dP.
        products = _gradient(named).to(scores.dtype) * named["out"].to(scores.dtype)
        slope = self._rounded(products.sum(-1, keepdim=True), products.abs().sum(-1, keepdim=True))
        return _backward_of_attention(
            func, named, _formula(scores, -1, True, self.seed), factor, lambda gradient: slope
        )

    def _rounded(self, sums: Tensor, sizes: Tensor) -> Tensor:
        """Return sums of products with other roundings; `sizes` are those of the products' absolute values."""
        if self.seed == STILL:
            return sums
        return sums + torch.finfo(sums.dtype).eps * _random(sums, self.seed) * sizes


# ---- what both do


def _result_of(named: Named) -> torch.dtype:
    """Return the dtype of a softmax."""
    wanted = named.get("dtype") or (torch.float32 if named.get("half_to_float") else named["self"].dtype)
    return cast(torch.dtype, wanted)


def _stage_of(packet: OpOverloadPacket, named: Named) -> Literal["", "forward", "backward"]:
    """Return which pass of a fused attention an operation computes; "" for others, and for attention with dropout."""
    name = packet.__name__
    if not name.startswith("_scaled_dot_product") or named.get("dropout_p"):
        return ""
    if name.endswith("_backward"):
        return "backward"
    return "forward" if name.endswith(("attention", "for_cpu")) else ""


def _formula(scores: Tensor, dim: int, safe: bool, seed: int = 0) -> Tensor:
    total = torch.logsumexp(scores, dim, keepdim=True)
    weights = torch.exp(_recomputed(scores, seed) - total)
    # A row without keys: -inf - -inf is NaN, and the kernels return zeros.
    return torch.where(total == -torch.inf, torch.zeros_like(weights), weights) if safe else weights


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _recomputed(scores: Tensor, seed: int) -> Tensor:
    """Return scores with other roundings; those of the kernels' second computation are not those of the first."""
    wide = scores.double()
    moved = wide * (1.0 + TWICE * torch.finfo(scores.dtype).eps * _random(scores, seed))
    return torch.where(wide.isinf(), wide, moved).to(scores.dtype)


def _random(values: Tensor, seed: int) -> Tensor:
    """Return a number in [-1, 1) for each of some numbers that follows from it and the seed."""
    return torch.from_numpy(uniform(values.detach().cpu().double().numpy(), seed)).to(values.device)


def _backward_of_softmax(gradient: Tensor, weights: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    wide, scale = _wide(weights.dtype), weights.to(_wide(weights.dtype))
    return (scale * (gradient.to(wide) - _inner(gradient.to(wide), scale, dim))).to(dtype)


def _inner(gradient: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Return the common term of a row's gradients, for weights that need not sum to one."""
    # exp(score - logsumexp) does not sum to 1 exactly, and the kernels normalise the output: sum(P dP) of the
    # normalised weights is this quotient.
    return (gradient * weights).sum(dim, keepdim=True) / _not_zero(weights.sum(dim, keepdim=True))


def _not_zero(sums: Tensor) -> Tensor:
    return torch.where(sums == 0.0, torch.ones_like(sums), sums)


def _named(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Named:
    places = func._schema.arguments
    defaults = {one.name: one.default_value for one in places if one.has_default_value()}
    return {**defaults, **{one.name: value for one, value in zip(places, args, strict=False)}, **kwargs}


def _scores(named: Named) -> tuple[Tensor, float]:
    """Return the scores of a fused attention, minus infinity where a key is hidden, and their factor."""
    query, key = named["query"], named["key"]
    scale = named.get("scale")
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    wide = _wide(query.dtype)
    scores = (query.to(wide) @ _repeated(key.to(wide), query).transpose(-2, -1)) * factor
    added = named.get("attn_mask", named.get("attn_bias"))
    if added is not None:
        scores = torch.where(added, scores, -torch.inf) if added.dtype == torch.bool else scores + added.to(wide)
    if named.get("is_causal"):
        # Upper left: query i sees keys up to i, also where there are more keys than queries, as torch documents
        # is_causal.
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(visible, scores, -torch.inf)
    return scores, factor


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """Add up the gradients of heads that share a key, and give them their tensor's type."""
    if gradient.shape[1] != like.shape[1]:
        gradient = gradient.unflatten(1, (like.shape[1], -1)).sum(2)
    return gradient.to(like.dtype)


def _gradient(named: Named) -> Tensor:
    """Return the gradient that reaches a fused attention."""
    gradient: Tensor = next(named[name] for name in ("grad_out", "grad_out_", "grad_output") if name in named)
    return gradient


def _backward_of_attention(
    func: OpOverload, named: Named, weights: Tensor, factor: float, inner: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a fused attention.

    Args:
        func: the operation to replace.
        named: its arguments by name.
        weights: the attention weights after softmax.
        factor: scale of the scores.
        inner: gradients of the weights -> the common term of each row.
    """
    query, key, value = named["query"], named["key"], named["value"]
    wide = weights.dtype
    gradient = _gradient(named).to(wide)
    of_weights = gradient @ _repeated(value.to(wide), query).transpose(-2, -1)
    of_scores = weights * (of_weights - inner(of_weights))
    gradients = [
        # dS = P (dP - sum(P dP)); dQ = dS K, dK = dS^T Q, both times the scale; dV = P^T dO.
        (of_scores @ _repeated(key.to(wide), query) * factor).to(query.dtype),
        _summed(of_scores.transpose(-2, -1) @ query.to(wide) * factor, key),
        _summed(weights.transpose(-2, -1) @ gradient, value),
    ]
    bias = named.get("attn_bias")
    for _ in func._schema.returns[3:]:
        gradients.append(None if bias is None else of_scores.sum_to_size(bias.shape).to(bias.dtype))
    return tuple(gradients)


def _first_replaced(whole: Tensor | tuple[Tensor, ...], output: Tensor) -> Tensor | tuple[Tensor, ...]:
    kept = whole[0].copy_(output) if isinstance(whole, tuple) else whole.copy_(output)
    return (kept, *whole[1:]) if isinstance(whole, tuple) else kept
