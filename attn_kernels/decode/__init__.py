"""Attention of few queries to many keys, read once and as they are, in parts that threads share."""
