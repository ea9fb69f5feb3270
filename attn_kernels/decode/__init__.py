"""Attention of few queries to many keys, read once in their stored form, in parts that threads share."""
