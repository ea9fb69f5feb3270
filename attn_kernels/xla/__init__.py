"""The interface between XLA and kernels: its C API, and the threads that share the work of a call."""
