"""Replace functions of a library for one thread at a time; other threads keep the original.

The installed function looks up the replacement of the running thread, so several threads may replace the same function
at once. The last one to leave restores the original.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

_LOCK = threading.RLock()
_INSTALLED: dict[tuple[int, str], _Patch] = {}
_MISSING = object()


class _Patch:
    """One replaced function: the library's own, and each thread's replacements, the innermost last."""

    def __init__(self, home: object, name: str):
        self.home, self.name = home, name
        self.users = 0
        self.own = vars(home).get(name, _MISSING)
        self.original: Callable[..., object] = getattr(home, name)
        self.here = threading.local()

    @property
    def stack(self) -> list[Callable[..., object]]:
        """The replacements of the running thread."""
        if not hasattr(self.here, "stack"):
            self.here.stack = []
        stack: list[Callable[..., object]] = self.here.stack
        return stack

    def install(self) -> None:
        """Put the function that looks up the thread's replacement into the library."""
        original, thread_state = self.original, self.here

        @functools.wraps(original)
        def dispatch(*args: object, **kwargs: object) -> object:
            stack = getattr(thread_state, "stack", None)
            return (stack[-1] if stack else original)(*args, **kwargs)

        setattr(self.home, self.name, dispatch)

    def remove(self) -> None:
        """Put the library's own function back."""
        if self.own is _MISSING:
            delattr(self.home, self.name)
        else:
            setattr(self.home, self.name, self.own)


@contextlib.contextmanager
def replaced(
    home: object, name: str, build: Callable[[Callable[..., object]], Callable[..., object]]
) -> Iterator[None]:
    """Replace the function `name` of a module or a class, for the running thread.

    Args:
        home: the module or class.
        name: its attribute.
        build: takes the library's own function and returns what replaces it.
    """
    key = (id(home), name)
    patch: _Patch | None = None
    pushed = False
    try:
        with _LOCK:
            installed = _INSTALLED.get(key)
            if installed is None:
                installed = _INSTALLED[key] = _Patch(home, name)
            installed.users += 1
            patch = installed
            if patch.users == 1:
                patch.install()
        patch.stack.append(build(patch.original))
        pushed = True
        yield
    finally:
        if patch is not None:
            if pushed:
                patch.stack.pop()
            with _LOCK:
                patch.users -= 1
                if not patch.users:
                    patch.remove()
                    del _INSTALLED[key]


def original(home: object, name: str) -> object:
    """Return the library's own function, replaced or not."""
    with _LOCK:
        patch = _INSTALLED.get((id(home), name))
        return getattr(home, name) if patch is None else patch.original
