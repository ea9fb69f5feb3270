"""A tiny model of a class, and the model of ours that a description makes of its config and weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from attn_bridge import backends
from attn_bridge.models.derived.description import Description
from attn_bridge.models.derived.known import layout_for
from attn_bridge.models.derived.reading import DerivedFamily
from attn_bridge.models.layout import Layout
from attn_bridge.specs.decoder_model import DecoderConfig
from attn_bridge.whole_files import JsonObject

from ..model_classes.experts import in_files
from ..model_classes.model_class import ABSENT, ModelClass
from ..running.promotion import promoted


class WrongError(ValueError):
    """The description computes something else than the class; the message names the config and the tensor."""


class RefusedError(ValueError):
    """A config that the description refuses to read."""


@dataclasses.dataclass
class ModelPair:
    """An instance, and ours with the same weights.

    Attributes:
        theirs: the instance.
        ours: a `DecoderModel` of torch.
        config: its config.
        names: their names of the tensors -> shape.
        layout: the table between both.
        settings: the settings of that table.
    """

    theirs: nn.Module
    ours: nn.Module
    config: DecoderConfig
    names: dict[str, tuple[int, ...]]
    layout: Layout
    settings: JsonObject


def reader_of(description: Description) -> DerivedFamily:
    """Return the reader of configs of a description."""
    return DerivedFamily(description, layout_for(description))


def read(reader: DerivedFamily, keys: Mapping[str, object]) -> DecoderConfig:
    """Return the config in ours of a config.json.

    Raises:
        RefusedError: the description refuses it.
    """
    try:
        return reader.model(reader.file(keys, reader.description.model_type))
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedError(str(error)) from error


def as_file(config: Any) -> JsonObject:
    """Return the config.json that `transformers` writes for a config."""
    keys: JsonObject = json.loads(json.dumps(config.to_dict()))
    return keys


def make_pair(subject: ModelClass, reader: DerivedFamily, keys: Mapping[str, object], seed: int = 0) -> ModelPair:
    """Return an instance with these keys, and ours.

    Raises:
        RefusedError: the description refuses the config.
        WrongError: the tensors differ from those of the description.
    """
    config = read(reader, as_file(subject.config(keys)))
    shorter = read(reader, keys)
    if shorter != config:
        raise WrongError(
            f"the config of {printed_keys(keys, subject)} is read otherwise where transformers adds its defaults"
        )
    with promoted():
        theirs = subject.instance(keys, seed)
    return pair_with(theirs, reader, config, keys)


def pair_with(theirs: nn.Module, reader: DerivedFamily, config: DecoderConfig, keys: Mapping[str, object]) -> ModelPair:
    """Return an instance, and ours of a config with its weights.

    Raises:
        WrongError: the tensors differ from those of the description.
    """
    try:
        return _pair_of(theirs, _state(theirs), reader, config, keys)
    except WrongError:
        if reader.description.proof or reader.description.rows:
            raise
        # A table written by hand has the names of files, where a class may have others in memory.
        return _pair_of(theirs, in_files(theirs), reader, config, keys)


def _pair_of(
    theirs: nn.Module,
    tensors: Mapping[str, Tensor],
    reader: DerivedFamily,
    config: DecoderConfig,
    keys: Mapping[str, object],
) -> ModelPair:
    state = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    layout = reader.layout
    gone = {*(getattr(theirs, "all_tied_weights_keys", None) or {}), *layout.apart(state)}
    state = {name: array for name, array in state.items() if name not in gone}
    aliases = reader.description.aliases
    defaults = {key: one for key, one in reader.description.defaults.items() if not {*aliases.get(key, ())} & {*keys}}
    prefix, matches = layout.match(state)
    settings = {**layout.read_settings({**defaults, **keys}), "prefix": prefix}
    # The head of a class may have a name in memory that its files do not have.
    settings |= {name: 1 for row, _ in matches.values() if row.choice == "head" for name in row.alternatives}
    alternatives = {row.alternatives[0] for row, _ in matches.values() if len(row.alternatives) == 1}
    settings |= {name: int(name in alternatives) for name in layout.settings if name == "joined"}
    dropped = {name for name, (row, _) in matches.items() if row.reason}
    shapes = {name: tuple(array.shape) for name, array in state.items() if name not in dropped}
    if "fused" in layout.settings:
        settings["fused"] = int(any(name.endswith("gate_up_proj") and len(one) == 3 for name, one in shapes.items()))
    ours = {parameter.rule.torch: parameter.shape for parameter in config.parameters}
    try:
        encoded = layout.encode(ours, settings)
    except ValueError as error:
        raise WrongError(f"the table of tensors does not hold ours: {error}") from error
    if encoded.shapes != shapes:
        odd = sorted(set(encoded.shapes.items()) ^ set(shapes.items()))
        raise WrongError(f"{odd[0][0]}: the description and the class have other shapes for it, or one lacks it")
    module = backends.load("torch").build_blank("DecoderModel", config, "float64")
    backends.load("torch").set_weights(module, encoded.read(state))
    return ModelPair(theirs, module.eval(), config, shapes, layout, settings)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a file of the model holds: a tied head is not among them."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in ties}


def printed_keys(keys: Mapping[str, object], subject: ModelClass) -> str:
    """Return the keys of a config that differ from the usual ones, for messages."""
    usual = subject.keys()
    changes = {key: value for key, value in keys.items() if key not in usual or usual[key] != value}
    changes |= dict.fromkeys(usual.keys() - keys.keys(), ABSENT)
    return json.dumps(changes)[:200] if changes else "the usual instance"
