"""Proposals for choices that names and shapes leave open, the likeliest first; the first equal one wins."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch

from attn_bridge.models.derived import runs
from attn_bridge.models.derived.description import Description, KeySource
from attn_bridge.models.derived.reading import FamilyReader, layout_of
from attn_bridge.models.reading import multimodal
from attn_bridge.models.reading.decoders import ACTIVATIONS as ACTIVATION_NAMES
from attn_bridge.specs.feed_forward import Activation
from attn_bridge.specs.position import Pairing
from attn_bridge.weights.rows import Row

from ..running.promotion import promoted
from . import experts as mixtures
from . import latent, proof, rows, structure
from .key_changes import GROWTH, LONGER, STRETCHED, is_nested
from .structure import Structure
from .subject import HEADS, LAYERS, DerivationError, ModelClass

MOST_DEVIATIONS = 3
"""Choices of a proposal that are not the likeliest."""

EPS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "afn", "activation")
WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim")
SWITCH = "use_sliding_window"
"""Key that switches the window of all layers on."""

HEADS_OF_LAYERS = "num_attention_heads_per_layer"
"""Key of the number of query heads of each layer."""

LISTS = ("layer_types", "mlp_layer_types", runs.EACH, HEADS_OF_LAYERS)
"""Keys of a value per layer, without a default: it depends on the number of layers."""

FULL, SLIDING = "full_attention", "sliding_attention"

Fields = Mapping[str, KeySource | None]
Choice = tuple[tuple[Fields, Mapping[str, Any]], ...]
"""Alternatives, the likeliest first: fields to set (None removes one), and arguments of `rows.rows`."""


def _constant(value: Any) -> KeySource:
    return KeySource(value=value)


def _alternatives(*fields: Fields) -> Choice:
    return tuple((one, {}) for one in fields)


def _scales(subject: ModelClass) -> Iterator[Choice]:
    """Yield the choices of scales, from keys that the class reads."""

    def keyed(field: str, key: str, *powers: float, per: str = "", per_power: float = 1.0) -> Iterator[Choice]:
        for name in sorted(subject.read):
            if name.rpartition(".")[2] == key and isinstance(subject.usual(name), int | float):
                sources = (KeySource(key=name, power=power, per=per, per_power=per_power) for power in powers)
                yield _alternatives(*({field: source} for source in sources), {})

    yield from keyed("attention.scale", "attention_multiplier", 1.0)
    yield from keyed("attention.scale", "query_pre_attn_scalar", -0.5)
    yield from keyed("attention.scale", "softmax_scale", 1.0)
    if not {"attention_multiplier", "query_pre_attn_scalar"} & subject.read:
        yield _alternatives({}, {"attention.scale": _constant(1.0)})
    yield from keyed("attention.softcap", "attn_logit_softcapping", 1.0)
    yield from keyed("attention.clip", "clip_qkv", 1.0)
    yield from keyed("block.residual_scale", "residual_multiplier", 1.0)
    yield from keyed("block.residual_scale", "scale_depth", 1.0, per="num_hidden_layers", per_power=0.5)
    yield from keyed("model.logit_scale", "logits_scaling", -1.0, 1.0)
    yield from keyed("model.logit_scale", "dim_model_base", 1.0, per="hidden_size")
    yield from keyed("model.logit_scale", "logit_scale", 1.0, -1.0)
    yield from keyed("model.logit_softcap", "final_logit_softcapping", 1.0)
    multiplier = next((key for key in ("embedding_multiplier", "scale_emb") if key in subject.read), None)
    if multiplier is not None:
        yield from keyed("model.embedding_scale", multiplier, 1.0)
    else:
        yield _alternatives({}, {"model.embedding_scale": KeySource(key="hidden_size", power=0.5)})


def _norms(subject: ModelClass, parts: Structure) -> Iterator[Choice]:
    key = next((key for key in EPS if key in subject.read), None)
    eps: tuple[KeySource, ...] = (KeySource(key=key),) if key else (_constant(1e-5), _constant(1e-6))
    bias = parts.flags.get("norm.bias", _constant(False))
    rms = {"norm.kind": _constant("rms"), "norm.bias": None}
    layer = {"norm.kind": _constant("layer"), "norm.bias": bias}
    is_layer = bool(bias.key or bias.value)
    offset, from_one = ({**kind, "norm.unit_offset": _constant(True)} for kind in (rms, layer))
    if not any(name.endswith(f"{parts.norms[0]}.weight") for name in parts.tensors):
        bare: Fields = {"norm.bias": None, "norm.affine": _constant(False)}
        yield _alternatives(*({**bare, "norm.kind": _constant(kind)} for kind in ("layer", "rms")))
    else:
        yield _alternatives(layer, from_one) if is_layer else _alternatives(rms, offset, layer)
    yield _alternatives(*({"norm.eps": one} for one in eps))
    child, names = parts.attention
    if parts.has_bare_norms:
        bare = {"qk_norm.affine": _constant(False), "qk_norm.eps": eps[0]}
        yield _alternatives({**bare, "qk_norm.rotated": _constant(True)}, bare)
    elif "q_norm" in names:
        width = parts.shapes[f"{parts.front}{parts.layers}.0.{child}.{names['q_norm']}.weight"]
        scope = "full" if width[0] > parts.head_dim else "head"
        plain: Fields = {"qk_norm.scope": _constant(scope), "qk_norm.eps": eps[0]}
        plain = {**plain, "qk_norm.kind": _constant("layer")} if parts.has_shifts("q_norm") else plain
        rotated = ({**plain, "qk_norm.rotated": _constant(True)},) if scope == "head" else ()
        yield _alternatives(plain, {**plain, "qk_norm.unit_offset": _constant(True)}, *rotated)


def _positions(subject: ModelClass, parts: Structure) -> Iterator[Choice]:
    defaults = subject.defaults
    kinds = defaults.get("layer_types")
    has_window = "sliding_window" in subject.read and "sliding_window" in defaults
    rules: list[Fields] = [{"layers.rule": _constant("full"), "layers.switch": None}]
    if has_window:
        rules.insert(0, {"layers.rule": _constant("window"), "layers.switch": None})
    if has_window and SWITCH in defaults:
        rules.insert(0, {"layers.rule": _constant("window"), "layers.switch": KeySource(key=SWITCH)})
    if _has_runs(subject):
        rules.insert(0, {"layers.rule": _constant("runs"), "layers.runs": KeySource(key=runs.KEY)})
    if kinds and has_window:
        switch = KeySource(key=SWITCH) if SWITCH in defaults else None
        rules.insert(0, {"layers.rule": _constant("types"), "layers.switch": switch})
    yield _alternatives(*rules)
    rotary = defaults.get("rope_parameters")
    if "rotary_dim" in subject.read:
        width = {
            "position.kinds": _constant((FULL, SLIDING)),
            "position.theta": _constant(10000.0),
            "position.dim": KeySource(key="rotary_dim"),
        }
        yield _alternatives({**width, "position.pairing": _constant("interleaved")}, width)
        return
    if not isinstance(rotary, dict):
        kinds_of = {"position.kinds": _constant((FULL, SLIDING))}
        turned = {**kinds_of, "position.theta": _constant(10000.0), "position.fixed": _constant(True)}
        others = (
            {**kinds_of, "position.alibi": _constant(True)},
            {**turned, "position.pairing": _constant("interleaved")},
            turned,
        )
        yield _alternatives({}, *(() if parts.outside.positions else others))
        return
    if GROWTH in rotary:
        keys = {"rate": GROWTH, "interval": "original_max_position_embeddings"}
        yield _alternatives(
            {f"temperature.{name}": KeySource(key=f"rope_parameters.{key}") for name, key in keys.items()}
        )
    base: Fields = {"position.theta": _constant(_missing_base(subject, float(rotary.get("rope_theta", 10000.0))))}
    if is_nested(rotary):
        base = {"position.nested": _constant(True)}
    usual: Fields = {"position.kinds": _constant((FULL, SLIDING)), **base}
    sliding: Fields = {**usual, "position.kinds": _constant((SLIDING,))}
    none: Fields = dict.fromkeys(
        f"position.{name}" for name in ("kinds", "theta", "nested", "pairing", "partial", "alpha")
    )
    flags = [key for key in subject.read & defaults.keys() if "interleave" in key]
    yield _alternatives(
        *({"position.pairing": KeySource(key=key)} for key in flags),
        *({"position.pairing": _constant(pairing)} for pairing in get_args(Pairing)),
    )
    yield _alternatives({"position.partial": _constant(False)}, {"position.partial": _constant(True)})
    if not is_nested(rotary):
        yield _alternatives({}, {"position.alpha": _constant(True)})
    yield _alternatives(usual, *((sliding,) if kinds and has_window else ()), none)


def _has_runs(subject: ModelClass) -> bool:
    """Return whether the kinds of layers are runs of kinds."""
    return isinstance(subject.defaults.get(runs.KEY), list) and "window_size" in subject.read


def _missing_base(subject: ModelClass, usual: float) -> float:
    """Return the base of rotary parameters that name none, which may be another than that of a config without any."""
    try:
        filled = subject.config_class(rope_parameters={"rope_type": "default"}).rope_parameters
        return float(filled["rope_theta"])
    except Exception:  # a class that refuses them reads no file without a base
        return usual


def _choices(subject: ModelClass, parts: Structure) -> list[Choice]:
    child, names = parts.feed_forward
    acts = [key for key in ACTIVATIONS if key in subject.read]
    widths = list(_widths(subject, parts)) if names else []
    if names and not widths:
        raise DerivationError(
            f"{child} ({parts.classes.get(child, '')}): no key of its width is known; the nearest is {WIDTHS[0]}"
        )
    activations = [KeySource(key=key) for key in acts] or [_constant(name) for name in get_args(Activation)]
    plain: Choice = _alternatives(*({"feed_forward.activation": one} for one in activations))
    renamed = [
        ({"feed_forward.activation": KeySource(key=key)}, {"renamed": one})
        for key, one in _renamed(subject, parts, acts)
    ]
    choices = [
        *_positions(subject, parts),
        *_norms(subject, parts),
        *_scales(subject),
        (*renamed, *plain),
        _alternatives(*({"block.norms": _constant(one)} for one in parts.placements)),
    ]
    if names:
        choices.append(_alternatives(*({"feed_forward.hidden_dim": one} for one in widths)))
    if parts.outside.tables:
        choices.append(_alternatives(*parts.outside.tables))
    if parts.outside.tables and parts.outside.embedding_norm:
        choices.append(_alternatives({}, {"model.norm_tokens": _constant(True)}))
    if parts.outside.head_linear:
        choices.append(_alternatives(*({"model.head_activation": one} for one in activations)))
    if parts.experts is not None:
        choices += mixtures.choices(subject, parts.experts)
    if parts.gates:
        choices.append(_alternatives({}, {"attention.gate_activation": _constant("softplus")}))
    if "fused" in parts.attention[1]:
        choices.append(_fused(parts))
    if "gate_up" in names:
        choices.append((({}, {"gate_first": True}), ({}, {"gate_first": False})))
    return choices


def _renamed(
    subject: ModelClass, parts: Structure, keys: Sequence[str]
) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """Yield keys of an activation with the usual name of their value, where a class uses other names.

    OpenAI's GPT calls ``gelu`` the activation that is ``gelu_new`` elsewhere.
    """
    table = importlib.import_module("transformers").activations.ACT2FN
    kinds = set(parts.classes.values())
    for key in keys:
        usual = subject.usual(key)
        if isinstance(usual, str) and usual in table and type(table[usual]).__name__ not in kinds:
            others = (name for name in ACTIVATION_NAMES if name in table and type(table[name]).__name__ in kinds)
            yield from ((key, {key: {usual: name}}) for name in others)


def _widths(subject: ModelClass, parts: Structure) -> Iterator[KeySource]:
    """Yield sources of the width between the feed-forward matrices: keys that change it alone."""
    child, names = parts.feed_forward
    name = f"{parts.front}{parts.layers}.0.{structure.join(child, names.get('down', ''))}.weight"
    axis = 0 if parts.classes.get(structure.join(child, names.get("down", ""))) == structure.TURNED else 1
    if parts.experts is not None or "down" not in names:
        yield from (KeySource(key=key) for key in WIDTHS if key in subject.read)
        return

    def width(**changes: int | None) -> int:
        try:
            return subject.shapes(subject.keys(**changes))[name][axis]
        except Exception:  # a value that the class refuses changes nothing
            return -1

    hidden, usual = subject.keys()[inner_key(subject, "hidden_size")], width()
    counts = {
        key: value for key, value in {**subject.defaults, **subject.sizes}.items() if isinstance(value, int | None)
    }
    for key in sorted(counts, key=lambda key: key not in WIDTHS):
        if isinstance(counts[key], bool) or key == inner_key(subject, "hidden_size"):
            continue
        if width(**{key: 24}) == 24 != usual:
            null = width(**{key: None})
            yield KeySource(key=key, widths=null // hidden if null > 0 and null % hidden == 0 and null != 24 else 0)
        elif width(**{key: 3}) == 3 * hidden != usual:
            yield KeySource(key=key, times="hidden_size")
    if usual == 4 * hidden:
        yield KeySource(key="hidden_size", widths=4)


def inner_key(subject: ModelClass, key: str) -> str:
    """Return the name of a key in the files of a class."""
    return str(getattr(subject.config_class, "attribute_map", {}).get(key, key))


def _fused(parts: Structure) -> Choice:
    """Return how queries, keys and values may be in single projection."""
    single: Fields = {"attention.num_kv_heads": _constant(1)}
    if parts.kv_heads == 1:
        return ((single, {"fused": "stacked"}),)
    kinds = ("stacked", "by-head", "by-four") if parts.kv_heads == 4 else ("stacked", "by-group")
    return tuple(({}, {"fused": kind}) for kind in kinds)


def _proposals(choices: list[Choice]) -> Iterator[tuple[dict[str, KeySource], dict[str, Any]]]:
    """Yield fields and arguments of rows, those with the fewest unlikely choices first."""
    open_choices = [number for number, choice in enumerate(choices) if len(choice) > 1]
    for deviations in range(min(MOST_DEVIATIONS, len(open_choices)) + 1):
        for changed in itertools.combinations(open_choices, deviations):
            for picks in itertools.product(*(range(1, len(choices[number])) for number in changed)):
                picked = dict(zip(changed, picks, strict=True))
                fields: dict[str, KeySource | None] = {}
                row_arguments: dict[str, Any] = {}
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
    for fields, arguments in _proposals(_choices(subject, parts)):
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


def _probes(subject: ModelClass, parts: Structure) -> list[tuple[Any, dict[str, Any], Any]]:
    """Return instance, config file and logits: of the usual config, as whole and short files, and with others."""
    changes: list[dict[str, Any]] = [{}]
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
        probes += [(model, file, logits) for file in (proof.as_file(subject.config(keys)), keys)]
    return probes


def _is_equal(description: Description, model: object, file: dict[str, Any], logits: torch.Tensor) -> bool:
    reader = FamilyReader(description, layout_of(description))
    try:
        pair = proof.pair_with(model, reader, proof.read(reader, file), file)
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
    fields["feed_forward.gated"] = _constant("up" not in parts.feed_forward[1] or "gate" in parts.feed_forward[1])
    if "W_gate" in parts.attention[1]:
        fields["attention.gate"] = _constant(True)
        if parts.gates == HEADS:
            fields["attention.gate_scope"] = _constant("head")
    if parts.last_bias:
        fields["attention.last_out_bias"] = _constant(True)
    if parts.experts is not None:
        fields |= mixtures.fields(subject, parts.experts)
        if parts.may_lack_shared:
            fields["experts.may_lack_shared"] = _constant(True)
        if not parts.feed_forward[1]:
            fields.pop("feed_forward.bias", None)
    fields |= parts.outside.fields
    tied = subject.shapes(subject.keys(tie_word_embeddings=True))
    may_tie = f"{parts.outside.head}.weight" not in tied
    fields["model.tie"] = KeySource(key="tie_word_embeddings") if may_tie else _constant(False)
    if parts.is_latent:
        fields |= latent.fields(subject)
    elif "head_dim" in subject.sizes and parts.head_dim == subject.sizes["head_dim"]:
        fields["attention.head_dim"] = KeySource(key="head_dim")
    if HEADS_OF_LAYERS in defaults:
        fields["layers.heads"] = KeySource(key=HEADS_OF_LAYERS)
    key = next((key for key in ("num_key_value_heads", "num_kv_heads") if key in subject.sizes), None)
    if key is not None and not parts.is_latent:
        fields["attention.num_kv_heads"] = KeySource(key=key)
    names = getattr(subject.config_class, "attribute_map", {})
    pattern, first, last = _pattern(subject)
    older = {} if parts.experts is None else mixtures.older_keys(subject)
    step = {mixtures.STEP: (older.pop(mixtures.STEP), None)} if mixtures.STEP in older else {}
    return Description(
        subject.model_type,
        subject.model_class.__name__,
        f"hf-{multimodal.decoder_type(subject.model_type).replace('_', '-')}",
        aliases={outer: (inner,) for outer, inner in names.items() if outer not in subject.decoder_keys},
        keys={**subject.decoder_keys, **({"sliding_window": "window_size"} if _has_runs(subject) else {})},
        fields=fields,
        fixed={**parts.fixed, **step},
        pattern=pattern,
        first=first,
        last=last,
        defaults=_with_older_names({key: value for key, value in defaults.items() if key not in LISTS} | older),
    )


def _with_older_names(defaults: dict[str, Any]) -> dict[str, Any]:
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
    subject: ModelClass, parts: Structure, description: Description, probe: tuple[object, dict[str, Any], object]
) -> str:
    """Return a message that names the first submodule of the first block at which a proposal differs."""
    model, file, _ = probe
    reader = FamilyReader(description, layout_of(description))
    try:
        pair = proof.pair_with(model, reader, proof.read(reader, file), file)
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
