"""A gallery of real ports: small pairs in the styles people use, each right, each with faults planted by name.

``gallery.entries()`` lists them, ``test_gallery.py`` judges them, ``python -m parity_tests.wild`` prints the table.
"""
