"""Laws of tokens in an order: causality, caches, documents that share a row, and padding."""
