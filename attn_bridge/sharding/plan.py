"""Which axis of a mesh cuts which axis of a parameter, and what does not divide.

Tensor parallelism cuts heads, hidden units of feed-forward layers and the vocabulary (Megatron-LM, arXiv 1909.08053);
fsdp cuts what is left of every parameter (ZeRO, arXiv 1910.02054); context cuts the sequence, and no parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self, get_args

from ..printable import printable
from ..specs import Config, Parameter
from ..specs.base import Axis

Role = Literal["tensor", "context", "fsdp"]
Method = Literal["all_gather", "ring", "ulysses"]

METHODS: tuple[str, ...] = get_args(Method)
"""How a query meets keys of other devices: all keys are gathered, or go round a ring, or heads are exchanged for
tokens (arXiv 2309.14509)."""

MUST_DIVIDE = {"heads": "num_heads", "mlp": "hidden_dim"}
"""Logical axes that tensor always cuts, and the word for what must divide."""

MAY_DIVIDE = ("kv_heads", "vocab")
"""Logical axes that tensor cuts where they divide; every device holds all of them where not."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the axes of a mesh stand for.

    Attributes:
        mesh: names and sizes of the axes of the mesh, in order.
        tensor: the axis that shares heads, hidden units and the vocabulary.
        context: the axis that shares the tokens of a sequence.
        fsdp: the axis that shares what is left of the parameters, and the sequences of a batch where they divide.
        method: how a query meets keys of other devices, one of `METHODS`.
    """

    mesh: tuple[tuple[str, int], ...]
    tensor: str | None = None
    context: str | None = None
    fsdp: str | None = None
    method: str = "all_gather"

    @classmethod
    def of(
        cls,
        mesh: Mapping[str, int],
        *,
        tensor: Any = None,
        context: Any = None,
        fsdp: Any = None,
        method: Any = "all_gather",
    ) -> Self:
        """Return a plan over the axes of a mesh.

        Raises:
            ValueError: an axis that the mesh does not have, one axis for two things, none at all, an unknown method.
            TypeError: the name of an axis that is no str.
        """
        names: dict[str, str] = {}
        for role, name in (("tensor", tensor), ("context", context), ("fsdp", fsdp)):
            if name is None:
                continue
            if not isinstance(name, str):
                raise TypeError(f"{role} must be the name of an axis of the mesh, got {type(name).__name__}")
            if name not in mesh:
                have = ", ".join(map(repr, mesh)) or "none"
                raise ValueError(f"{role} ({printable(repr(name))}) must be an axis of the mesh, which has {have}")
            if name in names:
                raise ValueError(f"{role} ({name!r}) must be another axis than {names[name]}")
            names[name] = role
        if not names:
            raise ValueError("one of tensor, context and fsdp must name an axis of the mesh, all are None")
        if method not in METHODS:
            raise ValueError(f"method ({printable(repr(method))}) must be one of {', '.join(map(repr, METHODS))}")
        return cls(tuple((name, int(size)) for name, size in mesh.items()), tensor, context, fsdp, method)

    def size(self, role: Role) -> int:
        """Return over how many devices something is shared: 1 where no axis stands for it."""
        name = getattr(self, role)
        return 1 if name is None else dict(self.mesh)[name]

    def placement(self, row: Parameter) -> tuple[str | None, ...]:
        """Return, for each torch axis of a parameter, the axis of the mesh that cuts it, or None."""
        cuts: list[str | None] = [None] * len(row.shape)
        devices = self.size("tensor")
        if self.tensor is not None and devices > 1:
            for number, axis in enumerate(row.axes):
                if axis in MUST_DIVIDE or (axis in MAY_DIVIDE and _parts(row, number) % devices == 0):
                    cuts[number] = self.tensor
        devices = self.size("fsdp")
        if self.fsdp is not None and devices > 1:
            free = [n for n, size in enumerate(row.shape) if cuts[n] is None and size % devices == 0]
            if free:
                cuts[max(free, key=lambda number: row.shape[number])] = self.fsdp
        return tuple(cuts)

    def check(self, config: Config) -> None:
        """Refuse a mesh that a module can't be shared out over, before anything is moved.

        Raises:
            ValueError: heads or hidden units that do not divide, or a module without anything that tensor cuts.
        """
        rows = list(config.parameters)
        tensor, context = self.size("tensor"), self.size("context")
        if tensor > 1:
            self._check_tensor(config, rows, tensor)
        if context > 1 and self.method == "ulysses":
            self._check_ulysses(config, rows, tensor, context)

    def _check_tensor(self, config: Config, rows: Iterable[Parameter], devices: int) -> None:
        cut = False
        for row in rows:
            for number, axis in enumerate(row.axes):
                if axis in MUST_DIVIDE and _parts(row, number) % devices:
                    raise ValueError(
                        f"{MUST_DIVIDE[axis]} ({_parts(row, number)}) of {row.rule.torch} must be a multiple of the "
                        f"{devices} devices of tensor ({self.tensor!r})"
                    )
                cut = cut or axis in MUST_DIVIDE
        if not cut:
            raise ValueError(
                f"tensor ({self.tensor!r}) of {devices} devices has nothing to cut in {type(config).__name__}: "
                "it has one head, or heads that are modules of their own"
            )

    def _check_ulysses(self, config: Config, rows: Iterable[Parameter], tensor: int, context: int) -> None:
        heads = {_parts(row, number) for row in rows for number, axis in enumerate(row.axes) if axis == "heads"}
        for count in sorted(heads) or [1]:
            if count % (tensor * context):
                raise ValueError(
                    f"num_heads ({count}) of {type(config).__name__} must be a multiple of the {tensor * context} "
                    f"devices of tensor and context for method 'ulysses'"
                )

    def check_tokens(self, tokens: int, name: str = "number of tokens") -> None:
        """Refuse a sequence that the devices of context can't share.

        Raises:
            ValueError: it does not divide.
        """
        devices = self.size("context")
        if tokens % devices:
            raise ValueError(
                f"{name} ({tokens}) must be a multiple of the {devices} devices of context ({self.context!r}); "
                "pad the sequence, and hide the padding with attention_mask"
            )


def _parts(row: Parameter, number: int) -> int:
    """Return into how many equal parts an axis can be cut."""
    axis = row.axes[number]
    return axis.parts if isinstance(axis, Axis) else row.shape[number]
