"""What ``flax.serialization`` writes: nested maps of msgpack with arrays as extension 1, read without loading them."""

CHUNKED = "__msgpack_chunked_array__"
"""The key that says that a map is an array in pieces."""
