"""Checkpoints on other machines: object stores, the Hugging Face hub and web servers, by URL through fsspec."""

from __future__ import annotations

from .paths import (
    RemotePath,
    check_writable,
    forget,
    is_remote,
    is_there,
    is_url,
    open_all,
    sizes_in,
    survey,
    text_of,
    to_path,
)

__all__ = [
    "RemotePath",
    "check_writable",
    "forget",
    "is_remote",
    "is_there",
    "is_url",
    "open_all",
    "sizes_in",
    "survey",
    "text_of",
    "to_path",
]
