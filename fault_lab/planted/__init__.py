"""The faults: in our own blocks, in ports as people write them, and in kernels."""
