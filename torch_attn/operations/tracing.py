"""Whether a program is recorded of the operations that run, with every choice that Python makes by their numbers."""

from __future__ import annotations

import torch


def is_traced() -> bool:
    """Return whether `torch.jit.trace` or `make_fx` records operations; `torch.compiler.is_compiling` covers others."""
    return torch.jit.is_tracing() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
