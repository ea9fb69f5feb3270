"""Containers of weights, read as NumPy arrays: ``.safetensors`` so far."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    import numpy as np

__all__ = ["read"]


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return all tensors of a ``.safetensors`` file by name; bfloat16 comes as `ml_dtypes.bfloat16`.

    Raises:
        ValueError: another kind of file, no file, a corrupt one, or a dtype that NumPy lacks; the message names the
            path.
    """
    import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy, which safetensors then finds
    import safetensors
    import safetensors.numpy

    path = Path(path)
    if path.suffix != ".safetensors" or path.is_dir():
        raise ValueError(f"{path} is not a .safetensors file")
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    try:
        arrays: dict[str, np.ndarray[Any, Any]] = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{path} holds a tensor that NumPy cannot represent: {error}") from error
    return arrays
