"""Wrong descriptions of families: each differs from a right one in a way that people get wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from attn_bridge.models.derived import latent
from attn_bridge.models.derived.description import Description, KeySource
from attn_bridge.models.rows.decoder import OURS

OTHER_SLOTS = {"norm1": "post_norm1", "norm2": "post_norm2", "post_norm1": "norm1", "post_norm2": "norm2"}

OTHER_SUMS = {"pre": "parallel_two", "parallel_two": "pre", "residual": "post"}
"""Positions of norms -> others with the same norms, whose inputs are other sums."""


def plants(description: Description) -> Iterator[tuple[str, Description]]:
    """Yield the name of a fault and the description with it; `description` has rows of its own."""
    fields = description.fields

    def with_field(name: str, source: KeySource | None) -> Description:
        rest = {field: value for field, value in fields.items() if field != name}
        return dataclasses.replace(description, fields=rest if source is None else {**rest, name: source})

    def constant(name: str, value) -> Description:
        return with_field(name, KeySource(value=value))

    if "norm.affine" in fields:
        yield "mean taken off", constant("norm.kind", "layer" if fields["norm.kind"].value == "rms" else "rms")
    elif fields["norm.kind"].value == "rms":
        offset = fields.get("norm.unit_offset", KeySource(value=False)).value
        yield "1 + w", constant("norm.unit_offset", not offset)
        mean = with_field("norm.unit_offset", None).fields
        yield (
            "mean taken off",
            dataclasses.replace(
                description, fields={**mean, "norm.kind": KeySource(value="layer"), "norm.bias": KeySource(value=False)}
            ),
        )
    elif fields["norm.bias"].value:
        offset = fields.get("norm.unit_offset", KeySource(value=False)).value
        yield "1 + w", constant("norm.unit_offset", not offset)
    else:
        rest = {name: source for name, source in fields.items() if name != "norm.bias"}
        yield (
            "mean not taken off",
            dataclasses.replace(description, fields={**rest, "norm.kind": KeySource(value="rms")}),
        )
    yield "eps not read", constant("last_norm.eps" if "last_norm.eps" in fields else "norm.eps", 1e-6)
    if "qk_norm.kind" in fields:
        rows = tuple(row for row in description.rows if not row.ours[0].endswith(("q_norm.shift", "k_norm.shift")))
        yield "mean of q and k not taken off", dataclasses.replace(with_field("qk_norm.kind", None), rows=rows)
    if "qk_norm.affine" in fields:
        rest = {name: source for name, source in fields.items() if not name.startswith("qk_norm.")}
        yield "queries and keys not normed", dataclasses.replace(description, fields=rest)
        yield "norms of q and k elsewhere", with_field("qk_norm.rotated", None)
    elif "qk_norm.scope" in fields:
        from_one = fields.get("qk_norm.unit_offset", KeySource(value=False)).value
        yield "1 + w of q and k", constant("qk_norm.unit_offset", not from_one)
        if fields["qk_norm.scope"].value == "head":
            rotated = fields.get("qk_norm.rotated", KeySource(value=False)).value
            yield "norms of q and k elsewhere", constant("qk_norm.rotated", not rotated)
    norms = fields.get("block.norms", KeySource(value="pre")).value
    if norms in ("pre", "post"):
        rows = tuple(
            dataclasses.replace(row, ours=tuple(_moved(name) for name in row.ours)) for row in description.rows
        )
        moved = constant("block.norms", "post" if norms == "pre" else "pre")
        yield "norms elsewhere", dataclasses.replace(moved, rows=rows)
    if norms in OTHER_SUMS:
        yield "sums elsewhere", constant("block.norms", OTHER_SUMS[norms])
    if fields.get("model.position_offset", KeySource(value=False)).key:
        rest = {name: source for name, source in fields.items() if name != "model.position_offset"}
        table = {"model.num_positions": KeySource(key=fields["model.num_positions"].key)}
        yield "positions not offset", dataclasses.replace(description, fields=rest | table)
    if "model.sinusoids" in fields:
        other = {"transformer": "tensor2tensor", "tensor2tensor": "transformer"}
        yield "other waves", constant("model.sinusoids", other[fields["model.sinusoids"].value])
        yield "sines from another position", constant("model.position_offset", 1)
    if "last_norm.eps" in fields:
        yield "eps of the last norm everywhere", with_field("norm.eps", fields["last_norm.eps"])
    if "model.norm_tokens" in fields:
        yield "positions in the norm", with_field("model.norm_tokens", None)
    if "model.head_activation" in fields:
        yield "activation of the head", constant("model.head_activation", "quick_gelu")
    if "attention.last_out_bias" in fields:
        yield "bias in no layer", with_field("attention.last_out_bias", None)
        everywhere = with_field("attention.last_out_bias", None).fields | {"attention.out_bias": KeySource(value=True)}
        yield "bias in all layers", dataclasses.replace(description, fields=everywhere)
    for name, width in (("model.embedding_width", 36), ("model.head_width", 44)):
        if name in fields:
            yield f"{name} not read", constant(name, width)
    if "position.dim" in fields:
        yield "rotary channels not read", constant("position.dim", 4)
    none = {name: source for name, source in fields.items() if not name.startswith("position.")}
    if "position.kinds" in fields:
        yield "no positions", dataclasses.replace(description, fields=none)
    if "position.alibi" in fields:
        rotary = {"position.kinds": fields["position.kinds"], "position.theta": KeySource(value=10000.0)}
        yield "rotary positions, not ALiBi", dataclasses.replace(description, fields={**none, **rotary})
    elif "position.kinds" in fields:
        pairing = fields.get("position.pairing", KeySource(value="half")).value
        yield "rotary kind", constant("position.pairing", "half" if pairing == "interleaved" else "interleaved")
        if pairing != "interleaved":
            yield "positions turned back", constant("position.pairing", "half" if pairing == "reversed" else "reversed")
        if "position.nested" in fields and "rope_parameters" in description.defaults:
            kinds = description.defaults["rope_parameters"]
            turned = dict(zip(kinds, reversed(kinds.values()), strict=True))
            defaults = {**description.defaults, "rope_parameters": turned}
            yield "rotary kinds exchanged", dataclasses.replace(description, defaults=defaults)
        elif "position.nested" not in fields:
            yield "rotary base not the default", constant("position.theta", 77.0)
        if "position.alpha" in fields:
            yield "base not stretched", with_field("position.alpha", None)
        # The others read no part: they turn a width of their own, that of a latent head, or all.
        if not fields.keys() & {"position.dim", "position.fixed", latent.LATENT_DIM}:
            partial = fields.get("position.partial", KeySource(value=False)).value
            yield "rotary part", constant("position.partial", not partial)
        if len(fields["position.kinds"].value) == 1:
            yield "positions in all layers", constant("position.kinds", ("full_attention", "sliding_attention"))
    if fields["layers.rule"].value != "full":
        yield "no window", constant("layers.rule", "full")
    if fields["layers.rule"].value == "runs":
        yield "window in all layers", constant("layers.rule", "window")
    if fields["layers.rule"].value == "types":
        yield "window in all layers", constant("layers.rule", "window")
        if len(set(description.pattern)) > 1:
            yield "layers counted from 1", dataclasses.replace(description, pattern=_turned(description.pattern))
        if description.last:
            yield "last layer like the others", dataclasses.replace(description, last=())
    if "attention.latent_dim" in fields:
        yield "channels with and without position exchanged", _exchanged(description)
        yield "width of values not read", constant("attention.value_dim", 12)
        yield "no latent of queries", constant("attention.query_dim", 22)
    if "tie_word_embeddings" not in description.fixed:
        yield "tied head", constant("model.tie", True)
    for name in (
        "attention.scale",
        "attention.softcap",
        "attention.clip",
        *(() if "attention.gate_scope" in fields else ("attention.gate",)),
        "model.logit_softcap",
        "model.logit_scale",
    ):
        if name in fields:
            yield f"without {name}", with_field(name, None)
    for name in ("attention.context_norm", "feed_forward.hidden_norm"):
        if name in fields:
            yield f"eps of {name} not read", constant(name, 1e-5)
    if "attention.gate_activation" in fields:
        yield "sigmoid of the gate", with_field("attention.gate_activation", None)
    elif "attention.gate" in fields:
        yield "softplus of the gate", constant("attention.gate_activation", "softplus")
    if "attention.gate_scope" in fields:
        yield "gate per channel", with_field("attention.gate_scope", None)
    if "layers.heads" in fields:
        yield "heads of layers not read", with_field("layers.heads", None)
    if "temperature.rate" in fields:
        plain = {name: source for name, source in fields.items() if not name.startswith("temperature.")}
        yield "queries do not grow", dataclasses.replace(description, fields=plain)
        yield "positions of the growth from 1", constant("temperature.offset", 1)
    if "model.scale_switch" in fields:
        yield "scale of embeddings not switched", with_field("model.scale_switch", None)
    for name in ("model.embedding_scale", "block.residual_scale"):
        if name in fields:
            yield f"without {name}", with_field(name, None)
    for name, source in fields.items():
        if source.per:
            yield f"{name} not divided", with_field(name, dataclasses.replace(source, per="", per_power=1.0))
        if source.per_power != 1.0:
            yield f"{name} without a root", with_field(name, dataclasses.replace(source, per_power=1.0))
        if source.share:
            yield f"null of {source.key} not read", with_field(name, dataclasses.replace(source, share=""))
    if fields.get("model.logit_scale", KeySource(value=0)).key:
        source = fields["model.logit_scale"]
        yield (
            "logits multiplied, not divided",
            with_field("model.logit_scale", dataclasses.replace(source, power=-source.power)),
        )
    if any(source.key in description.renamed for source in fields.values()):
        yield "own names not read", dataclasses.replace(description, renamed={})
    if any("alpha_p" in row.theirs for row in description.rows):
        yield "slopes exchanged", _swapped(description, "alpha_p", "alpha_n")
    yield "activation not read", constant("feed_forward.activation", "quick_gelu")
    if any(name.endswith("ff.fc1.weight") for row in description.rows for name in row.ours):
        yield "gate order", _swapped(description, "ff.fc1", "ff.fc2")
    if "experts.num_experts" in fields:
        yield from _of_experts(description)
    yield "keys as values", _swapped(description, "att.W_key", "att.W_value")
    for key in description.fixed:
        rest = {name: values for name, values in description.fixed.items() if name != key}
        yield f"{key} not refused", dataclasses.replace(description, fixed=rest)
    for key in description.same:
        rest = {name: other for name, other in description.same.items() if name != key}
        yield f"other {key} not refused", dataclasses.replace(description, same=rest)
    for usual, key in description.keys.items():
        keys = {**description.keys, usual: key.replace("decoder", "encoder")}
        if keys != description.keys:
            yield f"{usual} of the encoder", dataclasses.replace(description, keys=keys)
    for key in description.required:
        yield f"null of {key} not refused", dataclasses.replace(description, required=())


def _of_experts(description: Description) -> Iterator[tuple[str, Description]]:
    """Yield the faults of routers, experts, and the layers that have them."""
    fields = description.fields

    def with_fields(changes: dict[str, KeySource | None]) -> Description:
        changed = {**fields, **changes}
        return dataclasses.replace(
            description, fields={name: source for name, source in changed.items() if source is not None}
        )

    normalise = fields.get("router.normalise", KeySource(value=True))
    for value in (True, False) if normalise.key else (not normalise.value,):
        yield f"router normalisation {value}", with_fields({"router.normalise": KeySource(value=value)})
    scores = fields.get("router.scores", KeySource(value="softmax")).value
    other = "softmax" if scores == "sigmoid" else "sigmoid"
    yield "router scores", with_fields({"router.scores": KeySource(value=other)})
    if "router.scale" in fields:
        yield "without router.scale", with_fields({"router.scale": None})
    if "groups.score" in fields:
        score = "max" if fields["groups.score"].value == "top2" else "top2"
        yield "best of groups", with_fields({"groups.score": KeySource(value=score)})
        yield "chosen groups not read", with_fields({"groups.chosen": KeySource(value=2)})
        yield "without groups", with_fields({name: None for name in fields if name.startswith("groups.")})
    if "router.correction" in fields:
        yield "without correction", with_fields({"router.correction": None})
        kind = "scores" if "router.corrects" in fields else "logits"
        yield "correction elsewhere", with_fields({"router.corrects": KeySource(value=kind)})
        biased = with_fields({"router.correction": None, "router.corrects": None, "router.bias": KeySource(value=True)})
        rows = tuple(
            dataclasses.replace(row, ours=tuple(name.replace("correction_bias", "bias") for name in row.ours))
            for row in description.rows
        )
        yield "correction in the weights", dataclasses.replace(biased, rows=rows)
    if "experts.last_norm" in fields:
        yield "without the last norm", with_fields({"experts.last_norm": None})
        sandwich = with_fields({"experts.last_norm": None, "block.norms": KeySource(value="sandwich")})
        yield "last norm in all layers", sandwich
    for key in ("first_k_dense_replace",) if "moe_layer_freq" in description.fixed else ():
        yield f"{key} of older files not read", with_fields({"sparse.first": KeySource(value=1)})
    if description.fields["experts.top_k"].key:
        yield "top k not read", with_fields({"experts.top_k": KeySource(value=2)})
    yield "gate order of experts", _swapped(description, "ff.experts.{j}.fc1", "ff.experts.{j}.fc2")
    if any(name.startswith(f"{OURS}ff.shared.") for row in description.rows for name in row.ours):
        yield "shared layers not read", with_fields({"experts.shared": KeySource(value=20)})
        yield "gate order of shared layers", _swapped(description, "ff.shared.fc1", "ff.shared.fc2")
    if "experts.shared_gate" in fields:
        yield "without the gate of shared layers", with_fields({"experts.shared_gate": None})
    for name in ("sparse.first", "sparse.types", "sparse.step", "sparse.dense"):
        if name in fields and fields[name].key:
            usual = KeySource(value=1) if name == "sparse.step" else None
            yield f"{name} not read", with_fields({name: usual})


def _exchanged(description: Description) -> Description:
    fields, names = dict(description.fields), ("attention.nope_dim", "attention.rope_dim")
    fields |= {name: fields[other] for name, other in zip(names, reversed(names), strict=True)}
    return dataclasses.replace(description, fields=fields)


def _moved(name: str) -> str:
    parts = name.split(".")
    return ".".join(OTHER_SLOTS.get(part, part) for part in parts)


def _turned(pattern: tuple[str, ...]) -> tuple[str, ...]:
    return (*pattern[-1:], *pattern[:-1])


def _swapped(description: Description, one: str, other: str) -> Description:
    def swap(name: str) -> str:
        return name.replace(one, "\0").replace(other, one).replace("\0", other)

    rows = tuple(dataclasses.replace(row, ours=tuple(map(swap, row.ours))) for row in description.rows)
    return dataclasses.replace(description, rows=rows)
