"""Attention on CPUs: kernels that LLVM compiles for the processor at hand (extra ``cpu``).

They need the extra ``cpu``; `words` says what a call holds.
"""
