"""Features of all modules that torch's own layers have, too: redrawing of parameters, sizes in their ``repr``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import nn

from attn_bridge.foreign_names import names_ours
from attn_bridge.specs.base import Config
from attn_bridge.specs.summary import summarize

Forward = TypeVar("Forward", covariant=True)


_CALL = "forward"


class HasForward(Protocol[Forward]):
    """A module, for type checkers."""

    @property
    def forward(self) -> Forward:
        """The method that a call of the module runs."""


class Layer(nn.Module):
    """A module whose parameters can be drawn again, such as after it was made on the meta device."""

    def __init_subclass__(cls, **options: object) -> None:
        """Have the call of a class name its own keywords to users of other libraries."""
        super().__init_subclass__(**options)
        if _CALL in vars(cls):
            setattr(cls, _CALL, names_ours(vars(cls)[_CALL]))

    if TYPE_CHECKING:

        @property
        def __call__(self: HasForward[Forward]) -> Forward:
            """Run `forward` and the hooks: `nn.Module` gives its calls no type, this gives them that of `forward`."""

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
