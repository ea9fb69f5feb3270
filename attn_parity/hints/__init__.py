"""What a difference is consistent with: settings that are not the same, and relations that hold between the numbers.

In: what both sides of one place do with the same numbers (`Evidence`). Out: one line, or none. Pure NumPy. A hint says
what was measured and never that it is the cause.

settings    attributes of layers by one name for all frameworks, and what it means that two differ
relations   what holds between two tensors: a ratio, an order, a shift
devices     what devices that share a side explain: sums taken twice, pieces of a sequence in another order
layers      layers computed both ways: activations, gates, convolutions
norms       norms of one input: the statistic, eps and affine step of each side
spectral    spectral norms of stored vectors, or of those after a step of power iteration
reshaping   reductions, resizing, padding, softmax and modulation computed both ways
attention   attention computed both ways, with one step taken wrongly on one side
"""

from .devices import of_devices
from .evidence import Evidence, hint_for, of_statistic

__all__ = ["Evidence", "hint_for", "of_devices", "of_statistic"]
