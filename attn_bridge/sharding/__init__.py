"""What a mesh of devices means for a module, told without a framework: who holds which part of a parameter.

`Plan` says which axes of the mesh stand for tensor, context and fsdp, places parameters by the logical axes that the
specs name, and refuses what does not divide before anything is moved. `sequences` says how a sequence is shared out.
"""

from .plan import METHODS, Plan
from .sequences import Turn, pieces_of, turns

__all__ = ["METHODS", "Plan", "Turn", "pieces_of", "turns"]
