"""Features of all modules that torch's own layers have, too: redrawing of parameters, sizes in their ``repr``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from attn_bridge.foreign_names import advice, foreign_names
from attn_bridge.sharding.linear_layers import check_bias, misfit
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
            """Run `forward` and the hooks; if they raise, `cache` has the tokens that it had before, or is lost.

            Raises:
                TypeError: a keyword of another library.
                ValueError: a linear layer that replaced a projection takes another width, or has another bias.
            """
            # No decorator of `forward`: `torch.fx` reads its code.
            for name in options:
                if name in self._foreign_names:
                    raise TypeError(advice(type(self).__name__, name, inspect.signature(self.forward).parameters))
            if torch.compiler.is_compiling():
                return super().__call__(*arguments, **options)
            _check_biases(self)
            restore = restorer(options.get("cache"), any(options.get(name) is not None for name in _MASKS))
            try:
                return super().__call__(*arguments, **options)
            except BaseException as error:  # an interrupt, too
                restore()
                reason = _misfit(self, error)
                if reason is None:
                    raise
                raise ValueError(reason) from error

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


_MASKS = ("attention_mask", "context_mask", "source_mask")
"""Arguments with a mask of padding, which a cache keeps."""

_PRODUCTS = ("shapes cannot be multiplied", "Sizes of tensors must match", "The expanded size of the tensor")
"""Parts of the messages of products of other widths."""


def _check_biases(module: nn.Module, path: str = "") -> None:
    """Refuse a bias of a single number in a linear layer of the module, which torch would broadcast."""
    for name, layer in module.named_children():
        if type(layer) is nn.Linear:
            if layer.bias is not None and layer.bias.numel() == 1:
                check_bias(f"{path}{name}", 1, layer.weight.shape[0])
        elif type(layer) is nn.ModuleList and any(type(each) is nn.Linear for each in layer):
            _check_biases(layer, f"{name}.")


def _misfit(module: nn.Module, error: BaseException) -> str | None:
    """Return which linear layer in a module an error of a product is about; None for other errors."""
    if not isinstance(error, RuntimeError) or not any(part in str(error) for part in _PRODUCTS):
        return None
    layers = {path: layer for path, layer in module.named_modules() if type(layer) is nn.Linear}
    widths = {path: (*reversed(layer.weight.shape), _length(layer.bias)) for path, layer in layers.items()}
    return misfit(getattr(module, "config", None), widths, str(error))


def _length(bias: nn.Parameter | None) -> int | None:
    return None if bias is None else bias.shape[0]


def _reset_parts(module: nn.Module) -> None:
    for part in module.children():
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            _reset_parts(part)  # a list of parts
        else:
            reset()
