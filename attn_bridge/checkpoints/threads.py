"""Threads that wait for work, also in a process that was forked from the one that made them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Threads:
    """A pool of threads that lasts; a forked process, which has none of them, makes its own.

    Args:
        count: how many.
        name: what they are called, for who looks at a process.
    """

    def __init__(self, count: int, name: str):
        self._count, self._name, self._process = count, name, -1

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a thread call a function."""
        if self._process != os.getpid():
            self._pool = ThreadPoolExecutor(self._count, f"attn-bridge-{self._name}")
            self._process = os.getpid()
        return self._pool.submit(function, *arguments)
