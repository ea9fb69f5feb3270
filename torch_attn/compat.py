"""The layer of torch that attention is replaced in: its arguments, names and call, on the attention of this package.

Letters: N batch, L query positions, S key positions, E width of the queries, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attn_bridge import validation
from attn_bridge.masks import Mask, as_mask, causal, full

from . import functional


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose attention is `functional.dot_product_attention`.

    Arguments, initial weights and names in the state dict are those of the stock layer, so either loads the other's
    weights, and `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` take it as an attribute. Three results
    differ: a query whose keys are all masked gets zeros where the stock layer gives NaN; masks of dropout are other
    draws when no weights are asked for; and every query sees appended keys, which the stock layer hides from nearly
    all with `is_causal` and without weights. `torch.jit.script` is refused.

    In eval mode without gradients, `nn.TransformerEncoderLayer` computes the whole layer by a fused kernel of torch
    from the weights alone; ``torch.backends.mha.set_fastpath_enabled(False)`` has it call this layer.

    Args:
        embed_dim: E, the width of the queries and of the output.
        num_heads: H, which divides `embed_dim`.
        dropout: rate at which attention weights are dropped in training.
        bias: add biases in all projections.
        add_bias_kv: append a trained key and value.
        add_zero_attn: append a key and value of zeros.
        kdim: width of the keys; `embed_dim` by default.
        vdim: width of the values; `embed_dim` by default.
        batch_first: the batch is the first axis of inputs and output, not the second.
        device: of the parameters.
        dtype: of the parameters.
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest. Only
            the reference returns weights, so others need ``need_weights=False``.
    """

    implementation: str | None = None  # of the class: stock layers that become this class lack it

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        implementation: str | None = None,
    ):
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.implementation = functional.check_implementation(implementation)

    def reset_parameters(self) -> None:
        """Draw all parameters again, as the constructor does, such as after `to_empty`."""
        self.out_proj.reset_parameters()
        self._reset_parameters()

    def forward(
        self,
        query: Float[Tensor, "..."],
        key: Float[Tensor, "..."],
        value: Float[Tensor, "..."],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the queries to the keys; in masks, ``True`` hides a key, as in torch.

        Args:
            query: ``(L, N, E)``, ``(N, L, E)`` with `batch_first`, or ``(L, E)``; with `batch_first` and without masks,
                also a nested tensor, as `nn.TransformerEncoder` gives them.
            key: ``(S, N, kdim)``, ``(N, S, kdim)`` or ``(S, kdim)``, or nested.
            value: ``(S, N, vdim)``, ``(N, S, vdim)`` or ``(S, vdim)``, or nested.
            key_padding_mask: ``(N, S)``, or ``(S,)`` without a batch: bool, or added to the scores.
            need_weights: also return the attention weights, which takes memory that grows with L times S.
            attn_mask: ``(L, S)`` or ``(N * H, L, S)``: bool, or added to the scores.
            average_attn_weights: return the mean of the heads' weights ``(N, L, S)``, not ``(N, H, L, S)``.
            is_causal: `attn_mask` is the causal mask; without one, the causal mask is applied.

        Returns:
            The output in the shape of `query`, and the weights or None.

        Raises:
            NotImplementedError: the `implementation` does not support the call; gives the reason.
            TypeError: a mask that is not a tensor, or neither bool nor floating point.
            ValueError: shapes that do not fit, or masks of nested tensors.
        """
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        options = {"need_weights": need_weights, "average_attn_weights": average_attn_weights, "is_causal": is_causal}
        if isinstance(query, torch.fx.Proxy):
            return _traced(self, (query, key, value), {**masks, **options})
        if query.is_nested or key.is_nested or value.is_nested:
            if not self.batch_first or attn_mask is not None or key_padding_mask is not None:
                raise ValueError("nested tensors need batch_first=True, and neither attn_mask nor key_padding_mask")
            return _padded(self, query, key, value, **options)
        self._check_inputs(query, key, value)
        is_batch = query.ndim == 3
        is_of_itself = query is key and key is value
        query = self._as_batch(query)
        key, value = (query, query) if is_of_itself else (self._as_batch(key), self._as_batch(value))
        if key_padding_mask is not None and not is_batch:
            _check_shape("key_padding_mask", key_padding_mask, [(key.shape[1],)])
            key_padding_mask = key_padding_mask[None]
        if is_causal and key_padding_mask is None and not need_weights and self._appended == 0:
            attn_mask = None  # where the stock layer leaves it to the kernel
        q, k, v = self._project(query, key, value)
        mask, bias = self._masks(q, k, key_padding_mask, attn_mask, is_causal)
        context, weights = self._attend(q, k, v, mask, bias, need_weights)
        is_first = self.batch_first or not is_batch
        output = self.out_proj(rearrange(context, "n l h c -> n l (h c)" if is_first else "n l h c -> l n (h c)"))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batch:
            return output[0], None if weights is None else weights[0]
        return output, weights

    def __prepare_scriptable__(self) -> None:
        """Refuse `torch.jit.script`, which calls this.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "torch_attn.compat.MultiheadAttention can't be scripted; use torch.export or torch.jit.trace"
        )

    @property
    def _appended(self) -> int:
        """Number of keys that `add_bias_kv` and `add_zero_attn` append."""
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Check the numbers of axes and channels."""
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            ranks = (2, 3) if x is query else (query.ndim,)
            if x.ndim not in ranks or x.shape[-1] != width:
                axes = " or ".join(map(str, ranks))
                raise ValueError(f"{name} must have {axes} axes and {width} channels, got shape {tuple(x.shape)}")

    def _as_batch(self, x: Float[Tensor, "..."]) -> Float[Tensor, "N L E"]:
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return query, key and value of all heads, ``(N, L, H, C)``, with the keys that are appended."""
        joint, bias = self.in_proj_weight, self.in_proj_bias
        if joint is not None and query is key and key is value:
            # One product. The gradients of slices of the weights would have to be joined, which takes as long as it.
            q, k, v = nn.functional.linear(query, joint, bias).chunk(3, -1)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if joint is None else joint.chunk(3)
            biases = [None] * 3 if bias is None else bias.chunk(3)
            q, k, v = map(nn.functional.linear, (query, key, value), matrices, biases)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1)], 1)
        if self.add_zero_attn:
            k, v = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return [x.unflatten(-1, (self.num_heads, self.head_dim)) for x in (q, k, v)]

    def _masks(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Mask | None, Tensor | None]:
        """Return the mask of allowed pairs of query and key, and the bias of the scores."""
        count, queries, keys = q.shape[0], q.shape[1], k.shape[1] - self._appended
        mask, bias = full(), None
        if is_causal and attn_mask is None:
            if self._appended:  # every query sees the keys that are appended
                attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
            else:
                mask = causal()
        for name, array in (("key_padding_mask", padding), ("attn_mask", attn_mask)):
            if array is None:
                continue
            shapes = {"attn_mask": [(queries, keys), (count * self.num_heads, queries, keys)]}
            _check_shape(name, array, shapes.get(name, [(count, keys)]))
            if name == "key_padding_mask":
                array = array[:, None, None]
            else:
                array = array[None, None] if array.ndim == 2 else array.unflatten(0, (count, self.num_heads))
            array = nn.functional.pad(array, (0, self._appended)) if self._appended else array
            allowed, added = _split(name, array)
            mask = mask & as_mask(allowed)
            if added is not None:
                bias = added.to(q.dtype) if bias is None else bias + added.to(q.dtype)
        return mask, bias

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        if k.shape[1] == 0:  # the sums over no keys, which the functions of this package refuse
            weights = torch.einsum("nlhc,nshc->nhls", q, k)
            return torch.einsum("nhls,nshc->nlhc", weights, v), weights if need_weights else None
        rate = _rate(self)
        options = {"mask": mask, "bias": bias, "scale": self.head_dim**-0.5, "implementation": self.implementation}
        if not need_weights or rate == 0.0:
            result = functional.dot_product_attention(q, k, v, dropout=rate, return_weights=need_weights, **options)
            return functional.as_pair(result)
        # The stock layer returns the weights that dropout has left, with torch's own draws.
        _, weights = functional.dot_product_attention(q, k, v, return_weights=True, **options)
        weights = nn.functional.dropout(weights, rate)
        return torch.einsum("nhls,nshc->nlhc", weights, v), weights


def _traced(
    layer: MultiheadAttention, inputs: tuple[Tensor, ...], options: Mapping[str, object]
) -> tuple[Tensor, Tensor | None]:
    """Return the call as one node of `torch.fx`: its tracers keep only the layers of torch itself whole."""
    tracer = inputs[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), inputs, options)


def _padded(
    layer: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, **options: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the output of nested tensors, nested as the query is, and the weights, padded with zeros."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_nested or x.ndim != 3:
            raise ValueError(f"{name} must be a nested tensor of 3 axes, as the others are")
    lengths, key_lengths = ([len(sequence) for sequence in x.unbind()] for x in (query, key))
    if key_lengths != [len(sequence) for sequence in value.unbind()]:
        raise ValueError("key and value must be sequences of the same lengths")
    q, k, v = (x.to_padded_tensor(0.0) for x in (query, key, value))
    hidden, hidden_keys = (
        torch.arange(x.shape[1], device=x.device) >= torch.tensor(sizes, device=x.device)[:, None]
        for x, sizes in ((q, lengths), (k, key_lengths))
    )
    output, weights = layer.forward(q, k, v, key_padding_mask=hidden_keys, **options)  # hooks run once
    if query.layout == torch.jagged:
        nested = torch.nested.nested_tensor_from_jagged(output[~hidden], query.offsets())
    else:
        nested = torch.nested.as_nested_tensor([row[:size] for row, size in zip(output, lengths, strict=True)])
    return nested, weights


def _rate(layer: nn.MultiheadAttention) -> float:
    # No method: the judge reports methods that ask for the mode, as it can't see that only dropout depends on it.
    return float(layer.dropout) if layer.training else 0.0


def _check_shape(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(mask).__name__}")
    if not validation.is_one_of(tuple(mask.shape), shapes):
        raise ValueError(f"{name} must have the shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def _split(name: str, mask: Tensor) -> tuple[Bool[Tensor, "..."], Tensor | None]:
    """Return the keys that a mask of torch allows, and the finite numbers that it adds."""
    if mask.dtype == torch.bool:
        return ~mask, None
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be bool or floating point, got {functional.dtype_name(mask)}")
    hidden = mask == -torch.inf
    return ~hidden, mask.masked_fill(hidden, 0.0)
