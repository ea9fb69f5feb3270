"""Families of models that are code: a config reader and a table of rows each."""
