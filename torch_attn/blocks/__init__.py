"""What whole models are made of beside attention and norms: feed-forward layers, experts, blocks."""
