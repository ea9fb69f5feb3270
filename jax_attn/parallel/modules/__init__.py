"""Modules on a mesh: their code for a share of the heads and tokens, their parameters and caches."""
