"""MaxText's decoders: Llama, Mistral, Mixtral, Qwen 2 and 3, Qwen3-MoE, Gemma 2 and 3.

MaxText is on no package index. This is read off AI-Hypercomputer/maxtext, commit e591f30 of August 2026: in
``checkpoint_conversion``, ``utils/param_mapping.py`` (names, axes, changes of numbers), ``to_maxtext.py`` (stacks), and
of its ``standalone_scripts`` ``llama_or_mistral_ckpt.py`` and ``convert_gemma2_chkpt.py``; ``layers/attentions.py``
(where scores are scaled, which rotary positions) and ``models/gemma3.py``.

- Layers are numbered (``layers_0``), or stacked (``scan=1``) along the second axis (``param_scan_axis``). Gemma 2
  has pairs of a local and a global layer; Gemma 3 stacks six kinds of layers; remaining layers are separate.
- Queries include the scale of the scores if the model applies none: Llama, Mistral, Mixtral, Gemma 2. Its source is
  ``query_pre_attn_scalar`` or the width of a head; for Gemma 2 27B, ``param_mapping.py`` takes the latter, unlike the
  model and ``convert_gemma2_chkpt.py``.
- Rotary positions pair halves, as in `transformers`, except for Llama 3.1 and later, where they pair neighbours.
- Gemma's norms include the 1 that is added elsewhere, and its embeddings their factor; that of Gemma 3 is in bfloat16.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes

from ...weights.placements import Change, LayoutError, SettingError, Shape
from ...weights.rows import Row
from ...weights.toml import packaged
from ...whole_files import JsonObject
from ..layout import Settings
from ..layout.chosen import ChosenLayout, Form
from ..parts import towers
from ..rows.common import TIE
from ..rows.files import row_of

PATTERN = 6
"""How many kinds of layers Gemma 3 stacks: five with a window, and one without."""

_EXPERTS = {"mixtral": "MoeBlock_0", "qwen-moe": "moe_block"}
_KINDS = ("llama", "qwen", "mixtral", "qwen-moe", "gemma2", "gemma3")
_OWN_SCALE = ("qwen", "qwen-moe", "gemma3")
"""Kinds whose model scales the scores itself."""

_ROWS = packaged("attn_bridge.models.tables", "maxtext.toml")


def _table(form: Form) -> list[Row]:
    """Return the rows of a model; see `_form`."""
    return [
        *(_row(form, entry) for entry in _entries(form, "ends")),
        *(
            _row(form, _placed(form, entry, f"{{prefix}}decoder.{place}.", suffix, layers))
            for place, suffix, layers in _places(form)
            for entry in _entries(form, "layer")
        ),
    ]


def _entries(form: Form, part: str) -> Iterator[JsonObject]:
    """Yield the tables of the rows that models of a form have."""
    for entry in _ROWS[part]:
        if all(form[key] in values for key, values in entry.get("when", {}).items()):
            yield {key: value for key, value in entry.items() if key != "when"}


def _placed(form: Form, entry: JsonObject, front: str, suffix: str, layers: list[int] | None) -> JsonObject:
    """Return the table of a row of a layer, or of a stack of them, whose second axis counts the layers."""
    (ours,), stacked = entry["ours"], {}
    if form["scan"] and "remainder" not in front:
        left, _, right = entry["pattern"].partition(" -> ")
        first, *others = re.findall(r"\([^()]*\)|\w+", right)
        stacked = {"part": "layer", "pattern": f"{left} -> {' '.join((first, 'layer', *others))}"}
    names = [ours] if layers is None else [ours.replace("{i}", str(layer)) for layer in layers]
    return {**entry, **stacked, "theirs": front + entry["theirs"].replace("{suffix}", suffix), "ours": names}


def _row(form: Form, entry: JsonObject) -> Row:
    """Return the row of a table, with the numbers that a form gives its change and its sizes."""
    sizes = entry.get("sizes", {})
    sizes = {axis: form["head_dim"] // 2 if size == "head_half" else size for axis, size in sizes.items()}
    change, is_gemma = None, form["kind"] in ("gemma2", "gemma3")
    match entry.pop("change", ""):
        case "plus" if is_gemma:
            change = Change(plus=1.0)
        case "scale" if is_gemma and form["width"]:
            root = form["width"] ** 0.5
            change = Change(times=float(ml_dtypes.bfloat16(root)) if form["kind"] == "gemma3" else root)
        case "query" if form["query_pre_attn_scalar"] and form["kind"] not in _OWN_SCALE:
            change = Change(times=form["query_pre_attn_scalar"] ** -0.5)
    return dataclasses.replace(row_of({**entry, "sizes": sizes}), change=change)


def _places(form: Form) -> Iterator[tuple[str, str, list[int] | None]]:
    """Yield the path of layers, the suffix of their modules' names, and the layers: one, a stack, or any."""
    count: int | None = form["layers"]
    if form["kind"] == "gemma2":
        for kind, phase in (("_local", 0), ("_global", 1)):
            if form["scan"]:
                yield "layers", kind, list(range(phase, count or 2, 2))
            elif count is None:
                yield "layers_{i}", kind, None
            else:
                yield from ((f"layers_{pair}", kind, [2 * pair + phase]) for pair in range(count // 2))
    elif not form["scan"]:
        yield "layers_{i}", "", None
    elif form["kind"] == "gemma3":
        full = (count or 2 * PATTERN - 1) // PATTERN * PATTERN
        yield from ((f"layers.layers_{one}", "", list(range(one, full, PATTERN))) for one in range(min(PATTERN, full)))
        rest = range((count or 2 * PATTERN - 1) - full)
        yield from ((f"layers_remainder.layers_{one}", "", [full + one]) for one in rest)
    else:
        yield "layers", "", list(range(count or 1))


_LAYER = re.compile(r"(?:^|\.)decoder\.layers_([0-9]{1,9})\.")
_QUERY = re.compile(r"(?:^|\.)self_attention(?:_local)?\.query\.kernel$")


def _of_theirs(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    """Return the form of a model of MaxText."""
    flags = {
        "gemma2": any("self_attention_local." in name for name in shapes),
        "gemma3": any(".pre_ffw_norm." in name for name in shapes),
        **{kind: any(f".{block}." in name for name in shapes) for kind, block in _EXPERTS.items()},
        "qwen": any(".query_norm." in name or ".query.bias" in name for name in shapes),
    }
    kind = next((one for one, is_there in flags.items() if is_there), "llama")
    scan = int(any(".layers." in name for name in shapes) or any("layers_remainder." in name for name in shapes))
    queries = {name: shape for name, shape in shapes.items() if _QUERY.search(name)}
    head_dim = next((int(shape[-1]) for shape in queries.values() if shape), settings.get("head_dim", 0))
    layers = None
    if scan:
        layers = sum(shape[1] if ".layers." in name else 1 for name, shape in queries.items() if len(shape) > 2)
        layers *= 2 if kind == "gemma2" else 1
    elif kind == "gemma2":
        numbers = [int(hit[1]) for name in shapes for hit in [_LAYER.search(name)] if hit]
        layers = 2 * (1 + max(numbers, default=0))
    if layers is not None and not 0 < layers <= _MOST:
        raise LayoutError(f"a model of {layers} layers is none that MaxText stacks, from 1 to {_MOST}")
    table = next((name for name, shape in shapes.items() if name.endswith("token_embedder.embedding") and shape), "")
    width = int(shapes[table][-1]) if table else 0
    if width:
        _check_axis(queries, {table: shapes[table]}, scan)
    return _form(kind, scan, layers, head_dim, width, settings)


def _check_axis(queries: Mapping[str, Shape], tables: Mapping[str, Shape], scan: int) -> None:
    """Refuse queries with another axis order, or layers stacked along another axis: other sizes might fit by chance."""
    table, width = next((name, shape[-1]) for name, shape in tables.items())
    for name, shape in queries.items():
        if shape and shape[0] != width:
            counted = ", and its second must count the layers (param_scan_axis=1)" if scan else ""
            raise LayoutError(
                f"{name} {tuple(shape)}: its first axis must be as wide as the embeddings ({width}){counted}; "
                f"{table} is {tuple(tables[table])}"
            )


def _of_ours(shapes: Mapping[str, Shape], settings: Settings) -> Form:
    """Return the form for a model of ours."""
    blocks = {name.partition(".")[2].partition(".")[2] for name in shapes if name.startswith("trf_blocks.")}
    has_norms = "att.q_norm.scale" in blocks
    if "post_norm1.scale" in blocks:
        kind = "gemma3" if has_norms else "gemma2"
    elif any(name.startswith("ff.experts.") for name in blocks):
        kind = "qwen-moe" if has_norms else "mixtral"
    else:
        kind = "qwen" if has_norms or "att.W_query.bias" in blocks else "llama"
    numbers = [int(number) for name in shapes for number in re.findall(r"^trf_blocks\.([0-9]{1,9})\.", name)]
    layers = 1 + max(numbers, default=0)
    if layers > _MOST:
        raise LayoutError(f"trf_blocks.{layers - 1}: a model for MaxText has at most {_MOST} layers")
    if kind == "gemma2" and layers % 2:
        raise LayoutError(f"MaxText holds Gemma 2 as pairs of layers, which {layers} layers are not")
    norm = next((shape for name, shape in shapes.items() if name.endswith("att.q_norm.scale")), None)
    head_dim = settings.get("head_dim") or (norm[0] if norm else 0)
    width = next((int(shape[-1]) for name, shape in shapes.items() if name == "tok_emb.weight" and shape), 0)
    return _form(kind, int(settings["scan"]), layers, head_dim, width, settings)


_MOST = 4096
"""Most layers of a model, so that a name or a shape can't ask for a table of any size."""


def _form(kind: str, scan: int, layers: int | None, head_dim: int, width: int, settings: Settings) -> Form:
    """Return the form that selects a table.

    The scale of the scores is the inverse root of ``query_pre_attn_scalar``; ``width`` is that of the embeddings, and
    ``layers`` is None if names count them.
    """
    interleaved = settings.get("interleaved", 0 if kind != "llama" else None)
    if kind in ("llama", "mixtral") and not head_dim:
        raise SettingError("how MaxText holds queries depends on the width of a head: --set head_dim=N")
    if interleaved is None:
        raise SettingError(
            "names and shapes don't tell which channels rotary positions turn in MaxText: --set interleaved=1 for "
            "Llama 3.1 and later (neighbours), 0 for others (halves)"
        )
    if interleaved and (kind != "llama" or head_dim % 2):
        raise LayoutError("interleaved=1 is for Llama 3.1 and later alone, whose heads have an even width")
    scalar = settings.get("query_pre_attn_scalar") if kind == "gemma2" else head_dim
    if kind == "gemma2" and not scalar:
        raise SettingError(
            "MaxText holds Gemma 2's queries scaled: --set query_pre_attn_scalar=N, as config.json has it"
        )
    return {
        "kind": kind,
        "scan": scan,
        "layers": layers,
        "head_dim": head_dim,
        "width": width,
        "query_pre_attn_scalar": scalar,
        "interleaved": interleaved,
    }


def _usual(kind: str, scan: int, layers: int | None) -> Form:
    return _form(kind, scan, layers, 2, 1, {"interleaved": 0, "query_pre_attn_scalar": 1})


class _MaxText(ChosenLayout):
    """The layout, which reads more of a config.json than sizes."""

    def read_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a config.json gives; of a model with text and images, those of the text."""
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else config
        settings = super().read_settings(config)
        kind, heads = config.get("model_type"), config.get("num_attention_heads")
        if "head_dim" not in settings and type(heads) is int and type(config.get("hidden_size")) is int and heads > 0:
            settings["head_dim"] = config["hidden_size"] // heads
        if isinstance(kind, str) and not kind.startswith("attn-bridge-"):
            if kind not in _MODEL_TYPES:
                raise LayoutError(f"config.json says {kind[:40]!r}; maxtext is for {', '.join(_MODEL_TYPES)}")
            rotary = config.get("rope_scaling") or config.get("rope_parameters") or {}
            names = [rotary.get(key) for key in ("rope_type", "type")] if isinstance(rotary, Mapping) else []
            settings.setdefault("interleaved", int("llama3" in names))
        return settings


_MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3_text")
_FUSED = "projections that MaxText fused (fused_qkv, fused_mlp); save the parameters without"
_FRONTS = ("params.params.", "params.", "")

LAYOUT = _MaxText(
    "maxtext",
    "MaxText: Llama, Mistral, Mixtral, Qwen 2 and 3, Qwen3-MoE, Gemma 2 and 3",
    _table,
    forms=[
        _usual("qwen", 0, None),
        *(
            _usual(kind, scan, 2 * PATTERN - 1 if scan and kind == "gemma3" else None)
            for kind in _KINDS
            for scan in (0, 1)
        ),
    ],
    of_theirs=_of_theirs,
    of_ours=_of_ours,
    kept=("scan", "interleaved", "query_pre_attn_scalar"),
    prefixes=_FRONTS,
    settings={
        **TIE,
        "head_dim": ("head_dim",),
        "query_pre_attn_scalar": ("query_pre_attn_scalar",),
        "scan": (),
        "interleaved": (),
    },
    defaults={"tie": 0, "scan": 0},
    whole=True,
    parts=towers("vision_encoder.", fronts=_FRONTS),
    refused={
        "opt_state.{rest}": "an optimizer's state; save the parameters alone (generate_param_only_checkpoint.py)",
        "{rest}.qkv_proj.kernel": _FUSED,
        "{rest}.mlp.wi.kernel": _FUSED,
    },
)
