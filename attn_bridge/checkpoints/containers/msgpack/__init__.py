"""Files of ``flax.serialization``: nested msgpack maps with arrays as extension 1, parsed without loading arrays."""

CHUNKED = "__msgpack_chunked_array__"
"""The key that marks a map as an array in pieces."""
