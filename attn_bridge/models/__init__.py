"""Outside models as data: how their configs are read, and how other libraries name and shape the weights of ours.

A file per family: its config reader, and its tables of rows, each an outside tensor in terms of ours. `families` finds
the attention of a layer from a config, `layouts` the table of a whole checkpoint; one layout to another goes through
ours.
"""

from . import families, layouts

__all__ = ["families", "layouts"]
