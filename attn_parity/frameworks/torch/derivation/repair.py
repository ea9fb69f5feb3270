"""Repairs of a proposed description: keys that it has to fix, unused defaults, and a layout that others have."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping

from attn_bridge.models.derived import known
from attn_bridge.models.derived.description import Description, KeySource
from attn_bridge.models.derived.layout import layout_of
from attn_bridge.models.derived.reading import DerivedFamily
from attn_bridge.models.layout import Layout

from ..model_classes import experts as mixtures
from ..model_classes.model_class import ABSENT, DerivationError, ModelClass
from ..model_classes.sizes import LAYERS, READ_BY_NAME
from ..model_classes.structure import Structure
from . import model_pair, proof
from .choices import EPS, inner_key
from .key_changes import changes_of
from .search import LISTS


def fix_keys(subject: ModelClass, description: Description) -> Description:
    """Return the description with keys fixed whose other values it reads, and computes something else for.

    Raises:
        DerivationError: fixing a key does not help.
    """
    singles = changes_of(subject)
    for changes in singles:
        for _ in range(3):
            reader = DerivedFamily(description, layout_of(description))
            try:
                proof.try_change(subject, reader, changes)
                break
            except model_pair.WrongError:
                description = _fixed(subject, description, changes)
    return description


def _fixed(subject: ModelClass, description: Description, changes: Mapping[str, object]) -> Description:
    nulls = [name for name, value in changes.items() if value is None and name not in description.required]
    if nulls:
        return dataclasses.replace(description, required=(*description.required, nulls[0]))
    key = next(iter(changes))
    if changes[key] is ABSENT or key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rope_parameters",
        *LISTS,
    ):
        excerpt = json.dumps(dict(changes))[:200]
        raise DerivationError(f"{excerpt}: {subject.model_class.__name__} computes something else with it than ours")
    value = changes[key]
    meant = model_pair.as_file(subject.config(subject.keys(**changes))).get(key)
    if isinstance(value, str) and isinstance(meant, str) and meant != value:
        renamed = {**description.renamed.get(key, {}), value: meant}
        return dataclasses.replace(description, renamed={**description.renamed, key: renamed})
    defaults = subject.defaults
    usual = subject.usual(key)
    of_pattern = dict(description.fixed_pattern)
    if description.pattern and key not in description.fixed_pattern and key != "layer_types":
        kinds = [description.kind_of(layer, LAYERS) for layer in range(LAYERS)]
        reader = DerivedFamily(
            dataclasses.replace(description, fixed_pattern={**of_pattern, key: (usual,)}), layout_of(description)
        )
        try:
            proof.try_change(subject, reader, {**changes, "layer_types": kinds})
            proof.try_change(subject, reader, changes)
        except model_pair.WrongError:
            pass
        else:
            return dataclasses.replace(description, fixed_pattern={**of_pattern, key: (usual,)})
    switched = dataclasses.replace(
        description,
        fields={
            **description.fields,
            "model.embedding_scale": KeySource(key="hidden_size", power=0.5),
            "model.scale_switch": KeySource(key=key),
        },
    )
    if isinstance(value, bool) and "model.embedding_scale" not in description.fields:
        with contextlib.suppress(model_pair.WrongError):
            if proof.try_change(subject, DerivedFamily(switched, layout_of(switched)), changes) == "equal":
                return switched
    if key not in description.same and (size := _size_of(subject, description, key)):
        return dataclasses.replace(description, same={**description.same, key: size})
    if key in description.fixed:
        raise DerivationError(f"{key} ({changes[key]}): it changes the numbers, and refusing it does not help")
    default = defaults.get(key)
    is_other_flag = isinstance(usual, bool) and isinstance(default, bool)
    values = (usual,) if default == usual or is_other_flag else (default, usual)
    return dataclasses.replace(description, fixed={**description.fixed, key: values if key not in EPS else (usual,)})


def _size_of(subject: ModelClass, description: Description, key: str) -> str:
    """Return the size with which the class and the description compute the same when a key has it too; "" if none.

    Both change together: a number that equals the width of the usual instance by chance is not the width.
    """
    usual = subject.keys()
    value = model_pair.as_file(subject.config(usual)).get(key)
    for size in ("hidden_size", "vocab_size"):
        inner = inner_key(subject, size)
        if key == size or inner not in usual or value != usual[inner]:
            continue
        same = dataclasses.replace(description, same={**description.same, key: size})
        reader = DerivedFamily(same, layout_of(same))
        with contextlib.suppress(model_pair.WrongError):
            changes = [{inner: number, key: number} for number in (4 * value, value // 2)]
            if all(proof.try_change(subject, reader, change) == "equal" for change in changes):
                return size
    return ""


def tidy(subject: ModelClass, parts: Structure, description: Description) -> Description:
    """Return the description with the keys that it reads as defaults, and a layout of others where that is the same."""
    description = _with_canonical_names(subject, description)
    used = {key for source in description.fields.values() for key in (source.key, source.times, source.per)}
    used |= description.fixed.keys()
    used |= description.same.keys() | set(description.keys.values())
    used |= description.fixed_pattern.keys() | {*READ_BY_NAME, "partial_rotary_factor"}
    inner = {name for names in description.aliases.values() for name in names}
    outer = {names[0]: key for key, names in description.aliases.items()}
    plain = description.defaults
    defaults = {
        outer.get(key, key): value
        for key, value in plain.items()
        if outer.get(key, key) in used and value is not None  # as a missing key is read, and TOML has no null
    }
    aliases = {key: names for key, names in description.aliases.items() if key in used and inner}
    fields = {
        field: source
        for field, source in description.fields.items()
        if (field, source.value) not in _USUAL or source.key
    }
    even = _needs_even_heads(subject, description)
    tidied = dataclasses.replace(description, defaults=defaults, aliases=aliases, fields=fields, even_heads=even)
    for layout in known.candidates(tidied.layout):
        if _is_same(subject, parts, tidied, layout):
            return dataclasses.replace(tidied, layout=layout.name, rows=(), prefixes=())
    return tidied


def _needs_even_heads(subject: ModelClass, description: Description) -> bool:
    """Return whether the class refuses heads that do not divide the width, although their own width is given."""
    if not {"attention.head_dim", "attention.nope_dim"} & description.fields.keys():
        return False
    uneven = {"hidden_size": 24, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 4}
    try:
        subject.config({**subject.keys(), **{inner_key(subject, key): value for key, value in uneven.items()}})
    except Exception as error:  # of huggingface_hub, which older versions of transformers do not raise
        return "multiple of the number of attention heads" in str(error)
    return False


def _with_canonical_names(subject: ModelClass, description: Description) -> Description:
    """Return the description with the keys that a class has two names of under those that it reads them by."""
    name = subject.canonical
    fields = {
        field: dataclasses.replace(
            source, key=name(source.key), times=name(source.times), less=name(source.less), per=name(source.per)
        )
        for field, source in description.fields.items()
    }
    return dataclasses.replace(
        description,
        fields=fields,
        fixed={name(key): values for key, values in description.fixed.items()},
        fixed_pattern={name(key): values for key, values in description.fixed_pattern.items()},
        same={name(key): other for key, other in description.same.items()},
        renamed={name(key): names for key, names in description.renamed.items()},
        required=tuple(map(name, description.required)),
    )


_USUAL = {
    *((f"attention.{name}", False) for name in ("qkv_bias", "out_bias", "sinks")),
    *(("feed_forward.bias", False), ("feed_forward.gated", True), ("block.norms", "pre"), ("position.pairing", "half")),
    *(("position.partial", False), ("experts.shared_gate", False), ("experts.shared_bias", False)),
    ("qk_norm.switch", True),
    *(("router.bias", False), ("router.correction", False), ("router.scores", "softmax"), ("sparse.first", 0)),
}
"""Fields with the value that they have where a description leaves them out."""


def _is_same(subject: ModelClass, parts: Structure, description: Description, layout: Layout) -> bool:
    """Return whether another layout reads all tensors of a class as its own does."""
    own = layout_of(description)
    flags = {source.key for source in parts.flags.values() if source.key} | {"tie_word_embeddings"}
    flags = {key for key in flags if subject.canonical(key) not in description.fixed}
    for changes in ({}, *({key: not subject.usual(key)} for key in sorted(flags))):
        keys = subject.keys(**changes)
        try:
            shapes = subject.shapes(keys)
            settings, others = (one.read_settings({**description.defaults, **keys}) for one in (own, layout))
            files = [shapes]
            if parts.experts is not None and not changes:  # which files may hold by other names
                written = mixtures.in_files(subject.instance(keys)).items()
                files.append({name: tuple(tensor.shape) for name, tensor in written})
            for names in files:
                placements = layout.decode(names, others).placements
                if placements != own.decode(names, settings).placements or not layout.is_complete(names):
                    return False
        except Exception:
            return False
    return True
