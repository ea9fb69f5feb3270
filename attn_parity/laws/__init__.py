"""Laws that one side alone must obey: rows of a batch, padding, causality, caches, heads, eval mode, gradients.

`driver.laws` gets a side and a call, and tries each law that the module's arguments allow; a law is a function of a
`OneSide` that returns a `LawResult` or raises `NotTriedError` with the reason.
"""

LAWS = {
    "determinism": "two calls in eval mode give the same, and change no running statistics",
    "batch": "other rows of a batch change nothing, and joining a batch only rounds",
    "rows": "rows in another order give their outputs in that order",
    "padding": "what a mask or lengths hide changes no real token",
    "causality": "no output depends on later positions",
    "cache": "decoding token by token gives the outputs of one pass",
    "chunks": "prefilling in chunks gives the outputs of one pass",
    "keys": "tokens in another order give the same, where nothing tells their positions",
    "documents": "the content of other documents in a packed row changes nothing",
    "heads": "heads in another order, with their weights, give the same",
    "gradients": "gradients are the derivatives of the outputs",
    "dtype": "outputs have the dtype of the weights",
}
"""Name of a law -> its statement, in the order of the report."""
