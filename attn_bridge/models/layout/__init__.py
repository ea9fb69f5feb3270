"""Layouts: how other libraries name and shape the weights under our torch names, mapped in both directions."""

from .mapped import DecodedTensors, Encoded
from .table import FLAGS, HEAD, Layout, Settings

__all__ = ["FLAGS", "HEAD", "DecodedTensors", "Encoded", "Layout", "Settings"]
