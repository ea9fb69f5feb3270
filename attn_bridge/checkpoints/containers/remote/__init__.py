"""Checkpoints on other machines: object stores, the Hugging Face hub and web servers, by URL through fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from .paths import RemotePath, check_writable, forget, is_remote, text_of, to_path
from .urls import is_url

__all__ = [
    "RemotePath",
    "check_writable",
    "forget",
    "is_remote",
    "is_url",
    "open_all",
    "survey",
    "text_of",
    "to_path",
]

AT_ONCE = 16
"""Files of a checkpoint that are opened at the same time."""

Opened = TypeVar("Opened")


def survey(folder: Path, ending: str) -> None:
    """Learn of all that is below a folder of a store, and read its files with that ending; nothing for local ones."""
    if isinstance(folder, RemotePath):
        folder.store.survey(folder.key, ending)


def open_all(open_one: Callable[[Path], Opened], paths: Iterable[Path]) -> list[Opened]:
    """Open several files in order; those of a store at the same time, since each is waited for."""
    paths = list(paths)
    if len(paths) < 2 or not is_remote(paths[0]):
        return [open_one(path) for path in paths]
    with ThreadPoolExecutor(AT_ONCE, "attn-bridge-open") as threads:
        return list(threads.map(open_one, paths))
