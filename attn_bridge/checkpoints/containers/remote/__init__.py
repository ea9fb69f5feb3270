"""Checkpoints on other machines: object stores, the Hugging Face hub and web servers, by URL through fsspec."""

from __future__ import annotations

import os
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
    "is_there",
    "is_url",
    "open_all",
    "sizes_in",
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


def is_there(path: Path) -> bool:
    """Return whether a file of that name is there, or on this machine anything: a pipe is refused, not passed over."""
    return path.is_file() if isinstance(path, RemotePath) else os.path.lexists(path)


def sizes_in(folder: Path) -> dict[str, int]:
    """Return name -> bytes of all in a folder; fewer than 0 where a store lists names alone."""
    if isinstance(folder, RemotePath):
        return {name: entry.size for name, entry in folder.store.children(folder.key).items()}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries}


def open_all(open_one: Callable[[Path], Opened], paths: Iterable[Path]) -> list[Opened]:
    """Open several files in order; those of a store at the same time, since each is waited for."""
    paths = list(paths)
    if len(paths) < 2 or not is_remote(paths[0]):
        return [open_one(path) for path in paths]
    with ThreadPoolExecutor(AT_ONCE, "attn-bridge-open") as threads:
        return list(threads.map(open_one, paths))
