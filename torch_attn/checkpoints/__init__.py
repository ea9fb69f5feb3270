"""Weights of torch modules from and to files, and the layers of `transformers` models."""

from .files import Pretrained, load, save
from .hugging_face import from_hf, to_hf

__all__ = ["Pretrained", "from_hf", "load", "save", "to_hf"]
