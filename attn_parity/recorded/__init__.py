"""Calls of a module that are recorded while other code runs, for a comparison of its port: inputs -> `Recording`."""
