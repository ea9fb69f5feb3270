"""Hints at a difference: settings that differ, and relations between the numbers of both sides.

In: inputs, outputs, weights and settings of one submodule or gap on both sides (`Evidence`). Out: one line, or "". Pure
NumPy. A hint names the computation of each side, a change with which both agree, or a relation of the numbers;
all hold on fresh weights and inputs, too. It names no cause without such evidence.

settings    attributes of layers under one name for all frameworks, and the meaning of a difference
relations   relations between two tensors: a ratio, an order, a shift
devices     relations that a shared side explains: sums taken twice, pieces of a sequence in another order
layers      layers computed both ways: activations, gates, convolutions
changes     changes of one operation that ports get wrong: other axes, orders, branches, functions and numbers
rearranged  weights of a module, and entries of an axis, in another order
norms       norms of one input: the statistic, eps and affine step of each side
reshaping   reductions, resizing, padding, softmax and modulation computed both ways
attention   attention computed both ways, with one step wrong on one side
"""

from .devices import of_devices
from .evidence import Evidence, hint_for, of_statistic

__all__ = ["Evidence", "hint_for", "of_devices", "of_statistic"]
