"""Who attends to whom, described once for both backends.

A mask answers ``mask.allowed(query_positions, key_positions)`` with bool arrays, ``True`` = may attend. It uses only
comparisons and logic, so it works on the index arrays of NumPy, torch and JAX alike. Masks combine with ``&`` and
``|``, also with a bool array of shape ``(B, S)`` or broadcastable to ``(B, H, T, S)``, or with integers 0 and 1 of
shape ``(B, S)``; ``mask.offset(n)`` is the same mask seen by queries that start at position ``n``. Positions are
indices in the sequence, padding included; attention counts chunks, blocks and a prefix from the first token that an
array ``(B, S)`` shows, so that padding on the left changes no sequence.

Without an offset, query ``i`` is position ``i`` whatever the number of keys: ``causal()`` shows it keys ``0..i``.
"""

from .blocks import block_causal, block_diffusion
from .description import ArrayMask, Mask, as_mask
from .for_kernels import Band, Pieces, as_band, as_pieces, goes_forward
from .left_padding import counting_tokens, left_padding
from .positions import causal, chunked, full, prefix, sliding_window
from .sequences import documents, padding
from .trees import tree, tree_positions

__all__ = [
    "ArrayMask",
    "Band",
    "Mask",
    "Pieces",
    "as_band",
    "as_mask",
    "as_pieces",
    "block_causal",
    "block_diffusion",
    "causal",
    "chunked",
    "counting_tokens",
    "documents",
    "full",
    "goes_forward",
    "left_padding",
    "padding",
    "prefix",
    "sliding_window",
    "tree",
    "tree_positions",
]
