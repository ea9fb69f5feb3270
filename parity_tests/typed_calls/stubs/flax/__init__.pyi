from . import nnx as nnx
