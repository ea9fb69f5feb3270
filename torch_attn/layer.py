"""Features of all modules that torch's own layers have, too: redrawing of parameters, sizes in their ``repr``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from attn_bridge.foreign_names import advice, foreign_names
from attn_bridge.specs.base import Config
from attn_bridge.specs.summary import summarize

from .decoding.rollback import restorer

Forward = TypeVar("Forward", covariant=True)
Result = TypeVar("Result")
Given = ParamSpec("Given")


class HasForward(Protocol[Forward]):
    """A module by the type of its `forward`, for type checkers: a call of `Layer` has its arguments and its result."""

    @property
    def forward(self) -> Forward:
        """The method that a call of the module runs."""


class Layer(nn.Module):
    """A module whose parameters can be drawn again, such as after it was made on the meta device."""

    _foreign_names: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: object) -> None:
        """Look up the keywords of other libraries that the call of a class does not take."""
        super().__init_subclass__(**options)
        cls._foreign_names = foreign_names(cls.forward)

    if TYPE_CHECKING:

        def __call__(
            self: HasForward[Callable[Given, Result]], *arguments: Given.args, **options: Given.kwargs
        ) -> Result:
            """Run `forward` and the hooks: `nn.Module` gives its calls no type, this gives them that of `forward`.

            A class whose `forward` has overloads declares them as the type of its ``__call__``.
            """

    else:

        def __call__(self, *arguments: object, **options: object) -> object:
            """Run `forward` and the hooks; if they raise, `cache` has the tokens that it had before.

            Raises:
                TypeError: a keyword of another library.
            """
            # No decorator of `forward`: `torch.fx` reads its code.
            for name in options:
                if name in self._foreign_names:
                    raise TypeError(advice(type(self).__name__, name, inspect.signature(self.forward).parameters))
            cache = options.get("cache")
            if cache is None or torch.compiler.is_compiling():
                return super().__call__(*arguments, **options)
            restore = restorer(cache, options.get("attention_mask") is not None)
            try:
                return super().__call__(*arguments, **options)
            except BaseException:  # an interrupt, too
                restore()
                raise

    def extra_repr(self) -> str:
        """Return sizes, mask and positions, as the config has them, for ``repr``."""
        config = getattr(self, "config", None)
        return summarize(config) if isinstance(config, Config) else ""

    def __prepare_scriptable__(self) -> None:
        """Refuse `torch.jit.script`, which calls this.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{type(self).__name__} can't be scripted; use torch.export or torch.jit.trace")

    def reset_parameters(self) -> None:
        """Draw the parameters of the module and of all its parts again, as without `rngs`: from torch's generator."""
        self._reset_own()
        _reset_parts(self)

    def _reset_own(self) -> None:
        """Redraw the module's own parameters, without those of its children."""


def _reset_parts(module: nn.Module) -> None:
    for part in module.children():
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            _reset_parts(part)  # a list of parts
        else:
            reset()
