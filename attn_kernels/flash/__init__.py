"""FlashAttention by blocks of queries, forward and backward, and its parts."""
