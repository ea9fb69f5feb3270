"""Masks of trees of drafted tokens, as speculative decoding verifies them in a single pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .. import validation
from .description import ArrayMask, Bools, Mask, OfArrays, Positions
from .positions import at_least_zero


@dataclass(frozen=True, eq=False)
class Tree(OfArrays):
    """Keys that each of N nodes sees, ``(B, N, context + N)`` or ``(1, N, context + N)``."""

    seen: Bools

    @property
    def context(self) -> int:
        """Tokens in front of the tree."""
        return int(self.seen.shape[2] - self.seen.shape[1])

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        # A query in front of the tree takes the row of node 0, without the columns of nodes: the whole context.
        nodes = (query_positions - self.context).clip(0)
        is_in_tree = (query_positions >= self.context) | (key_positions < self.context)
        return (self.seen[:, nodes, key_positions] & is_in_tree)[:, None]

    def check_sizes(self, batch: int, tokens: int = 0) -> None:
        validation.check_mask_rows("rows of masks.tree", self.seen.shape[0], batch)
        self._check_end(tokens, "keys")

    def placed(self, queries: int, keys: int) -> Mask:
        return self.placed_at(slice(0, queries), slice(0, keys)) or self

    def placed_at(self, queries: slice, keys: slice) -> Mask | None:
        self._check_end(queries.stop, "queries")
        self._check_end(keys.stop, "keys")
        if queries.start < self.context:
            return None
        nodes = slice(queries.start - self.context, queries.stop - self.context)
        return ArrayMask(self.seen[:, None, nodes, keys])

    def _check_end(self, end: int, what: str) -> None:
        if self.seen.shape[2] < end:
            raise ValueError(
                f"context ({self.context}) and parents ({self.seen.shape[1]}) must reach every token, "
                f"got {what} up to {int(end)}"
            )


def tree(parents: ArrayLike, context: int = 0) -> Mask:
    """Show each node of a tree of drafted tokens the context, its ancestors and itself.

    Speculative decoding verifies all nodes in a single pass: give the mask as `attention_mask` of a call that appends
    the nodes to a cache of `context` tokens, and `tree_positions` as its ``positions``. The result of a node is
    that of the tokens on its path alone.

    Args:
        parents: integers ``(N,)`` or ``(B, N)``, whose values are known: for each node the number of its parent, which
            comes before it; -1 for a node that follows the context.
        context: tokens in front of the tree, those in a cache.

    Raises:
        TypeError: `parents` are not integers with known values, or `context` is not an integer.
        ValueError: `parents` have no node, or neither one axis nor two, or a parent does not come before its node.

    Example:
        >>> at = np.arange(4)
        >>> tree([-1, 0, 0, 1]).allowed(at[:, None], at)[0, 0].astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 1, 0, 1]])
    """
    rows, context = _parents(parents), at_least_zero("context", context)
    batch, nodes = rows.shape
    seen = np.zeros((batch, nodes, context + nodes), bool)
    seen[..., :context] = True
    for node in range(nodes):
        for row in range(batch):
            # A parent comes before its node, so that its row is complete by now.
            if rows[row, node] >= 0:
                seen[row, node] |= seen[row, rows[row, node]]
            seen[row, node, context + node] = True
    return Tree(seen)


def tree_positions(parents: ArrayLike, context: int = 0) -> np.ndarray:
    """Return the position of each node, ``context`` and the number of its ancestors, in the shape of `parents`.

    Raises:
        TypeError: as `tree`.
        ValueError: as `tree`.

    Example:
        >>> tree_positions([-1, 0, 0, 1], context=10)
        array([10, 11, 11, 12])
    """
    rows = _parents(parents)
    positions = np.full(rows.shape, at_least_zero("context", context))
    for row, node in np.ndindex(rows.shape):
        if rows[row, node] >= 0:
            positions[row, node] = positions[row, rows[row, node]] + 1
    return positions.reshape(np.shape(parents))


def _parents(parents: ArrayLike) -> np.ndarray:
    """Return the parents as ``(B, N)``."""
    try:
        rows = np.asarray(parents)
    except ValueError as error:
        raise ValueError("parents must have shape (N,) or (B, N), got rows of several lengths") from error
    except (TypeError, RuntimeError) as error:  # traced, on a device, or with gradients
        raise TypeError(f"parents must have known values in the host's memory, got {type(parents).__name__}") from error
    if not rows.size:
        raise ValueError("parents must have at least one node")
    if rows.dtype.kind not in "iu":
        raise TypeError(f"parents must have an integer dtype, got {rows.dtype}")
    if rows.ndim not in (1, 2):
        raise ValueError(f"parents must have shape (N,) or (B, N), got {rows.shape}")
    rows = rows.reshape(-1, rows.shape[-1]).astype(np.int64)
    wrong = np.argwhere((rows < -1) | (rows >= np.arange(rows.shape[1])))
    if wrong.size:
        row, node = wrong[0]
        raise ValueError(f"parents[..., {node}] ({rows[row, node]}) must be below {node}, or -1 for a root")
    return rows
