"""Packages of others."""
