"""The store behind a URL, by its protocol."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ....printable import printable
from ..base import CheckpointError
from ..files import bad
from .faults import fault_of
from .hub import HubStore
from .s3 import S3Store
from .stores import Store
from .urls import WEB, needed
from .web import WebStore

if TYPE_CHECKING:
    from .paths import RemotePath


def connect(path: RemotePath) -> Store:
    """Return the store of a path.

    Raises:
        CheckpointError: the protocol is unknown, or its package is missing.
    """
    protocol = path.protocol
    try:
        fsspec = importlib.import_module("fsspec")
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError:
        raise bad(path, f"reading it needs {needed(protocol)}") from None
    except ValueError:
        raise bad(path, f"the protocol {printable(protocol, 40)} is unknown") from None
    try:
        if protocol in ("s3", "s3a"):
            return S3Store(path, S3Store.system(kind))
        if protocol in WEB:
            return WebStore(path, kind(skip_instance_cache=True))
        if protocol == "hf":
            return HubStore(path, kind(skip_instance_cache=True))
        return Store(path, fsspec.core.url_to_fs(path.url)[0])
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise bad(path, str(fault_of(error))) from None
