"""Modules around the blocks of a tiny instance: embeddings, positions, norms, and the layers of the head."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import get_args

import torch
from torch import nn

from attn_bridge.models.derived.description import KeySource
from attn_bridge.specs.position import Sinusoids
from attn_bridge.weights.rows import Row

from .experts import in_files
from .model_class import DerivationError, ModelClass, learned

IDLE = "a part that the logits do not depend on"
"""Why tensors of a pooler are left out."""


@dataclasses.dataclass(frozen=True)
class Outside:
    """Names of the modules around the blocks; "" for a module that a class lacks.

    Attributes:
        embedding: token embeddings.
        head: the layer that gives the logits.
        positions: table of positions.
        types: table of types of tokens.
        embedding_norm: norm before the blocks.
        embedding_linear: linear layer between the embeddings and the blocks.
        norm: norm behind the blocks.
        head_linear: linear layer before the head.
        head_norm: norm behind that layer.
        bias: tensor of the head's bias.
        head_in_files: name of the head in files, where that is another; "" for the same.
        fields: their fields of ours.
        tables: alternatives for the fields of the table of positions, the likeliest first.
        idle: names of modules that the logits do not depend on, such as a pooler.
    """

    embedding: str
    head: str
    positions: str = ""
    types: str = ""
    embedding_norm: str = ""
    embedding_linear: str = ""
    norm: str = ""
    head_linear: str = ""
    head_norm: str = ""
    bias: str = ""
    head_in_files: str = ""
    fields: dict[str, KeySource] = dataclasses.field(default_factory=dict)
    tables: tuple[dict[str, KeySource], ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def norms(self) -> dict[str, str]:
        """Our name of a norm -> its name."""
        named = {"emb_norm": self.embedding_norm, "final_norm": self.norm, "head_norm": self.head_norm}
        return {ours: theirs for ours, theirs in named.items() if theirs}


def read(subject: ModelClass, model: nn.Module, blocks: str) -> Outside:
    """Return the modules around the blocks.

    Args:
        subject: the class.
        model: its tiny instance.
        blocks: name of the list of blocks.

    Raises:
        DerivationError: a module has no place in ours.
    """
    names = {module: name for name, module in model.named_modules()}
    embedding = names[model.get_input_embeddings()]
    head = names.get(model.get_output_embeddings(), "")
    tensors = {name: tensor for name, tensor in learned(model).items() if not name.startswith(f"{blocks}.")}
    of_head = [
        name
        for name, tensor in tensors.items()
        if name.endswith("bias")
        and tuple(tensor.shape) == (subject.keys()["vocab_size"],)
        and head.startswith(name.rpartition(".")[0])
    ]
    bias = next(iter(of_head), "")  # some classes keep it in the module above the head
    idle = _idle(model, tensors)
    outer = [name for name in _order(model, tensors, blocks, bias) if name not in (embedding, head, *idle)]
    if not head:
        raise DerivationError(f"{', '.join(sorted(outer)) or type(model).__name__}: no head that gives logits")
    by_role: dict[str, str] = {}
    fields: dict[str, KeySource] = {}
    tables: tuple[dict[str, KeySource], ...] = ()
    behind = False
    for name in outer:
        if name == blocks:
            behind = True
            continue
        module = model.get_submodule(name)
        role = _role(name, module, behind, "head_linear" in by_role)
        if role is None or role in by_role:
            raise DerivationError(f"{name} ({type(module).__name__}): a part besides blocks that ours lack")
        by_role[role] = name
    if "positions" in by_role:
        tables = _positions(subject, f"{by_role['positions']}.weight")
    else:
        tables = tuple(_sinusoids(subject, model, blocks))
    if "types" in by_role:
        fields["model.num_token_types"] = _source(subject, f"{by_role['types']}.weight")
    if "embedding_linear" in by_role:
        fields["model.embedding_width"] = _source(subject, f"{embedding}.weight", 1)
    linear = by_role.get("head_linear")
    if linear is not None and model.get_submodule(linear).weight.shape[0] != model.config.hidden_size:
        fields["model.head_width"] = _source(subject, f"{linear}.weight")
    if bias:
        fields["model.head_bias"] = KeySource(value=True)
    if "norm" not in by_role:
        fields["model.norm"] = KeySource(value=False)
    fields |= {f"model.{role}": KeySource(value=True) for role in ("embedding_norm", "head_norm") if role in by_role}
    return Outside(
        embedding,
        head,
        bias=bias,
        head_in_files=_in_files(model, head, blocks),
        fields=fields,
        tables=tables,
        idle=idle,
        **by_role,
    )


def _idle(model: nn.Module, tensors: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the modules with parameters among `tensors` that give the logits no gradient; frozen ones don't count."""
    model.zero_grad()
    model(torch.tensor([[3, 5, 4, 7]])).logits.sum().backward()
    learning = {name: one for name, one in tensors.items() if one.requires_grad}
    used = {name.rpartition(".")[0] for name, one in learning.items() if one.grad is not None}
    model.zero_grad()
    return tuple(sorted({name.rpartition(".")[0] for name in learning} - used))


def _in_files(model: nn.Module, head: str, blocks: str) -> str:
    """Return the name of the head in files, where that is another; "" for the same."""
    try:
        names = {name for name in in_files(model) if not name.startswith(blocks)}
    except Exception:  # a class that writes no files has no other names in them
        return ""
    others = {name.removesuffix(".weight") for name in names - model.state_dict().keys()}
    return others.pop() if f"{head}.weight" not in names and len(others) == 1 else ""


def _order(model: nn.Module, tensors: dict[str, torch.Tensor], blocks: str, bias: str) -> list[str]:
    """Return the names of the modules with tensors, of norms, and of the blocks, in order of calls; idle ones last.

    A norm without tensors may be called both before the blocks and behind them (NanoChat).
    """
    order: list[str] = []
    holders = {name.rpartition(".")[0] for name in tensors if name != bias}
    norms = {name for name, module in model.named_modules() if is_norm(module) and not name.startswith(f"{blocks}.")}
    first = f"{blocks}.0"
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: order.append(name), prepend=True)
        for name in (*holders, *(norms - holders), first)
    ]
    with torch.no_grad():
        model(torch.tensor([[3, 5, 4, 7]]))
    for handle in handles:
        handle.remove()
    names = [blocks if name == first else name for name in dict.fromkeys([*order, *sorted(holders)])]
    behind = set(order[order.index(first) :]) & set(order[: order.index(first)]) - holders
    return names + [name for name in order if name in behind][: len(behind)]


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _role(name: str, module: nn.Module, behind: bool, has_linear: bool) -> str | None:
    last = name.rpartition(".")[2].lower()
    if isinstance(module, nn.Embedding):
        if behind:
            return None
        return "types" if "type" in last else "positions" if "pos" in last or last == "wpe" else None
    if is_norm(module):
        return "embedding_norm" if not behind else "head_norm" if has_linear else "norm"
    if not isinstance(module, nn.Linear):
        return None
    return "head_linear" if behind else "embedding_linear"


def _probes(subject: ModelClass, name: str, axis: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield key, another value of it, and the rows of a table with that value, of keys that change these.

    With `axis` 1 they are the columns.
    """
    usual = subject.shapes(subject.keys())[name][axis]
    for key in sorted({key for key, value in {**subject.defaults, **subject.sizes}.items() if _is_count(value)}):
        if key in ("hidden_size", "d_model", "n_embd", "vocab_size"):
            continue
        usual_value = subject.usual(key)
        value = (usual_value if isinstance(usual_value, int) else 0) + 8
        try:
            rows = subject.shapes(subject.keys(**{key: value}))[name][axis]
        except Exception:  # a value that the class refuses changes nothing
            continue
        if rows != usual:
            yield key, value, rows


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positions(subject: ModelClass, name: str) -> tuple[dict[str, KeySource], ...]:
    """Return the fields of a table of positions; where the token of padding has a number, it may offset them."""
    for key, value, rows in _probes(subject, name):
        if rows >= value:
            outer = subject.canonical(key)
            fields = {"model.num_positions": KeySource(key=outer)}
            fields |= {"model.position_offset": KeySource(value=rows - value)} if rows > value else {}
            behind = {
                "model.num_positions": KeySource(key=outer, less="pad_token_id", plus=-1),
                "model.position_offset": KeySource(key="pad_token_id", plus=1),
            }
            return (behind, fields) if "pad_token_id" not in subject.sizes and rows == value else (fields,)
    raise DerivationError(f"{name}: no key gives the number of positions; the nearest is max_position_embeddings")


def _sinusoids(subject: ModelClass, model: nn.Module, blocks: str) -> Iterator[dict[str, KeySource]]:
    """Yield the fields of sines that may be added to the embeddings, where a buffer has a row of every position."""
    width = model.get_input_embeddings().weight.shape[1]
    rows = {
        buffer.shape[0]
        for name, buffer in model.named_buffers()
        if buffer.ndim == 2 and buffer.shape[1] == width and not name.startswith(f"{blocks}.")
    }
    counts = [value for key, value in subject.keys().items() if "position" in key and _is_count(value)]
    for offset in sorted({row - count for row in rows for count in counts if row >= count}):
        for kind in get_args(Sinusoids):
            first = {"model.position_offset": KeySource(value=offset)} if offset else {}
            yield {"model.sinusoids": KeySource(value=kind), **first}


def fixed(outside: Outside) -> dict[str, tuple[int | None, ...]]:
    """Return accepted values of keys: a table of sines has zeros in the row of padding, which no position may be."""
    first = outside.tables[0] if outside.tables else {}
    unused = first["model.position_offset"].value if first.keys() >= {"model.sinusoids", "model.position_offset"} else 0
    return {"pad_token_id": (None, *range(unused))} if isinstance(unused, int) and unused else {}


def _source(subject: ModelClass, name: str, axis: int = 0) -> KeySource:
    for key, value, rows in _probes(subject, name, axis):
        if rows == value:
            return KeySource(key=subject.canonical(key))
    raise DerivationError(f"{name}: no key gives its number of rows; the nearest is type_vocab_size")


def rows(outside: Outside, front: str, *, is_usual: bool) -> Iterator[Row]:
    """Yield the rows of the modules around the blocks.

    Args:
        outside: the modules.
        front: beginning of the names of the base model, which ``{prefix}`` replaces.
        is_usual: whether embeddings and head have Llama's names, whose rows every such layout has.
    """

    def template(name: str) -> str:
        return f"{{prefix}}{name.removeprefix(front)}" if front and name.startswith(front) else name

    if not is_usual:
        yield Row(f"{template(outside.embedding)}.weight", ("tok_emb.weight",), tied=("out_head.weight",))
        if outside.head_in_files:  # first, as the first alternative is what is written
            yield Row(f"{outside.head_in_files}.weight", ("out_head.weight",), optional=True, branch="head/file")
        branch = "head/module" if outside.head_in_files else ""
        yield Row(f"{outside.head}.weight", ("out_head.weight",), optional=True, branch=branch)
    for name, ours in ((outside.positions, "pos_emb"), (outside.types, "type_emb")):
        if name:
            yield Row(f"{template(name)}.weight", (f"{ours}.weight",))
    for name, ours in ((outside.embedding_linear, "emb_linear"), (outside.head_linear, "head_linear")):
        if name:
            yield from (Row(f"{template(name)}.{leaf}", (f"{ours}.{leaf}",)) for leaf in ("weight", "bias"))
    if outside.bias:
        yield Row(outside.bias, ("out_bias",))
    for name in outside.idle:
        yield Row(f"{template(name)}.{{rest}}", reason=IDLE)
