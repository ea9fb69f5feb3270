"""Families as data: a TOML file in `data/` for each, which ``attn-bridge derive`` writes and proves.

In: the files. Out: a `Family` and a `Layout` for each, as the files of `models` that are written by hand have them.
`description` holds a file as an object, `reading` makes the family and the layout of it, `writing` its configs. Nothing
here needs `transformers`, which only the derivation runs (`attn_parity.frameworks.torch.derivation`).
"""
