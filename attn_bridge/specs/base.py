"""The base of every spec: a self-validating frozen config, and a table with one row per parameter."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, Self, get_args

from ..printable import printable
from ..validation import MAX_INDEX, check_number, check_rate
from ..weights import Rule, Rules

P = ParamSpec("P")

DERIVED: Any = None
"""Default of a field that ``__post_init__`` derives from other fields: None until then, never in a finished config."""

LATER = "later"
"""Metadata of a field that came after configs had been written to files: its default is left out of them."""


class Axis(str):
    """Logical name of an axis that is made of equal parts, such as heads: devices may share parts, not cut them."""

    parts: int

    def __new__(cls, name: str, parts: int) -> Self:
        """Return the name; `parts` is the number of equal parts along the axis."""
        axis = super().__new__(cls, name)
        axis.parts = parts
        return axis

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]  # copies and pickles keep the parts
        return str(self), self.parts


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One row of a variant's table: the rule that names it in both frameworks, its torch shape and logical axes.

    Attributes:
        rule: names it in both frameworks.
        shape: its shape in torch.
        axes: logical names of its torch axes, by their roles: ``embed heads kv_heads head_dim mlp experts vocab`` and
            others. They determine which axes devices share (`attn_bridge.sharding`), and an `Axis` in how many parts.
    """

    rule: Rule
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"axes {self.axes} of {self.rule.torch} must be one per axis of its shape {self.shape}")
        for axis, size in zip(self.axes, self.shape, strict=True):
            if isinstance(axis, Axis) and size % axis.parts:
                raise ValueError(f"axis {axis} of {self.rule.torch} ({size}) must be a multiple of {axis.parts} parts")

    @property
    def flax_shape(self) -> tuple[int, ...]:
        """Shape of the Flax leaf, derived from the rule."""
        return self.rule.convert_shape(self.shape, "torch")

    @property
    def flax_axes(self) -> tuple[str, ...]:
        """Logical names of the axes of the Flax leaf; the rule maps each to a torch axis."""
        torch_side, flax_side = (side.split() for side in self.rule.pattern.split("->"))
        return tuple(self.axes[torch_side.index(letter)] for letter in flax_side)


def _without_config(name: str, config: type[Config], sizes: Mapping[str, object]) -> str:
    """Return the message that puts sizes into a config, with those that it needs as well."""
    needed = [field.name for field in dataclasses.fields(config) if field.default is field.default_factory]
    arguments = [f"{key}={printable(sizes.get(key, '...'))}" for key in dict.fromkeys([*needed, *sizes])]
    return f"{name} takes a config, not sizes; use {name}({config.__name__}({', '.join(arguments) or '...'}))"


def _without_sizes(name: str, config: type[Config], argument: Config | Mapping[str, object]) -> str:
    """Return the message that takes sizes out of a config or a dict, and shows those that are missing."""
    kind = type(argument).__name__
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    if isinstance(argument, Mapping):
        needed = {field for field, default in fields.items() if default is dataclasses.MISSING}
        if needed <= argument.keys() <= fields.keys():
            return f"{name} takes sizes, not a {kind}; use {name}(**config)"
        sizes = dict(argument)
    else:
        sizes = vars(argument)
    arguments = [
        f"{field}={printable(repr(sizes[field])) if field in sizes else '...'}"
        for field, default in fields.items()
        if default is dataclasses.MISSING or sizes.get(field, default) != default
    ]
    return f"{name} takes sizes, not a {kind}; use {name}({', '.join(arguments)})"


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of the variants' configs; a subclass validates itself in ``__post_init__`` and lists its parameters."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The table of parameters, in creation order."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """How many numbers the parameters hold; configs of many equal parts do not list them for it."""
        return sum(math.prod(row.shape) for row in self.parameters)

    def rules(self) -> Rules:
        """Rules of all parameters, for `attn_bridge.torch_to_flax` and its inverse."""
        return Rules(parameter.rule for parameter in self.parameters)

    @classmethod
    def check(cls, config: object) -> Self:
        """Return a config of this class as it is.

        Raises:
            TypeError: `config` is something else, such as a dict or a size.
        """
        if isinstance(config, cls):
            return config
        advice = f"; use {cls.__name__}(**config)" if isinstance(config, Mapping) else ""
        raise TypeError(f"config must be a {cls.__name__}, got {type(config).__name__}{advice}")

    @classmethod
    def takes(cls, constructor: Callable[P, None]) -> Callable[P, None]:
        """Decorate the constructor of a module whose first argument is this config: it refuses sizes in its place.

        Raises:
            TypeError: no config, or arguments that this config would take; the message puts them into one.
        """
        sizes = {field.name for field in dataclasses.fields(cls)} - set(inspect.signature(constructor).parameters)

        @functools.wraps(constructor)
        def construct(*arguments: P.args, **options: P.kwargs) -> None:
            positional = arguments[1:]
            if len(positional) != 1 or not sizes.isdisjoint(options):
                named = {name: value for name, value in options.items() if name in sizes}
                if positional or named or "config" not in options:
                    raise TypeError(_without_config(type(arguments[0]).__name__, cls, named))
            constructor(*arguments, **options)

        return construct

    @classmethod
    def spreads(cls, constructor: Callable[P, None]) -> Callable[P, None]:
        """Decorate the constructor of a module that takes the fields of this config, to refuse a config or a dict.

        Raises:
            TypeError: a config or a dict as the first argument; the message puts its sizes into a call.
        """

        @functools.wraps(constructor)
        def construct(*arguments: P.args, **options: P.kwargs) -> None:
            argument = arguments[1] if len(arguments) > 1 else options.get("config")
            if isinstance(argument, (Config, Mapping)):
                raise TypeError(_without_sizes(type(arguments[0]).__name__, cls, argument))
            constructor(*arguments, **options)

        return construct

    @classmethod
    def arguments_from(cls, sizes: Mapping[str, object]) -> dict[str, object]:
        """Pick from named sizes (``d_in``, ``num_heads``, ...) the arguments that this variant takes."""
        return {field.name: sizes[field.name] for field in dataclasses.fields(cls) if field.name in sizes}

    def replace(self, **changes: object) -> Self:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def _resolve(self, name: str, default: object) -> None:
        """Set a field that is None to its default, which depends on other fields, so that no None remains."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, default)

    def _require_positive_ints(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            try:
                number = operator.index(value)
            except TypeError:
                number = None
            if number is None or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
            if number < 1:
                raise ValueError(f"{name} ({printable(number)}) must be at least 1")
            if number > MAX_INDEX:
                raise ValueError(f"{name} ({printable(number)}) must be at most {MAX_INDEX}")
            object.__setattr__(self, name, number)

    def _require_bools(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be a bool, got {type(value).__name__}")

    def _require_rates(self, *names: str) -> None:
        for name in names:
            check_rate(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))

    def _require_positive_number(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            check_number(name, value)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} ({value}) must be positive and finite")
            object.__setattr__(self, name, float(value))

    def _require_factors(self, name: str, count: int) -> None:
        """Check a tuple of positive numbers, and make them floats."""
        value = getattr(self, name)
        if not isinstance(value, tuple | list) or len(value) != count:
            raise TypeError(f"{name} must be {count} numbers, got {type(value).__name__}")
        for number, factor in enumerate(value):
            check_number(f"{name}[{number}]", factor)
            if not 0 < factor < math.inf:
                raise ValueError(f"{name}[{number}] ({factor}) must be positive and finite")
        object.__setattr__(self, name, tuple(map(float, value)))

    def _require_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(
                f"{name} ({printable(repr(getattr(self, name)))}) must be one of {', '.join(map(repr, choices))}"
            )

    def _require_kind(self, name: str, kinds: Any) -> None:
        value = getattr(self, name)
        if not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in get_args(kinds) or (kinds,))
            raise TypeError(f"{name} must be a {wanted}, got {type(value).__name__}")

    def _require_multiple(self, name: str, of: str) -> None:
        value, divisor = getattr(self, name), getattr(self, of)
        if value % divisor:
            raise ValueError(f"{name} ({value}) must be a multiple of {of} ({divisor})")


@dataclasses.dataclass(frozen=True)
class Example:
    """A config of a variant and a shape of input, which ``attn-bridge check`` proves the twins equal on.

    Attributes:
        name: word for it in reports and on the command line.
        config: the config, whose `d_in` is the width of the input.
        tokens: sequence length T.
        batch: batch size B; None for input without a batch axis.
        mask: attention mask to give: none, ``(B, S)`` padding, or one per head with fully masked rows.
        context: for a variant that takes ``context=``, number and width of its tokens.
        return_weights: whether the attention weights are an output, too.
        dtypes: precisions it runs in by default; every compiled program costs seconds, and most configs only have a
            meaning to prove, which float64 does.
    """

    name: str
    config: Config
    tokens: int = 7
    batch: int | None = 3
    mask: Literal["none", "padding", "per-head"] = "none"
    context: tuple[int, int] | None = None
    return_weights: bool = False
    dtypes: tuple[str, ...] = ("float64",)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One attention (or norm), as both packages offer it.

    Attributes:
        name: name of the class or function.
        file: name of its file in all four places: spec, JAX, torch, NumPy reference.
        config: its config.
        aliases: further names of the class.
        group: heading in reports.
        is_function: whether it is a function without parameters.
        returns_weights: whether it takes ``attention_mask`` and ``return_weights``.
        examples: configs to check it on, if the class takes the config; without examples, it takes the arguments of its
            config and is checked on cases of sizes that all such variants share.
    """

    name: str
    file: str
    config: type[Config]
    aliases: tuple[str, ...] = ()
    group: str = "chapter 3"
    is_function: bool = False
    returns_weights: bool = True
    examples: tuple[Example, ...] = ()


def linear(
    name: str, d_in: int, d_out: int, *, bias: bool, axes: tuple[str, str] = ("embed", "embed")
) -> tuple[Parameter, ...]:
    """Rows of a linear layer: torch ``weight [out, in]``, Flax ``kernel [in, out]``; `axes` are those of the weight."""
    weight = Parameter(Rule(f"{name}.weight", f"{name}.kernel", "o i -> i o"), (d_out, d_in), axes)
    return (weight, *((vector(f"{name}.bias", d_out, axes[0]),) if bias else ()))


def convolution(name: str, d_in: int, d_out: int, size: int) -> tuple[Parameter, ...]:
    """Rows of a convolution along one axis: torch ``weight [out, in, size]``, Flax ``kernel [size, in, out]``."""
    rule = Rule(f"{name}.weight", f"{name}.kernel", "o i k -> k i o")
    return Parameter(rule, (d_out, d_in, size), ("embed", "channels", "taps")), vector(f"{name}.bias", d_out)


def short_convolution(channels: int, size: int, *, bias: bool = False) -> tuple[Parameter, ...]:
    """Rows of ``conv1d``, which weighs each channel of `size` tokens; torch ``[c, 1, size]``, Flax ``[size, 1, c]``."""
    rule = Rule("conv1d.weight", "conv1d.kernel", "c i k -> k i c")
    weight = Parameter(rule, (channels, 1, size), ("channels", "one", "taps"))
    return (weight, vector("conv1d.bias", channels, "channels")) if bias else (weight,)


def vector(name: str, size: int, axis: str = "embed") -> Parameter:
    """Row of a vector that has one name in both frameworks."""
    return Parameter(Rule(name, name, "o -> o"), (size,), (axis,))


def number(name: str, shape: tuple[()] | tuple[int] = ()) -> Parameter:
    """Row of a single number; `shape` is ``()`` or ``(1,)``."""
    return Parameter(Rule(name, name, "o -> o" if shape else "->"), shape, ("numbers",) * len(shape))


def matrix(name: str, d_in: int, d_out: int, axes: tuple[str, str]) -> Parameter:
    """Row of a bare matrix ``[in, out]`` that is the same in both frameworks."""
    return Parameter(Rule(name, name, "i o -> i o"), (d_in, d_out), axes)
