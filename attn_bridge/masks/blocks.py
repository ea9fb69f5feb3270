"""Masks of block diffusion: tokens of a block see each other in both directions, and blocks follow each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .description import Bools, Integers, Interval, Mask, Positions
from .positions import positive


@dataclass(frozen=True)
class BlockCausal(Mask):
    """Keys of the query's own block and of those before it."""

    size: int

    @property
    def counts_tokens(self) -> bool:
        return True

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return key_positions // self.size <= query_positions // self.size

    def visibility(self, queries: range, keys: range) -> bool | None:
        if keys[-1] // self.size <= queries[0] // self.size:
            return True
        return False if keys[0] // self.size > queries[-1] // self.size else None

    def interval(self, queries: np.ndarray) -> Interval | None:
        return queries * 0, queries - queries % self.size + self.size  # as in `Chunked`, without `//` and `*`


@dataclass(frozen=True)
class BlockDiffusion(Mask):
    """Noised tokens in front of the same `tokens` clean ones, both in blocks of `size`."""

    size: int
    tokens: int

    @property
    def counts_tokens(self) -> bool:
        return True

    def allowed(self, query_positions: Positions, key_positions: Positions) -> Bools:
        return self.allowed_behind(0, query_positions, key_positions)

    def allowed_behind(self, padding: Integers, query_positions: Positions, key_positions: Positions) -> Bools:
        query_is_clean, key_is_clean = query_positions >= self.tokens, key_positions >= self.tokens
        # Both halves are the same tokens, padding included.
        query_block = (query_positions % self.tokens - padding) // self.size
        key_block = (key_positions % self.tokens - padding) // self.size
        own = (query_block == key_block) & (query_is_clean == key_is_clean)
        return own | (key_is_clean & (key_block < query_block))

    def visibility(self, queries: range, keys: range) -> bool | None:
        answers = {
            self._of_halves(*of_queries, *of_keys)
            for of_queries in self._halves(queries)
            for of_keys in self._halves(keys)
        }
        return answers.pop() if len(answers) == 1 else None

    def _halves(self, positions: range) -> list[tuple[bool, int, int]]:
        """Return for each half with some of the positions whether it is clean, and its first and last block there."""
        first, last, tokens = positions[0], positions[-1], self.tokens
        halves = []
        if first < tokens:
            halves.append((False, first // self.size, min(last, tokens - 1) // self.size))
        if last >= tokens:
            halves.append((True, max(first - tokens, 0) // self.size, (last - tokens) // self.size))
        return halves

    @staticmethod
    def _of_halves(
        queries_are_clean: bool, first_query: int, last_query: int, keys_are_clean: bool, first_key: int, last_key: int
    ) -> bool | None:
        """Return whether blocks of queries see blocks of keys, each from a single half."""
        if queries_are_clean and not keys_are_clean:
            return False
        if not keys_are_clean:  # noised tokens see their own block alone
            if first_query == last_query == first_key == last_key:
                return True
            return False if last_key < first_query or first_key > last_query else None
        own = int(queries_are_clean)  # clean tokens see the clean block that is theirs, noised ones don't
        if last_key < first_query + own:
            return True
        return False if first_key >= last_query + own else None


def block_causal(size: int) -> Mask:
    """Query ``i`` sees all keys up to the end of its block of `size`: ``key // size <= i // size``.

    Decoders that denoise a block at a time (block diffusion) run with it, behind a cache of the blocks before.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is below 1.

    Example:
        >>> at = np.arange(4)
        >>> block_causal(2).allowed(at[:, None], at).astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 1],
               [1, 1, 1, 1]])
    """
    return BlockCausal(positive("size", size))


def block_diffusion(size: int, tokens: int) -> Mask:
    """Mask of the training step of block diffusion: `tokens` noised tokens, and behind them the same tokens clean.

    A noised token sees its own noised block and the clean blocks before it; a clean token sees the clean blocks up to
    its own (BD3-LM, arXiv 2503.09573, section 3.2). A single pass over ``2 * tokens`` gives the losses of all blocks.

    Args:
        size: tokens of a block; the last block of each half may be shorter.
        tokens: tokens of each half.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is below 1.

    Example:
        >>> at = np.arange(8)
        >>> block_diffusion(2, 4).allowed(at[:, None], at).astype(int)
        array([[1, 1, 0, 0, 0, 0, 0, 0],
               [1, 1, 0, 0, 0, 0, 0, 0],
               [0, 0, 1, 1, 1, 1, 0, 0],
               [0, 0, 1, 1, 1, 1, 0, 0],
               [0, 0, 0, 0, 1, 1, 0, 0],
               [0, 0, 0, 0, 1, 1, 0, 0],
               [0, 0, 0, 0, 1, 1, 1, 1],
               [0, 0, 0, 0, 1, 1, 1, 1]])
    """
    return BlockDiffusion(positive("size", size), positive("tokens", tokens))
