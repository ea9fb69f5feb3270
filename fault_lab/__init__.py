"""The judge, judged: right pairs of any shape, planted faults, and how well they are told apart."""
