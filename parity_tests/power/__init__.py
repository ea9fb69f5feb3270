"""Measures how many planted faults the test suite catches: ``python -m parity_tests.power --faults 60 --seed 1``.

`planting` finds the expressions of a source text in which a fault can be planted, `drawing` draws faults at random,
`ordering` sorts test files by import distance, `lanes` takes those that fit a budget and runs them as the Makefile
does, `trial` decides about one fault, and the command keeps the outcomes of all.
"""
