"""The console command ``attn-bridge``: thin commands over public functions.

Exit status: 0 = holds, 1 = a check failed, 2 = bad usage or bad input, with one line ``error: ...`` on stderr.
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
