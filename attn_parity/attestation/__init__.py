"""Attestations: verdicts bound to digests of the code, weights and inputs that they are about, and signed.

`subjects` takes the digests while a comparison runs, and a report has them. `statement` makes an in-toto statement of a
report, `envelope` signs it and opens it again, and `verification` compares it with a folder.
"""
