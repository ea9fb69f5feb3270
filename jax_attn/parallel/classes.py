"""Classes made for sharded modules."""

from __future__ import annotations

from flax import nnx


def same_name(kind: type[nnx.Module], members: dict[str, object]) -> type[nnx.Module]:
    """Return a subclass of a module's class that bears its name."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: type = type(kind)
    subclass: type[nnx.Module] = metaclass(kind.__name__, (kind,), names | members)
    return subclass
