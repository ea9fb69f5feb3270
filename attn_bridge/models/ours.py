"""Our torch names, and the Flax twins' names of the same tensors. Every other layout is defined in terms of these."""

from __future__ import annotations

from ..specs.blocks.feed_forward import XIELU
from ..weights.rows import Row

OWN = "attn-bridge-"
"""Prefix of the model's name in the ``model_type`` of our config.json."""

MATRIX = "o i -> i o"
CONVOLUTION = "o i k -> k i o"

ATTENTION = [f"{{path}}{name}.{leaf}" for name in ("W_query", "W_key", "W_value") for leaf in ("weight", "bias")]
OUT = ["{path}out_proj.weight", "{path}out_proj.bias"]
BARE = ["{path}W_query", "{path}W_key", "{path}W_value"]
"""Matrices of `SelfAttention_v1`, which are [in, out] in both twins."""

LINEAR = [
    f"{{path}}{name}.{leaf}"
    for name in (
        *("ff.layers.0", "ff.layers.2", "ff.fc1", "ff.fc2", "ff.fc3", "out_head", "head_linear", "emb_linear"),
        *("layer_linear", "layer_gate", "layer_proj", "dense.fc1", "dense.fc2", "dense.fc3"),
        *("laurel_down", "laurel_up", "stream_in.{i}", "stream_out.{i}"),
        *(f"altup.{one}" for one in ("correction", "prediction", "stream_router")),
        *(f"ff.{one}.fc{number}" for one in ("experts.{j}", "shared") for number in (1, 2, 3)),
        *("ff.router", "ff.shared_gate"),
    )
    for leaf in ("weight", "bias")
]
CONVOLUTIONS = [
    "{path}conv1d.weight",
    *(f"{{path}}encoder.conv{number}.{leaf}" for number in (1, 2) for leaf in ("weight", "bias")),
]
"""Names of the convolutions of a gated delta net, and of those in front of Whisper's encoder."""
EMBEDDINGS = ["{path}tok_emb.weight", "{path}pos_emb.weight", "{path}type_emb.weight", "{path}layer_emb.weight"]
NORMS = ["{path}scale", "{path}shift"]

MODERN = [
    *(
        f"{{path}}{name}.{leaf}"
        for name in ("W_gate", "W_head_gate", "W_query_latent", "W_latent", "W_key_rope", "W_beta", "W_alpha", "W_step")
        for leaf in ("weight", "bias")
    ),
    *(f"{{path}}{name}.weight" for name in ("W_index_query", "W_index_key", "W_index_weights")),
    *(
        f"{{path}}{name}.weight"
        for name in ("W_decay_down", "W_decay_up", "W_gate_down", "W_gate_up", "W_step_down", "W_step_up")
    ),
    *(f"{{path}}{name}" for name in ("sinks", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "dt_bias", "A_log")),
    *("{path}D", "{path}conv1d.bias"),
    "{path}relative_bias",
]
"""Names of projections that attention after chapter 3 adds."""

NUMBERS = [f"{{path}}ff.layers.1.{name}" for name in XIELU]
"""Numbers of an activation."""

BARE_VECTORS = ["{path}ff.router.correction_bias", "{path}logits_bias", "{path}out_bias"]
BARE_VECTORS += ["{path}ff.router.expert_scale", "{path}scalar", "{path}altup.corrected_scale"]

NAMES = [*ATTENTION, *OUT, *BARE, *LINEAR, *CONVOLUTIONS, *EMBEDDINGS, *NORMS, *MODERN, *NUMBERS, *BARE_VECTORS]
"""Every name of ours, below any prefix."""


def torch_rows(*left_out: list[str]) -> list[Row]:
    """Return the rows of our torch names, without those left out."""
    skipped = {name for names in left_out for name in names}
    return [Row(name, (name,)) for name in NAMES if name not in skipped]


def flax_rows(*left_out: list[str]) -> list[Row]:
    """Return the rows of our Flax names, without those left out."""
    skipped = {name for names in left_out for name in names}
    return [_flax_row(name) for name in NAMES if name not in skipped]


def _flax_row(name: str) -> Row:
    stem, _, leaf = name.rpartition(".")
    if name in EMBEDDINGS:
        return Row(f"{stem}.embedding", (name,))
    if leaf == "weight":
        return Row(f"{stem}.kernel", (name,), CONVOLUTION if name in CONVOLUTIONS else MATRIX)
    return Row(name, (name,))
