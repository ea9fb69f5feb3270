"""Attention of few queries to many keys, read once and as they are: the keys are cut into parts, which threads share."""
