"""The layout of a described family: its table of tensors."""

from __future__ import annotations

from ..layout import Layout
from ..reading import multimodal
from ..rows.common import TIE
from ..rows.decoder import APART, FURTHER_LAYER, FURTHER_ROWS, FUSED, QUANTISED, TOGETHER, TOWERS, decoder
from .buffers import rows_of_buffers
from .description import Description, KeySource

_SETTINGS = {
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "num_attention_heads"),
    **{key: (key,) for key in ("kv_lora_rank", "qk_nope_head_dim")},
}
"""Settings that sizes in rows may be named after -> keys of a config.json that hold them."""

_TIED = KeySource(key="tie_word_embeddings")


def layout_of(description: Description) -> Layout:
    """Return the table of a described family's tensors; its rows hold them all where its prefixes are its own."""
    title = f"transformers {description.architecture.removesuffix('ForCausalLM')}"
    rows = (*description.rows, *rows_of_buffers(description.rows), *FURTHER_ROWS)
    sizes = {size for row in description.rows for size in (*row.sizes.values(), *row.split, *row.shares)}
    aliases = description.aliases
    # A file's own name of a key goes before the usual one, which the defaults have.
    settings = {
        name: tuple(
            other
            for usual in keys
            for key in (description.keys.get(usual, usual),)
            for other in (*aliases.get(key, ()), key)
        )
        for name, keys in _SETTINGS.items()
        if name in sizes
    }
    defaults: dict[str, int] = {}
    if {APART, TOGETHER} <= {row.branch for row in description.rows}:
        settings, defaults = {**settings, **FUSED}, {"fused": 0}
    of_experts = [row.theirs for row in description.rows if row.ours and ".experts." in row.ours[0]]
    # A file of a family whose experts have other names has these marks in none of its tensors.
    marks = (".experts.",) if of_experts and all(".experts." in name for name in of_experts) else ()
    # Without a key the head is never tied, whatever a config holds.
    tie = TIE if description.fields.get("model.tie", _TIED).key else {}
    if not description.prefixes:
        return decoder(
            description.layout,
            title,
            rows,
            model_types=(multimodal.decoder_type(description.model_type),),
            settings=settings,
            defaults=defaults,
            marks=marks,
            parts=(FURTHER_LAYER,),
        )
    return Layout(
        description.layout,
        title,
        rows,
        prefixes=description.prefixes,
        settings={**tie, **settings},
        defaults={"tie": 0, **defaults},
        whole=True,
        marks=marks,
        refused=QUANTISED,
        model_types=(multimodal.decoder_type(description.model_type),),
        parts=(*TOWERS, FURTHER_LAYER),
    )
