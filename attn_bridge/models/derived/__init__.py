"""Families as data: a TOML file in `families` for each, which ``attn-bridge derive`` writes and proves.

In: the files. Out: a `Family` and a `Layout` for each. `description` holds a file as an object, `fields` reads the
values of its fields, `reading` makes the family of it, `writing` its configs, `layout` the table of its tensors.
Nothing here needs `transformers`, which only the derivation runs (`attn_parity.frameworks.torch.derivation`).
"""
