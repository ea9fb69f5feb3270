"""Attention on CPUs: kernels that LLVM compiles for the host processor (extra ``cpu``).

They need the extra ``cpu``; `words` documents the arguments of a call.
"""
