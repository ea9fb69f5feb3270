"""Building blocks of whole models, apart from attention and norms: feed-forward layers, experts, blocks."""
