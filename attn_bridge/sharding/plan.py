"""Maps axes of parameters to axes of a mesh, and refuses sizes that do not divide.

Tensor parallelism cuts heads, hidden units of feed-forward layers and the vocabulary (Megatron-LM, arXiv 1909.08053);
fsdp cuts the remaining axes of every parameter (ZeRO, arXiv 1910.02054); context cuts the sequence, and no parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
class ShardingPlan:
    """The roles of the axes of a mesh.

    Attributes:
        mesh: names and sizes of the axes of the mesh, in order.
        tensor: the axis that shards heads, hidden units and the vocabulary.
        context: the axis that shards the tokens of a sequence.
        fsdp: the axis that shards the remaining axes of parameters, and the sequences of a batch where they divide.
        method: how queries reach keys of other devices, one of `METHODS`.
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
            ValueError: an axis that the mesh does not have, one axis in two roles, no axis in any role, an unknown
                method, an axis of the mesh whose name XLA can't read.
            TypeError: the name of an axis is not a str.
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
        for name in mesh:  # XLA ends the process at other names
            if not (name.isascii() and name.isprintable()) or set(name) & set('"\\'):
                raise ValueError(f"axis {printable(repr(name))} of the mesh must have a name of plain ASCII characters")
        if method not in METHODS:
            raise ValueError(f"method ({printable(repr(method))}) must be one of {', '.join(map(repr, METHODS))}")
        return cls(tuple((name, int(size)) for name, size in mesh.items()), tensor, context, fsdp, method)

    def size(self, role: Role) -> int:
        """Return the number of devices of a role's axis: 1 if no axis has the role."""
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

    def check(self, *configs: Config) -> None:
        """Refuse a mesh over which a module can't be sharded, before anything is moved.

        Args:
            configs: of the module, or of each of ours inside it.

        Raises:
            ValueError: no config; heads or hidden units that do not divide, or nothing that tensor cuts.
        """
        if not configs:
            raise ValueError("the module has none of ours inside, whose axes are known")
        tensor, context = self.size("tensor"), self.size("context")
        cut = [self._check_tensor(config, tensor) for config in configs] if tensor > 1 else []
        if tensor > 1 and not any(cut):
            raise ValueError(
                f"tensor ({self.tensor!r}) of {tensor} devices has nothing to cut in {type(configs[0]).__name__}: "
                "it has one head, or heads that are modules of their own"
            )
        if context > 1 and self.method == "ulysses":
            for config in configs:
                self._check_ulysses(config, tensor, context)

    def _check_tensor(self, config: Config, devices: int) -> bool:
        """Refuse sizes that do not divide, and return whether any axis is cut."""
        cut = False
        for row in config.parameters:
            for number, axis in enumerate(row.axes):
                if axis in MUST_DIVIDE and _parts(row, number) % devices:
                    raise ValueError(
                        f"{MUST_DIVIDE[axis]} ({_parts(row, number)}) of {row.rule.torch} must be a multiple of the "
                        f"{devices} devices of tensor ({self.tensor!r})"
                    )
                cut = cut or axis in MUST_DIVIDE
        return cut

    def _check_ulysses(self, config: Config, tensor: int, context: int) -> None:
        rows = config.parameters
        heads = {_parts(row, number) for row in rows for number, axis in enumerate(row.axes) if axis == "heads"}
        if not heads and any("head_dim" in row.axes and len(row.shape) > 1 for row in rows):
            heads = {1}  # attention with one head; a norm has none
        for count in sorted(heads):
            if count % (tensor * context):
                raise ValueError(
                    f"num_heads ({count}) of {type(config).__name__} must be a multiple of the {tensor * context} "
                    f"devices of tensor and context for method 'ulysses'"
                )

    def check_module(self, where: object) -> None:
        """Refuse a module that is on a mesh already; `where` is its mesh, or None.

        Raises:
            ValueError: it is on a mesh.
        """
        if where is not None:
            raise ValueError("the module is on a mesh already; parallelize takes one that is not")

    def check_tokens(self, tokens: int, name: str = "number of tokens") -> None:
        """Refuse a sequence whose length the devices of context can't divide.

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
    """Return the number of equal parts into which an axis can be cut."""
    axis = row.axes[number]
    return axis.parts if isinstance(axis, Axis) else row.shape[number]
