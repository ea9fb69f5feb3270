"""Classes of `transformers` as tiny random instances, and the parts of an instance by our roles.

In: a ``model_type``. Out: a `model_class.ModelClass`, which records the keys of a config that its instances read; a
`structure.Structure`; and the rows of its tensors (`rows`). `outside` reads the modules around the blocks, `latent`
attention whose keys and values are made of a latent, `experts` what routers choose from. No file here knows how a
description is searched or proven: that is `derivation`.
"""
