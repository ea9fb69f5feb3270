"""What users do with attention layers, tried on both backends: ``python -m parity_tests.uses`` prints the table."""
