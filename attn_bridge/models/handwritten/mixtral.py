"""Mixtral (arXiv 2401.04088): its tensors, and experts whose router takes the softmax over the chosen ones."""

from __future__ import annotations

from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig
from ...specs.decoder_model import DecoderConfig
from ...weights.rows import Row
from ..reading.decoders import (
    WrittenKeys,
    feed_forward_of,
    read_feed_forward,
    write_feed_forward,
)
from ..reading.model_config import ConfigFile
from ..rows.attention import SPLIT
from ..rows.decoder import APART, FINAL_NORM, FUSED, LAYER, OURS, TOGETHER, attention, decoder, fused_experts, norms


def read_experts(config: ConfigFile) -> MixtureOfExpertsConfig:
    """Return the experts of Mixtral, whose router takes the softmax over the chosen ones."""
    return MixtureOfExpertsConfig(
        read_feed_forward(config), config.integer("num_local_experts"), config.integer("num_experts_per_tok")
    )


def write_experts(config: DecoderConfig) -> WrittenKeys:
    """Return the keys that `read_experts` reads."""
    experts = feed_forward_of(config, MixtureOfExpertsConfig)
    return {
        **write_feed_forward(experts.expert),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }


def experts_rows() -> list[Row]:
    """Return rows of experts and router: as files have them, or as `transformers` 5 has them in memory."""
    apart, fused = "block_sparse_moe", "mlp"
    expert = f"{OURS}ff.experts.{{j}}."
    router = (f"{OURS}ff.router.weight",)
    return [
        *(
            Row(f"{LAYER}{apart}.experts.{{j}}.{theirs}.weight", (f"{expert}{ours}.weight",), branch=APART)
            for theirs, ours in (("w1", "fc1"), ("w3", "fc2"), ("w2", "fc3"))
        ),
        Row(f"{LAYER}{apart}.gate.weight", router, branch=APART),
        *fused_experts(),
        Row(f"{LAYER}{fused}.gate.weight", router, branch=TOGETHER),
    ]


LAYOUT = decoder(
    "hf-mixtral",
    "transformers Mixtral",
    [
        *attention(SPLIT),
        *experts_rows(),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    settings=FUSED,
    defaults={"fused": 0},
    model_types=("mixtral",),
)
