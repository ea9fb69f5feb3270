"""Whole models of transformers and of other libraries, drawn and published."""
