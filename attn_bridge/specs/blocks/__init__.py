"""Configs of the layers of a block beside attention and norms: feed-forward layers, experts, streams, embeddings."""
