"""Shared code of the specs of whole models: configs from dicts, tables made of tables, checks of token ids."""

from __future__ import annotations

import collections
import dataclasses
import json
import operator
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Self, TypeVar

from ..printable import printable
from ..validation import check_dense, check_integer, show
from ..weights import Rule
from .base import Config, Parameter

Shape = tuple[int, ...]
C = TypeVar("C", bound="type[ModelConfig]")

IGNORED_LABEL = -100
"""The label of a token that does not count in a loss, as in torch and `transformers`."""


@dataclasses.dataclass(frozen=True)
class ModelConfig(Config):
    """Base of the configs of whole models, which outside code holds as a dict."""

    takes_foreign_keys: ClassVar[bool] = False
    """Whether a dict may hold keys that do not affect the model's computation."""

    @classmethod
    def read(cls, config: Self | Mapping[str, object]) -> Self:
        """Return a config as it is, and a dict as one.

        Raises:
            TypeError: `config` is neither.
            ValueError: keys that are missing or unknown, all of them named, or a value that does not fit.
        """
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise TypeError(f"config must be a dict or a {cls.__name__}, got {type(config).__name__}")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        missing = [name for name in fields if name not in config and fields[name].default is dataclasses.MISSING]
        unknown = [str(key) for key in config if key not in fields]
        problems = (("missing", missing), ("unknown", [] if cls.takes_foreign_keys else unknown))
        parts = [f"{kind} keys: {', '.join(names)}" for kind, names in problems if names]
        if parts:
            raise ValueError(f"config does not fit {cls.__name__}: {'; '.join(parts)}")
        return cls(**{key: value for key, value in config.items() if key in fields})

    def to_dict(self) -> dict[str, object]:
        """Return the fields, parts as dicts too, for the loggers of the Trainer of `transformers`."""
        return dataclasses.asdict(self)

    def to_json_string(self) -> str:
        """Return `to_dict` as JSON for those loggers; a value without a JSON form as its text."""
        return json.dumps(self.to_dict(), default=str)

    def get_text_config(self) -> SimpleNamespace:
        """Return a place for the special tokens that the Trainer of `transformers` copies from a tokenizer.

        It is not kept: `generate` takes `eos` with each call.
        """
        return SimpleNamespace()

    def tied_weights(self, side: Literal["torch", "flax"]) -> dict[str, str]:
        """Return redundant name in a checkpoint -> name of the weight that it is tied to."""
        return {}

    def unread_weights(self, side: Literal["torch", "flax"]) -> tuple[str, ...]:
        """Return the names that a checkpoint may hold and the model does not compute with."""
        return ()


def accepts_use_cache(config: C) -> C:
    """Decorate a frozen config of a model, in which the Trainer of `transformers` sets ``use_cache = False``.

    The assignment changes nothing, as a call uses a cache only if it is passed one. True is refused, by a ValueError;
    the fields stay frozen.
    """
    refuse = config.__setattr__

    def assign(self: ModelConfig, name: str, value: object) -> None:
        if name != "use_cache":
            refuse(self, name, value)
        elif value:
            raise ValueError(f"use_cache ({printable(value)}) must be False: give the call a cache of init_cache")

    type.__setattr__(config, "__setattr__", assign)  # dataclasses write theirs after the class body
    return config


def count_blocks(blocks: Iterable[Config]) -> int:
    """Return how many numbers the parameters of blocks hold, without listing those of equal ones again."""
    return sum(block.count * times for block, times in collections.Counter(blocks).items())


def table(name: str, size: int, width: int, axis: str) -> Parameter:
    """Row of an embedding table: torch ``weight``, Flax ``embedding``, ``[size, width]``; `axis` names its rows."""
    return Parameter(Rule(f"{name}.weight", f"{name}.embedding", "n d -> n d"), (size, width), (axis, "embed"))


def below(prefix: str, rows: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return the rows of a part of the model, below its path."""
    return tuple(dataclasses.replace(row, rule=row.rule.prefixed(prefix, prefix)) for row in rows)


def below_blocks(blocks: Iterable[Config]) -> tuple[Parameter, ...]:
    """Return the rows of the blocks of a model, below ``trf_blocks``; those of equal blocks are made once."""
    blocks = tuple(blocks)
    made = {block: block.parameters for block in dict.fromkeys(blocks)}
    return tuple(row for i, block in enumerate(blocks) for row in below(f"trf_blocks.{i}", made[block]))


def check_ids(
    dtype: str, shape: Shape, *, longest: int | None = None, longest_name: str = "context_length", name: str = "ids"
) -> None:
    """Check token ids: integers of shape ``(B, T)``.

    Raises:
        TypeError: `dtype` is not an integer one.
        ValueError: `shape` is not ``(B, T)``, holds no token, or T exceeds `longest`.
    """
    if not is_integer(dtype):
        raise TypeError(f"{name} must have an integer dtype, got {dtype}")
    if len(shape) != 2:
        raise ValueError(f"{name} must have shape (B, T), got {show(shape)}")
    if shape[0] < 1 or shape[1] < 1:
        raise ValueError(f"{name} must hold at least 1 token, got shape {show(shape)}")
    if longest is not None and shape[1] > longest:
        raise ValueError(f"number of tokens ({shape[1]}) must be at most {longest_name} ({longest})")


def tokens_of(name: str, tokens: object, input_ids: object) -> Any:
    """Return the token ids of a call, given as the argument `name` or as ``input_ids``.

    Raises:
        TypeError: neither is given, or both, or a nested tensor.
    """
    if tokens is not None and input_ids is not None:
        raise TypeError(f"{name} and input_ids must not both be given")
    if tokens is None and input_ids is None:
        raise TypeError(f"{name} must be given")
    token_ids = input_ids if tokens is None else tokens
    check_dense(name, token_ids)
    return token_ids


def check_beside_ids(
    name: str, dtype: str, shape: Shape, ids_shape: Shape, *, may_be_bool: bool = False, ids_name: str = "ids"
) -> None:
    """Check integers (or bools) that accompany the token ids, one per token.

    Raises:
        TypeError: `dtype` is neither an integer one nor an allowed bool.
        ValueError: `shape` is not that of the ids.
    """
    if not (is_integer(dtype) or (may_be_bool and dtype == "bool")):
        raise TypeError(f"{name} must have {'dtype bool or ' if may_be_bool else ''}an integer dtype, got {dtype}")
    if shape != ids_shape:
        raise ValueError(f"{name} must have the shape of {ids_name} {show(ids_shape)}, got {show(shape)}")


def check_range(name: str, lowest: int, highest: int, size: int) -> None:
    """Check that ids lie in a table of `size` rows.

    Raises:
        ValueError: one does not; the message shows it.
    """
    if lowest < 0 or highest >= size:
        raise ValueError(f"{name} ({lowest if lowest < 0 else highest}) must be at least 0 and below {size}")


def check_label_range(lowest: int, highest: int, size: int) -> None:
    """Check labels other than `IGNORED_LABEL` against the size of a vocabulary.

    Raises:
        ValueError: one is not in it; the message shows it.
    """
    if lowest < 0 or highest >= size:
        label = lowest if lowest < 0 else highest
        raise ValueError(f"labels ({label}) must be {IGNORED_LABEL} or at least 0 and below {size}")


def check_max_new_tokens(value: Any) -> None:
    """Check a number of tokens to generate: an integer, at least 1.

    Raises:
        TypeError: not an integer.
        ValueError: below 1.
    """
    check_integer("max_new_tokens", value)
    if operator.index(value) < 1:
        raise ValueError(f"max_new_tokens ({value}) must be at least 1")


def is_integer(dtype: str) -> bool:
    """Return whether a dtype name is one of whole numbers; bool is not."""
    return dtype.startswith(("int", "uint"))
