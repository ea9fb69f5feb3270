"""The parts of a tiny instance of a class, by our roles.

In: the instance. Out: a `structure.Structure`, and the rows of its tensors (`rows`). `outside` reads the modules around
the blocks, `latent` attention whose keys and values are made of a latent, `experts` what routers choose from. No file
here knows how the rest of a description is searched or proven.
"""
