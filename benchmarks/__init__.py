"""Benchmarks: each is a module that is run by itself and prints what it measured, with the machine."""
