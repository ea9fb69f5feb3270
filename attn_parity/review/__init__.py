"""Reviews: the pairs of a repository's ``parity.toml``, judged at a commit, one confined process per pair.

`manifest` reads and checks the file, `commit` exports the files of a commit, `judging` runs one pair, `driver` runs all
of them, `report` is the result as data, and `page` the same as HTML.
"""
