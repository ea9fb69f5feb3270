from collections.abc import Callable
from typing import Any

class Module:
    __call__: Callable[..., Any]
    def __getattr__(self, name: str) -> Any: ...

def __getattr__(name: str) -> Any: ...
