"""BART and Whisper: an encoder, and a decoder whose layers attend to themselves and to what the encoder made."""

from __future__ import annotations

from ..specs.cross_attention import CrossAttentionConfig
from ..weights.rows import Row
from .family import AttentionLayer, Family
from .layout import Layout
from .reading.model_config import ModelConfig
from .rows.attention import ENCODER_DECODER, below
from .rows.common import TIE, layer_norm, with_bias


def read_cross_attention(config: ModelConfig, layer: int) -> AttentionLayer:
    """Return the cross attention of a layer of the decoder; all has biases, but Whisper's keys."""
    spec = CrossAttentionConfig(
        d_in=config.integer("d_model"),
        num_heads=config.integer("decoder_attention_heads"),
        qkv_bias=True,
        key_bias=config.model_type != "whisper",
        out_bias=True,
        dropout=config.number_or_none("attention_dropout") or 0.0,
    )
    prefix = f"model.decoder.layers.{layer}.encoder_attn."
    return AttentionLayer("CrossAttention", spec, layer, {"transformers": ENCODER_DECODER}, prefix)


FAMILIES = (
    Family(
        ("bart",),
        read_cross_attention,
        {"d_model": 1024, "decoder_attention_heads": 16, "decoder_layers": 12},
        depth="decoder_layers",
    ),
    Family(
        ("whisper",),
        read_cross_attention,
        {"d_model": 384, "decoder_attention_heads": 6, "decoder_layers": 4},
        depth="decoder_layers",
    ),
)


SIDES = ("encoder", "decoder")


def _stack(side: str, outer_norm: str, required: tuple[str, ...]) -> list[Row]:
    """Return the rows of one side, with its norm that comes before all layers or after them."""
    layer, ours = f"{{prefix}}{side}.layers.{{i}}.", f"{side}.trf_blocks.{{i}}."
    cross = [
        *below(ENCODER_DECODER, f"{layer}encoder_attn.", f"{ours}cross_att.", required=required),
        *layer_norm(f"{layer}encoder_attn_layer_norm", f"{ours}norm2"),
    ]
    has_cross = side == "decoder"
    ours_outer = "emb_norm" if "embedding" in outer_norm else "final_norm"
    return [
        Row(f"{{prefix}}{side}.embed_positions.weight", (f"{side}.pos_emb.weight",)),
        *below(ENCODER_DECODER, f"{layer}self_attn.", f"{ours}att.", required=required),
        *layer_norm(f"{layer}self_attn_layer_norm", f"{ours}norm1"),
        *(cross if has_cross else ()),
        *with_bias(f"{layer}fc1", f"{ours}ff.layers.0"),
        *with_bias(f"{layer}fc2", f"{ours}ff.layers.2"),
        *layer_norm(f"{layer}final_layer_norm", f"{ours}norm{3 if has_cross else 2}"),
        *layer_norm(f"{{prefix}}{side}.{outer_norm}", f"{side}.{ours_outer}"),
    ]


LAYOUTS = [
    Layout(
        "hf-bart",
        "transformers BART",
        [
            Row(
                "{prefix}shared.weight",
                ("tok_emb.weight",),
                tied=("encoder.tok_emb.weight", "decoder.tok_emb.weight", "out_head.weight"),
            ),
            *(Row(f"{{prefix}}{side}.embed_tokens.weight", (f"{side}.tok_emb.weight",), optional=True)
              for side in SIDES),
            Row("lm_head.weight", ("out_head.weight",), optional=True),
            Row("final_logits_bias", ("logits_bias",), optional=True),
            *(row for side in SIDES for row in _stack(side, "layernorm_embedding", ("k_proj",))),
        ],
        prefixes=("model.", ""),
        settings=TIE,
        defaults={"tie": 1},
        whole=True,
        model_types=("bart",),
    ),
    Layout(
        "hf-whisper",
        "transformers Whisper",
        [
            Row("{prefix}decoder.embed_tokens.weight", ("decoder.tok_emb.weight",), tied=("out_head.weight",)),
            Row("proj_out.weight", ("out_head.weight",), optional=True),
            *(row for number in (1, 2)
              for row in with_bias(f"{{prefix}}encoder.conv{number}", f"encoder.conv{number}")),
            *(row for side in SIDES for row in _stack(side, "layer_norm", ())),
        ],
        prefixes=("model.", ""),
        settings=TIE,
        defaults={"tie": 1},
        whole=True,
        model_types=("whisper",),
    ),
]  # fmt: skip
