"""Proposals for choices that names and shapes leave open, the likeliest first; the first equal one wins."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from attn_bridge.models.derived import runs
from attn_bridge.models.derived.description import Description, KeySource
from attn_bridge.models.derived.layout import layout_of
from attn_bridge.models.derived.reading import DerivedFamily
from attn_bridge.models.reading import multimodal
from attn_bridge.weights.rows import Row
from attn_bridge.whole_files import JsonObject

from ..model_classes import experts as mixtures
from ..model_classes import latent, outside, rows, structure
from ..model_classes.model_class import DerivationError, ModelClass
from ..model_classes.sizes import HEADS, LAYERS, READ_BY_NAME
from ..model_classes.structure import Structure
from ..running.promotion import promoted
from . import model_pair, proof
from .choices import HEADS_OF_LAYERS, SWITCH, Choice, choices_of, constant, has_runs
from .key_changes import LONGER, STRETCHED, is_nested

MOST_DEVIATIONS = 3
"""Choices of a proposal that are not the likeliest."""


LISTS = ("layer_types", "mlp_layer_types", runs.EACH, HEADS_OF_LAYERS)
"""Keys of a value per layer, without a default: it depends on the number of layers."""


def _proposals(choices: list[Choice]) -> Iterator[tuple[dict[str, KeySource], JsonObject]]:
    """Yield fields and arguments of rows, those with the fewest unlikely choices first."""
    open_choices = [number for number, choice in enumerate(choices) if len(choice) > 1]
    for deviations in range(min(MOST_DEVIATIONS, len(open_choices)) + 1):
        for changed in itertools.combinations(open_choices, deviations):
            for picks in itertools.product(*(range(1, len(choices[number])) for number in changed)):
                picked = dict(zip(changed, picks, strict=True))
                fields: dict[str, KeySource | None] = {}
                row_arguments: JsonObject = {}
                for number, choice in enumerate(choices):
                    some, arguments = choice[picked.get(number, 0)]
                    fields |= some
                    row_arguments |= arguments
                yield {field: source for field, source in fields.items() if source is not None}, row_arguments


def propose_plain(subject: ModelClass, parts: Structure) -> tuple[ModelClass, Description]:
    """Return the class and its likeliest description; of a class that ours don't compute whole, with keys left out.

    A key that switches a part on by a number is left out where no proposal computes the usual instance with it, and one
    does without. Other values of the key are refused then.

    Raises:
        DerivationError: no proposal computes the same.
    """
    optional = [key for key in subject.odd if subject.defaults.get(key) is None]
    try:
        return subject, propose(subject, parts)
    except DerivationError:
        if not optional:
            raise
        sizes = {key: value for key, value in subject.sizes.items() if key not in optional}
        plain = dataclasses.replace(subject, sizes=sizes, kept={})
        try:
            return plain, propose(plain, structure.read(plain))
        except DerivationError:
            pass
        raise


def propose(subject: ModelClass, parts: Structure) -> Description:
    """Return the likeliest description whose logits equal those of the usual instance.

    Raises:
        DerivationError: none does; the message names the first module at which the likeliest differs.
    """
    base = _base(subject, parts)
    probes = _probes(subject, parts)
    first: Description | None = None
    for fields, arguments in _proposals(choices_of(subject, parts)):
        renamed = arguments.pop("renamed", {})
        written = rows.rows(parts, **arguments)
        description = dataclasses.replace(
            base, fields={**base.fields, **fields}, rows=written, prefixes=_prefixes(parts, written), renamed=renamed
        )
        first = first or description
        if all(_is_equal(description, *probe) for probe in probes):
            return description
    assert first is not None, "there is a likeliest proposal"
    raise DerivationError(_where(subject, parts, first, probes[0]))


def _prefixes(parts: Structure, written: Sequence[Row]) -> tuple[str, ...]:
    """Return what names of the base begin with: nothing, too, in the file of a base that is a whole model alone."""
    if parts.is_usual:
        return ()
    is_whole = all(row.optional for row in written if "{prefix}" not in row.theirs)
    return (parts.front,) if parts.front and not is_whole else tuple(dict.fromkeys((parts.front, "")))


def _probes(subject: ModelClass, parts: Structure) -> list[tuple[Any, JsonObject, Any]]:
    """Return instance, config file and logits: of the usual config, as whole and short files, and with others."""
    changes: list[JsonObject] = [{}]
    if SWITCH in subject.defaults and not subject.defaults.get("layer_types"):
        changes.append({SWITCH: not subject.defaults[SWITCH]})
    rotary = subject.defaults.get("rope_parameters")
    if isinstance(rotary, dict):
        half = {"rope_type": "default", "rope_theta": 40.0, "partial_rotary_factor": 0.5}
        changes.append({"rope_parameters": dict.fromkeys(rotary, half) if is_nested(rotary) else half})
        changes += [] if is_nested(rotary) else [{"rope_parameters": STRETCHED}]
        changes += [{"rope_parameters": LONGER}] if parts.has_bare_norms else []
    if subject.mixed_layers:
        switched = {SWITCH: True} if SWITCH in subject.defaults else {}
        changes.append({"layer_types": subject.mixed_layers, **switched})
    probes = []
    for change in changes:
        keys = subject.keys(**change)
        try:
            with promoted(), torch.no_grad():
                model = subject.instance(keys)
                logits = model(proof.sample(1), use_cache=False).logits
        except Exception:
            if not change:
                raise
            continue
        probes += [(model, file, logits) for file in (model_pair.as_file(subject.config(keys)), keys)]
    return probes


def _is_equal(description: Description, model: object, file: JsonObject, logits: torch.Tensor) -> bool:
    reader = DerivedFamily(description, layout_of(description))
    try:
        pair = model_pair.pair_with(model, reader, model_pair.read(reader, file), file)
    except ValueError:
        return False
    with promoted(), torch.no_grad():
        return proof.error_of(logits, pair.ours(proof.sample(1))) <= 1


def _base(subject: ModelClass, parts: Structure) -> Description:
    """Return the part of the description that needs no search."""
    defaults = subject.defaults
    fields: dict[str, KeySource] = {field: source for field, source in parts.flags.items() if field != "norm.bias"}
    if "fused" in parts.attention[1] and "attention.key_bias" in fields:
        del fields["attention.key_bias"]
    if "attention.key_bias" in fields and fields["attention.key_bias"] == fields.get("attention.qkv_bias"):
        del fields["attention.key_bias"]
    fields["feed_forward.gated"] = constant("up" not in parts.feed_forward[1] or "gate" in parts.feed_forward[1])
    if "W_gate" in parts.attention[1]:
        fields["attention.gate"] = constant(True)
        if parts.gates == HEADS:
            fields["attention.gate_scope"] = constant("head")
    if parts.last_bias:
        fields["attention.last_out_bias"] = constant(True)
    if parts.experts is not None:
        fields |= mixtures.fields(subject, parts.experts)
        if parts.may_lack_shared:
            fields["experts.may_lack_shared"] = constant(True)
        if not parts.feed_forward[1]:
            fields.pop("feed_forward.bias", None)
    fields |= parts.outside.fields
    tied = subject.shapes(subject.keys(tie_word_embeddings=True))
    may_tie = f"{parts.outside.head}.weight" not in tied
    fields["model.tie"] = KeySource(key="tie_word_embeddings") if may_tie else constant(False)
    if parts.is_latent:
        fields |= latent.fields(subject)
    elif "head_dim" in subject.sizes and parts.head_dim == subject.sizes["head_dim"]:
        fields["attention.head_dim"] = KeySource(key="head_dim")
    if HEADS_OF_LAYERS in defaults:
        fields["layers.heads"] = KeySource(key=HEADS_OF_LAYERS)
    key = next((key for key in ("num_key_value_heads", "num_kv_heads") if key in subject.sizes), None)
    if key is not None and not parts.is_latent:
        fields["attention.num_kv_heads"] = KeySource(key=key)
    # Of two names of a key that descriptions read by the inner one, files may have the outer one alone (EXAONE).
    outer = {
        key: name for key in READ_BY_NAME if (name := subject.canonical(key)) in subject.other_names.keys() - {key}
    }
    pattern, first, last = _pattern(subject)
    older = {} if parts.experts is None else mixtures.older_keys(subject)
    step = {mixtures.STEP: (older.pop(mixtures.STEP), None)} if mixtures.STEP in older else {}
    return Description(
        subject.model_type,
        subject.model_class.__name__,
        f"hf-{multimodal.decoder_type(subject.model_type).replace('_', '-')}",
        aliases=subject.other_names,
        keys={**outer, **subject.decoder_keys, **({"sliding_window": "window_size"} if has_runs(subject) else {})},
        written={key: key for key in outer},
        fields=fields,
        fixed={**parts.fixed, **step, **outside.fixed(parts.outside)},
        pattern=pattern,
        first=first,
        last=last,
        defaults=_with_older_names({key: value for key, value in defaults.items() if key not in LISTS} | older),
    )


def _with_older_names(defaults: JsonObject) -> JsonObject:
    """Return defaults whose rotary positions have the names of older files, which take the keys of a file first."""
    rotary = defaults.get("rope_parameters")
    if not isinstance(rotary, dict) or rotary.get("rope_type", "default") != "default" or "full_attention" in rotary:
        return defaults
    keys = {key: value for key, value in defaults.items() if key != "rope_parameters"}
    part = rotary.get("partial_rotary_factor")
    return keys if part is None else {**keys, "partial_rotary_factor": part}


def _pattern(subject: ModelClass) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the kinds of layers where a config has no ``layer_types``: those that repeat, the first and the last."""
    depths = range(24, 29)
    if not subject.defaults.get("layer_types"):
        return (), (), ()
    try:
        kinds = [subject.config_class(num_hidden_layers=layers).layer_types for layers in depths]
    except Exception as error:
        raise DerivationError(
            f"layer_types: no rule for {depths[0]} layers; the nearest is a repeated pattern"
        ) from error
    middle = kinds[0][: depths[0] // 2]
    # A pattern counts from layer 0, so the first layers are kept apart only where they differ from it.
    for last, first, length in itertools.product(range(2), range(4), range(1, depths[0] // 3)):
        pattern = tuple(middle[first + (place - first) % length] for place in range(length))
        ends = tuple(middle[:first]), tuple(kinds[0][depths[0] - last :])
        proposal = Description("", "", "", pattern=pattern, first=ends[0], last=ends[1])
        if all(list(some) == [proposal.kind_of(layer, len(some)) for layer in range(len(some))] for some in kinds):
            return pattern, *ends
    raise DerivationError(f"layer_types ({', '.join(kinds[0])}): no pattern that repeats; the nearest is one that does")


def _where(
    subject: ModelClass, parts: Structure, description: Description, probe: tuple[object, Mapping[str, object], object]
) -> str:
    """Return a message that names the first submodule of the first block at which a proposal differs."""
    model, file, _ = probe
    reader = DerivedFamily(description, layout_of(description))
    try:
        pair = model_pair.pair_with(model, reader, model_pair.read(reader, file), file)
    except ValueError as error:
        return f"{subject.model_class.__name__}: {error}"
    slots = dict(zip(structure.SLOTS[parts.placements[0]], parts.norms, strict=True))
    names = {"att": parts.attention[0], "ff": parts.experts.child if parts.experts else parts.feed_forward[0], **slots}
    names = {slot: name for slot, name in names.items() if name}
    for number in range(LAYERS):
        path, own = f"{parts.front}{parts.layers}.{number}", f"trf_blocks.{number}"
        theirs = _outputs(model, [f"{path}.{name}" for name in names.values()])
        ours = _outputs(pair.ours, [f"{own}.{name}" for name in names])
        for name in [name.removeprefix(f"{path}.") for name in theirs]:
            slot = next(slot for slot, other in names.items() if other == name)
            if proof.error_of(theirs[f"{path}.{name}"], ours[f"{own}.{slot}"]) > 1:
                nearest = type(pair.ours.get_submodule(f"{own}.{slot}")).__name__
                return f"{path}.{name} ({parts.classes[name]}) computes something else; the nearest is {nearest}"
    return (
        f"{subject.model_class.__name__}: what is around the blocks differs (embeddings, head or last norm); the "
        "nearest is DecoderModel"
    )


def _outputs(model: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """Return name -> output of submodules, in order of calls."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, module: object, arguments: object, out: object) -> None:
        outputs.setdefault(name, out[0] if isinstance(out, tuple | list) else out)

    handles = [model.get_submodule(name).register_forward_hook(functools.partial(keep, name)) for name in names]
    with promoted(), torch.no_grad():
        model(proof.sample(1))
    for handle in handles:
        handle.remove()
    return outputs
