"""The store behind a URL, by its protocol."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ....printable import printable
from ..files import bad
from . import s3
from .faults import FaultError, as_faults
from .stores import Store
from .web import HubStore, WebStore

if TYPE_CHECKING:
    from .paths import RemotePath


PREFIXES = ("AWS_", "FSSPEC_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_")
"""Prefixes of environment variables that configure access to stores."""

_systems: dict[tuple[object, ...], object] = {}


def _system(protocol: str, make: Callable[[], object]) -> object:
    """Return a cached file system with its open connections, one per process and environment."""
    environment = sorted(one for one in os.environ.items() if one[0].upper().startswith(PREFIXES))
    # A fork must not share the sockets of its parent, and other variables may mean other credentials.
    key = os.getpid(), protocol, *environment
    if key not in _systems:
        _systems.clear()
        _systems[key] = make()
    return _systems[key]


def preload(protocols: Iterable[str]) -> None:
    """Import the packages for stores of these protocols, without connecting; failures are reported on first use."""
    for protocol in protocols:
        with contextlib.suppress(FaultError), as_faults():
            importlib.import_module("fsspec").get_filesystem_class(protocol)
            if protocol in ("s3", "s3a"):
                s3.preload()
            elif protocol == "hf":
                importlib.import_module("huggingface_hub")


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
        raise bad(path, f"reading it needs {path.needed}") from None
    except ValueError:
        raise bad(path, f"the protocol {printable(protocol, 40)} is unknown") from None
    try:
        with as_faults():
            if protocol in ("s3", "s3a"):
                return s3.S3Store(path, _system(protocol, lambda: s3.S3Store.system(kind)))
            if path.is_web:
                return WebStore(path, _system(protocol, lambda: kind(skip_instance_cache=True)))
            if protocol == "hf":
                return HubStore(path, kind(skip_instance_cache=True))
            return Store(path, fsspec.core.url_to_fs(path.url)[0])
    except FaultError as fault:
        raise bad(path, str(fault)) from None
