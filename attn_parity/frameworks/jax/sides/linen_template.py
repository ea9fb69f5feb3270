"""A Linen submodule taken out of the call that made it, to be made again and run alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen
from flax.core import Scope

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Template:
    """A submodule without its scope, to be made again in another.

    Attributes:
        kind: its class.
        fields: its constructor arguments; modules among them are templates.
        path: path of its variables; None if it takes them from the module that receives it.
        name: its name in the parent.
    """

    kind: type
    fields: Mapping[str, object]
    path: Path | None
    name: str | None

    @staticmethod
    def of(module: linen.Module) -> Template | None:
        """Return the template of a submodule that is being called; None if it holds objects of that call alone."""
        try:
            return _template(module, tuple(module.path))
        except _PassingError:
            return None

    @property
    def outside(self) -> list[Path]:
        """Where modules that it was given, and does not own, have their variables."""
        return [one.path for one in _inner(self.fields) if one.path is not None] + [
            path for one in _inner(self.fields) for path in one.outside
        ]

    def build(self, root: Scope) -> linen.Module:
        """Make the submodule again, with its variables in the scope of the whole."""
        made: dict[Path, linen.Module] = {}
        return _build(self, root, made)


class _PassingError(Exception):
    """A submodule was given an array of the program that is being traced."""


def _template(module: linen.Module, owner: Path | None) -> Template:
    path = tuple(module.path) if module.scope is not None else None
    own = path if path is not None else owner

    def convert(value: Any) -> Any:
        if isinstance(value, linen.Module):
            inner = _template(value, own)
            inside = inner.path is not None and own is not None and inner.path[: len(own)] == own
            return dataclasses.replace(inner, path=None) if inside else inner
        if isinstance(value, jax.core.Tracer):
            raise _PassingError
        if isinstance(value, Mapping):
            return {key: convert(one) for key, one in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(convert, value))
        return type(value)(map(convert, value)) if type(value) in (list, tuple) else value

    fields = {
        field.name: convert(getattr(module, field.name))
        for field in dataclasses.fields(module)
        if field.init and field.name not in ("parent", "name")
    }
    return Template(type(module), fields, path, module.name)


def _build(template: Template, root: Scope, made: dict[Path, linen.Module]) -> linen.Module:
    if template.path is not None and template.path in made:
        return made[template.path]

    def convert(value: Any) -> Any:
        if isinstance(value, Template):
            return _build(value, root, made)
        if isinstance(value, Mapping):
            return {key: convert(one) for key, one in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(convert, value))
        return type(value)(map(convert, value)) if type(value) in (list, tuple) else value

    fields = {name: convert(value) for name, value in template.fields.items()}
    if template.path is None:
        return template.kind(**fields, parent=None, name=template.name)
    scope = root
    for name in template.path:
        scope = scope.push(name, reuse=True)
    module: linen.Module = template.kind(**fields, parent=scope, name=template.path[-1])  # unnamed, it would be adopted
    made[template.path] = module
    return module


def _inner(value: object) -> Iterator[Template]:
    if isinstance(value, Template):
        yield value
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from _inner(element)
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _inner(element)
