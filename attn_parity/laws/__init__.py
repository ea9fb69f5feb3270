"""Laws that one side alone must obey: rows of a batch, padding, causality, caches, heads, eval mode, gradients.

`driver.laws` gets a side and a call, and tries each law that the module's arguments allow; a law is a function of a
`OneSide` that returns a `LawResult` or raises `NotTriedError` with the reason.
"""
