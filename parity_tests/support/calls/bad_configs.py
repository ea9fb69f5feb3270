"""A valid instance of every config class, and changes that the class must refuse, each with its message.

A field's annotation says which values a class refuses in it: `FIELD_RULES` has them by kind. Rules that a single
annotation does not say are written out in `RULES`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from attn_bridge import specs
from attn_bridge.validation import MAX_INDEX

NORM = specs.RMSNormConfig(6)
FEED_FORWARD = specs.FeedForwardConfig(6, 8)
ROTARY = specs.Rotary()
GROUPED = specs.GroupedQueryAttentionConfig(6, 6, 2, 4, scale=0.4, softcap=1.5, clip=2.0)
CROSS = specs.CrossAttentionConfig(6, 6, 5, 2, 4)
DECODER_BLOCK = specs.DecoderBlockConfig(GROUPED, FEED_FORWARD, NORM)
ENCODER_BLOCK = specs.EncoderDecoderBlockConfig(GROUPED, FEED_FORWARD, NORM)
CROSS_BLOCK = ENCODER_BLOCK.replace(cross_attention=CROSS.replace(d_context=6))
ENCODER = specs.StackConfig(6, (ENCODER_BLOCK,), 7)
DECODER = specs.StackConfig(6, (CROSS_BLOCK,), 7)
CONVOLUTIONS = specs.ConvolutionsConfig(4, 6)
NARROW = specs.RMSNormConfig(5)
UPDATES = specs.AlternatingUpdatesConfig(6, 3)
LAYERS = specs.LayerEmbeddingsConfig(9, 6, 3, 1)
EXPERTS = specs.MixtureOfExpertsConfig(FEED_FORWARD, 6, 2)
WITHOUT_TABLE = GROUPED.replace(position=specs.RelativeBias(8, 9, shared=True))
WITHOUT_KEYS = DECODER_BLOCK.replace(attention=GROUPED.replace(shared=True), keys_of=0)

VALID: dict[str, Any] = {
    type(config).__name__: config
    for config in (
        specs.SelfAttentionV1Config(3, 2),
        specs.SelfAttentionV2Config(3, 2),
        specs.CausalAttentionConfig(3, 2, 6),
        specs.MultiHeadAttentionWrapperConfig(3, 2, 6, num_heads=2),
        specs.MultiHeadAttentionConfig(3, 4, 6, num_heads=2),
        specs.LayerNormConfig(3),
        NORM,
        GROUPED,
        specs.MultiHeadLatentAttentionConfig(6, 2, 5, 3, 4, 2, query_dim=4),
        specs.SparseIndexedAttentionConfig(6, 2, 5, 3, 4, 2, query_dim=4, indexer=specs.Indexer(2, 4, 3)),
        specs.Indexer(2, 4, 3),
        CROSS,
        specs.DifferentialAttentionConfig(6, 4, 2, 4),
        specs.GatedConvolutionConfig(6, 4, 5),
        specs.GatedDeltaNetConfig(6, 2, 4, 3),
        specs.HyperConnectionConfig(6),
        specs.TokenPredictionConfig(DECODER_BLOCK),
        specs.KimiDeltaAttentionConfig(6, 2, 4, 3, 5),
        specs.LightningAttentionConfig(6, 3, 2, 5, (0.5, 0.0, 2.0)),
        specs.LinearAttentionConfig(6, 3, 2, 5),
        specs.MambaConfig(6, 4, 3, 5, 2),
        specs.Mamba2Config(6, 4, 3, 5, 2),
        FEED_FORWARD,
        specs.ClampedGate(),
        specs.ExpertGroups(3, 2),
        specs.Router(),
        EXPERTS,
        specs.QKNorm(),
        specs.Temperature(0.1, 8),
        ROTARY,
        specs.LinearScaling(2.0),
        specs.NTKScaling(2.0, 8),
        specs.Llama3Scaling(8.0, 1.0, 4.0, 16),
        specs.YaRNScaling(4.0, 16, attention_factor=1.1),
        specs.RelativeBias(),
        specs.ProportionalScaling(0.5),
        LAYERS,
        specs.LayerInputConfig(3),
        UPDATES,
        specs.LongRoPEScaling((1.0, 2.0), (3.0, 4.0), 8, attention_factor=1.1),
        DECODER_BLOCK,
        specs.DecoderConfig(9, 6, (DECODER_BLOCK,), NORM, num_positions=7, logit_softcap=3.0),
        CONVOLUTIONS,
        ENCODER_BLOCK,
        ENCODER.replace(vocab_size=9),
        specs.EncoderDecoderConfig(9, ENCODER, DECODER),
        specs.GPTModelConfig(9, 7, 6, 2, 1),
        specs.BertEncoderConfig(9, 6, 1, 2, 8, 7),
    )
}
"""Class -> an instance whose optional fields have values, so that each can be replaced by a bad one."""

for variant in specs.VARIANTS:
    if variant.examples:
        VALID.setdefault(variant.config.__name__, variant.examples[0].config)

UNCHANGED = {"SimpleSelfAttentionConfig", "Alibi", "Scaling", "Config", "Parameter", "Variant"}
"""Classes without fields to refuse, and those that are not configs."""

Change = tuple[Any, type[Exception], str]

FIELD_RULES: dict[str, tuple[Change, ...]] = {
    "int": (
        (0, ValueError, "{name} (0) must be at least 1"),
        (2.0, TypeError, "{name} must be an integer, got float"),
        (True, TypeError, "{name} must be an integer, got bool"),
        (MAX_INDEX + 1, ValueError, f"{{name}} ({MAX_INDEX + 1}) must be at most {MAX_INDEX}"),
    ),
    "bool": ((1, TypeError, "{name} must be a bool, got int"),),
    "rate": (
        (1.0, ValueError, "{name} (1.0) must be in [0, 1)"),
        (-0.1, ValueError, "{name} (-0.1) must be in [0, 1)"),
        ("0.1", TypeError, "{name} must be a number, got str"),
    ),
    "float": (
        (0.0, ValueError, "{name} (0.0) must be positive and finite"),
        (math.inf, ValueError, "{name} (inf) must be positive and finite"),
        (math.nan, ValueError, "{name} (nan) must be positive and finite"),
        (True, TypeError, "{name} must be a number, got bool"),
    ),
}
"""Kind of a field -> values that are refused in it, each with the error and its message."""

RATES = {"dropout", "drop_rate", "hidden_dropout_prob", "attention_probs_dropout_prob"}

OWN_RULES = {
    *((name, "original_context") for name in ("NTKScaling", "Llama3Scaling", "YaRNScaling", "LongRoPEScaling")),
    *(("YaRNScaling", name) for name in ("mscale", "mscale_all_dim", "truncate")),
    *(("ExpertGroups", name) for name in ("number", "chosen")),
    ("Rotary", "base"),
    ("Rotary", "dim"),
    ("RelativeBias", "num_buckets"),
    ("RelativeBias", "max_distance"),
    ("RelativeBias", "bidirectional"),
    ("RelativeBias", "shared"),
    ("DifferentialAttentionConfig", "lambda_init"),
    *(("DecoderConfig", name) for name in ("num_positions", "position_offset", "num_token_types")),
    *(("DecoderConfig", name) for name in ("embedding_width", "head_width")),
    ("StackConfig", "position_offset"),
    ("GroupedQueryAttentionConfig", "value_dim"),
    ("FeedForwardConfig", "dropout"),
    ("FeedForwardConfig", "sparsity"),
    ("AlternatingUpdatesConfig", "active"),
    ("DecoderBlockConfig", "laurel_rank"),
    ("LightningAttentionConfig", "decay_rates"),
    ("Router", "sum_eps"),
    ("DecoderBlockConfig", "keys_of"),
    ("Mamba2Config", "min_step"),
    *(("Temperature", name) for name in ("rate", "interval", "offset")),
    ("QKNorm", "eps"),
    ("QKNorm", "unit_offset"),
    ("QKNorm", "rotated"),
}
"""Fields whose rules are in `RULES`, or that another class checks."""


@dataclasses.dataclass(frozen=True)
class BadConfig:
    """Fields of a valid config, replaced by values that its class refuses."""

    target: str
    changes: Mapping[str, Any]
    error: type[Exception]
    message: str

    @property
    def id(self) -> str:
        """Return a name for the test, such as ``Rotary-dim-3``."""
        words = [f"{name}-{str(value)[:20]}" for name, value in self.changes.items()]
        return "-".join([self.target.removesuffix("Config"), *words])


def _positive(target: str, *names: str) -> Iterator[BadConfig]:
    for name in names:
        for value, error, message in FIELD_RULES["float"]:
            yield BadConfig(target, {name: value}, error, message.format(name=name))


def _kinds(target: str, wanted: Mapping[str, str], error: type[Exception] = TypeError) -> Iterator[BadConfig]:
    """Yield a row per field that takes instances of some classes: ``"x"`` is refused in it."""
    for name, kinds in wanted.items():
        yield BadConfig(target, {name: "x"}, error, f"{name} must be a {kinds}, got str")


def _choices(target: str, name: str, choices: str) -> BadConfig:
    return BadConfig(target, {name: "x"}, ValueError, f"{name} ('x') must be one of {choices}")


def _relations(target: str, *rows: tuple[Mapping[str, Any], str]) -> Iterator[BadConfig]:
    for changes, message in rows:
        yield BadConfig(target, changes, ValueError, message)


NORMS = "RMSNormConfig or LayerNormConfig"
DIVIDED = ({"d_in": 7, "num_heads": 2, "head_dim": None}, "d_in (7) must be a multiple of num_heads (2)")
SHARED = ({"num_kv_heads": 4}, "num_heads (6) must be a multiple of num_kv_heads (4)")

RULES: tuple[BadConfig, ...] = (
    # ---- attention
    *_relations("MultiHeadAttentionConfig", ({"num_heads": 3}, "d_out (4) must be a multiple of num_heads (3)")),
    *_relations(
        "GroupedQueryAttentionConfig",
        DIVIDED,
        SHARED,
        ({"position": specs.Rotary(dim=6)}, "dim of Rotary (6) must be at most head_dim (4)"),
        ({"position": ROTARY, "head_dim": 3}, "dim of Rotary (3) must be even and at least 2"),
        ({"position": specs.Rotary(axes=(1, 2))}, "axes (1, 2) must add up to half the channels that turn (2)"),
        (
            {"position": specs.Rotary(axes=(3, 1))},
            "axes (3, 1) must add up to half the channels that turn (2): they count pairs, not channels",
        ),
        (
            {"shared": True, "value_norm": 1e-3},
            "value_norm (0.001) must be left out of attention with shared keys",
        ),
        (
            {"shared": True, "key_is_value": True},
            "key_is_value (True) must be left out of attention with shared keys",
        ),
        ({"value_dim": 0}, "value_dim (0) must be at least 1"),
        ({"value_dim": 3, "key_is_value": True}, "value_dim (3) must be head_dim (4) where keys are values"),
        ({"value_scale": 0.5, "value_norm": 0.1}, "value_scale (0.5) must be 1.0 with shared or value_norm"),
        ({"value_scale": 0.5, "shared": True}, "value_scale (0.5) must be 1.0 with shared or value_norm"),
        ({"key_is_value": True, "key_bias": True}, "key_bias (True) must be qkv_bias (False) where keys are values"),
    ),
    *_kinds("TokenPredictionConfig", {"block": "DecoderBlockConfig"}),
    *_kinds(
        "GroupedQueryAttentionConfig",
        {
            "position": "Rotary or Alibi or RelativeBias or None",
            "qk_norm": "QKNorm or None",
            "temperature": "Temperature or None",
            "mask": "Mask",
        },
    ),
    BadConfig("GroupedQueryAttentionConfig", {"mask": None}, TypeError, "mask must be a Mask, got NoneType"),
    _choices("GroupedQueryAttentionConfig", "gate_scope", "'channel', 'head'"),
    _choices("GroupedQueryAttentionConfig", "gate_activation", "'sigmoid', 'softplus'"),
    *_relations(
        "GroupedQueryAttentionConfig",
        ({"gate_scope": "head"}, "gate_scope (head) must be channel without gate"),
        ({"gate_activation": "softplus"}, "gate_activation (softplus) must be sigmoid without gate"),
    ),
    _choices("QKNorm", "scope", "'head', 'full'"),
    _choices("QKNorm", "kind", "'rms', 'layer'"),
    *_positive("QKNorm", "eps"),
    BadConfig("QKNorm", {"unit_offset": 1}, TypeError, "unit_offset must be a bool, got int"),
    BadConfig("QKNorm", {"rotated": 1}, TypeError, "rotated must be a bool, got int"),
    *_relations("QKNorm", ({"rotated": True, "scope": "full"}, "rotated (True) needs scope 'head', got 'full'")),
    *_kinds("MultiHeadLatentAttentionConfig", {"position": "Rotary or None", "mask": "Mask"}),
    BadConfig("SparseIndexedAttentionConfig", {"indexer": "x"}, TypeError, "indexer must be an Indexer, got str"),
    *_kinds("SparseIndexedAttentionConfig", {"position": "Rotary or None", "mask": "Mask"}),
    _choices("Indexer", "pairing", "'half', 'interleaved', 'reversed'"),
    *_relations(
        "MultiHeadLatentAttentionConfig",
        ({"position": specs.Rotary(dim=2)}, "dim of Rotary (2) must be rope_dim (4)"),
        ({"rope_dim": 3}, "dim of Rotary (3) must be even and at least 2"),
    ),
    *_relations(
        "SparseIndexedAttentionConfig",
        ({"indexer": specs.Indexer(2, 3, 1)}, "head_dim of Indexer (3) must be at least rope_dim (4)"),
    ),
    *_relations("CrossAttentionConfig", DIVIDED, SHARED),
    *_kinds("DifferentialAttentionConfig", {"position": "Rotary or None", "mask": "Mask"}),
    *_relations(
        "DifferentialAttentionConfig",
        DIVIDED,
        ({"num_kv_heads": 3}, "num_heads (4) must be a multiple of num_kv_heads (3)"),
        ({"num_heads": 6, "num_kv_heads": 3}, "num_kv_heads (3) must be even"),
        ({"position": specs.Rotary(dim=6)}, "dim of Rotary (6) must be at most head_dim (4)"),
        ({"lambda_init": 1.0}, "lambda_init (1.0) must be finite and below 1"),
        ({"lambda_init": -math.inf}, "lambda_init (-inf) must be finite and below 1"),
    ),
    BadConfig("DifferentialAttentionConfig", {"lambda_init": "x"}, TypeError, "lambda_init must be a number, got str"),
    *_relations(
        "GatedDeltaNetConfig",
        DIVIDED,
        ({"num_value_heads": 3}, "num_value_heads (3) must be a multiple of num_heads (2)"),
    ),
    *_relations("KimiDeltaAttentionConfig", ({"d_in": 7, "head_dim": None}, DIVIDED[1])),
    *_relations(
        "LightningAttentionConfig",
        DIVIDED,
        ({"decay_rates": (0.5, 1.0)}, "number of decay_rates (2) must be num_heads (3)"),
        ({"decay_rates": (0.5, -1.0, 1.0)}, "decay_rates[1] (-1.0) must be at least 0 and finite"),
        ({"decay_rates": (0.5, 1.0, math.nan)}, "decay_rates[2] (nan) must be at least 0 and finite"),
    ),
    *(
        BadConfig("LightningAttentionConfig", {"decay_rates": rates}, TypeError, message)
        for rates, message in (
            ((0.5, "1", 1.0), "decay_rates[1] must be a number, got str"),
            (0.5, "decay_rates must be a tuple of numbers, got float"),
        )
    ),
    *_relations("LinearAttentionConfig", DIVIDED),
    *_relations(
        "Mamba2Config",
        ({"head_dim": None, "num_heads": 5, "num_groups": 1}, "2 * d_in (12) must be a multiple of num_heads (5)"),
        ({"num_groups": 3}, "num_heads (4) must be a multiple of num_groups (3)"),
        ({"norm_groups": 5}, "num_heads * head_dim (12) must be a multiple of norm_groups (5)"),
        ({"min_step": -0.5}, "min_step (-0.5) must be at least 0 and finite"),
        ({"min_step": math.nan}, "min_step (nan) must be at least 0 and finite"),
        ({"min_step": 0.5, "max_step": 0.25}, "max_step (0.25) must be at least min_step (0.5)"),
        ({"projection_scales": (1.0, 1.0, -2.0, 1.0, 1.0)}, "projection_scales[2] (-2.0) must be positive and finite"),
    ),
    BadConfig("Mamba2Config", {"projection_scales": 3}, TypeError, "projection_scales must be 5 numbers, got int"),
    _choices("Mamba2Config", "norm_order", "'gate_first', 'norm_first', 'none'"),
    _choices("MambaConfig", "latent_norms", "'none', 'plain', 'scaled'"),
    # ---- positions
    *_relations(
        "Rotary",
        ({"base": 1.0}, "base (1.0) must be above 1 and finite"),
        ({"base": math.inf}, "base (inf) must be above 1 and finite"),
        ({"dim": 3}, "dim of Rotary (3) must be even and at least 2"),
        ({"dim": 0}, "dim of Rotary (0) must be even and at least 2"),
        ({"dim": 2 << 20}, "dim of Rotary (2097152) must be at most 1048576"),
    ),
    *_relations(
        "Rotary",
        ({"axes": (4,)}, "number of axes (1) must be at least 2 and at most 16"),
        ({"axes": (1,) * 17}, "number of axes (17) must be at least 2 and at most 16"),
        ({"axes": (4, -1)}, "axes[1] (-1) must be at least 0 and at most 1048576"),
        ({"axes": (4, 2 << 20)}, "axes[1] (2097152) must be at least 0 and at most 1048576"),
        ({"axes": (1, 3), "layout": "strided"}, "axes (1, 3) must be equal with layout 'strided'"),
        (
            {"axes": (1, 2, 1), "layout": "interleaved"},
            "axes (1, 2, 1) must let rows take turns: pair 4 is beyond the 4 pairs",
        ),
        ({"axes": None, "layout": "axial"}, "layout ('axial') of Rotary needs axes"),
        *(
            (
                {"axes": (2, 2), "layout": layout, "scaling": specs.LinearScaling(2.0)},
                f"scaling must be None with layout {layout!r}",
            )
            for layout in ("axial", "strided")
        ),
    ),
    BadConfig("Rotary", {"axes": 4}, TypeError, "axes must be a tuple of integers, got int"),
    BadConfig("Rotary", {"axes": (4.0, 4)}, TypeError, "axes[0] must be an integer, got float"),
    BadConfig("Rotary", {"axes": (4, True)}, TypeError, "axes[1] must be an integer, got bool"),
    _choices("Rotary", "pairing", "'half', 'interleaved', 'reversed'"),
    _choices("Rotary", "layout", "'sections', 'interleaved', 'axial', 'strided'"),
    BadConfig("Rotary", {"base": "x"}, TypeError, "base must be a number, got str"),
    BadConfig("Rotary", {"dim": True}, TypeError, "dim of Rotary must be an integer, got bool"),
    BadConfig("Rotary", {"dim": 4.0}, TypeError, "dim of Rotary must be an integer, got float"),
    *_kinds("Rotary", {"scaling": "Scaling or None"}),
    *_relations(
        "RelativeBias",
        ({"num_buckets": 1}, "num_buckets of RelativeBias (1) must be at least 2"),
        ({"num_buckets": 3, "bidirectional": True}, "num_buckets of RelativeBias (3) must be at least 4"),
        (
            {"max_distance": 16},
            "max_distance of RelativeBias (16) must be above the 16 distances that do not share a bucket",
        ),
        ({"max_distance": 1 << 31}, "max_distance of RelativeBias (2147483648) must be at most 2147483647"),
    ),
    BadConfig(
        "RelativeBias", {"num_buckets": True}, TypeError, "num_buckets of RelativeBias must be an integer, got bool"
    ),
    BadConfig(
        "RelativeBias", {"max_distance": 9.0}, TypeError, "max_distance of RelativeBias must be an integer, got float"
    ),
    *_relations(
        "Temperature",
        ({"rate": -0.5}, "rate (-0.5) must not be negative, and finite"),
        ({"interval": 0}, "interval of Temperature (0) must be at least 1 and at most 2147483647"),
        ({"offset": -1}, "offset of Temperature (-1) must be at least 0 and at most 2147483647"),
    ),
    BadConfig("Temperature", {"rate": "x"}, TypeError, "rate must be a number, got str"),
    BadConfig("Temperature", {"interval": 2.0}, TypeError, "interval of Temperature must be an integer, got float"),
    BadConfig("Temperature", {"offset": True}, TypeError, "offset of Temperature must be an integer, got bool"),
    BadConfig("RelativeBias", {"bidirectional": 1}, TypeError, "bidirectional of RelativeBias must be a bool, got int"),
    BadConfig("RelativeBias", {"shared": 1}, TypeError, "shared of RelativeBias must be a bool, got int"),
    *(
        row
        for name in ("NTKScaling", "Llama3Scaling", "YaRNScaling", "LongRoPEScaling")
        for row in _positive(name, "original_context")
    ),
    *_relations(
        "Llama3Scaling", ({"high_freq_factor": 0.5}, "high_freq_factor (0.5) must be at least low_freq_factor (1.0)")
    ),
    *_relations(
        "YaRNScaling",
        ({"factor": math.exp(2.0), "mscale": -5.0}, "mscale (-5.0) makes a factor of 0 of the tables"),
        ({"factor": math.exp(2.0), "mscale_all_dim": -5.0}, "mscale_all_dim (-5.0) makes a factor of 0 of the tables"),
    ),
    *_relations("ProportionalScaling", ({"part": 1.5}, "part (1.5) must be at most 1")),
    *_relations(
        "LongRoPEScaling",
        ({"short_factors": (1.0, 0.0)}, "short_factors[1] (0.0) must be positive and finite"),
        ({"long_factors": (math.inf, 1.0)}, "long_factors[0] (inf) must be positive and finite"),
        ({"long_factors": (1.0,)}, "number of long_factors (1) must be that of short_factors (2)"),
    ),
    BadConfig("LongRoPEScaling", {"long_factors": ("x",)}, TypeError, "long_factors[0] must be a number, got str"),
    # ---- feed-forward layers and experts
    _choices("FeedForwardConfig", "activation", "'silu', 'gelu', 'gelu_tanh', 'relu', 'quick_gelu', 'relu2', 'xielu'"),
    *_relations(
        "FeedForwardConfig",
        ({"dropout": 1.0}, "dropout (1.0) must be in [0, 1)"),
        ({"dropout": 0.1}, "dropout (0.1) must be 0 with a gate"),
        (
            {"clamp": specs.ClampedGate(), "gated": False},
            "clamp (ClampedGate(limit=7.0, alpha=1.702)) needs a gate with activation 'silu'",
        ),
        (
            {"clamp": specs.ClampedGate(), "activation": "gelu"},
            "clamp (ClampedGate(limit=7.0, alpha=1.702)) needs a gate with activation 'silu'",
        ),
        ({"sparsity": 1.0}, "sparsity (1.0) must be in [0, 1)"),
        ({"sparsity": 0.5, "gated": False}, "sparsity (0.5) needs a gate without clamp"),
        ({"sparsity": 0.5, "clamp": specs.ClampedGate()}, "sparsity (0.5) needs a gate without clamp"),
        ({"hidden_norm": 0.5, "gated": False}, "hidden_norm (0.5) needs a gate without clamp"),
        ({"hidden_norm": 0.5, "clamp": specs.ClampedGate()}, "hidden_norm (0.5) needs a gate without clamp"),
        ({"scales": (0.0, 1.0)}, "scales[0] (0.0) must be positive and finite"),
        ({"scales": (2.0, 1.0), "gated": False}, "scales ((2.0, 1.0)) need a gate without clamp"),
        ({"scales": (2.0, 1.0), "clamp": specs.ClampedGate()}, "scales ((2.0, 1.0)) need a gate without clamp"),
    ),
    BadConfig("FeedForwardConfig", {"scales": 3}, TypeError, "scales must be 2 numbers, got int"),
    *_kinds("FeedForwardConfig", {"clamp": "ClampedGate"}),
    BadConfig("ExpertGroups", {"number": 3.0}, TypeError, "number of groups must be an integer, got float"),
    BadConfig("ExpertGroups", {"chosen": True}, TypeError, "chosen of groups must be an integer, got bool"),
    *_relations(
        "ExpertGroups",
        ({"chosen": 0}, "chosen groups (0) must be at least 1 and at most all (3)"),
        ({"chosen": 4}, "chosen groups (4) must be at least 1 and at most all (3)"),
        ({"score": "x"}, "score of groups ('x') must be 'max' or 'top2'"),
    ),
    _choices("Router", "scores", "'softmax', 'sigmoid', 'sparse_mixer'"),
    _choices("Router", "corrects", "'scores', 'logits'"),
    *_relations(
        "Router",
        ({"sum_eps": -1e-6}, "sum_eps (-1e-06) must be at least 0 and finite"),
        ({"sum_eps": 1e-6, "normalise": False}, "sum_eps (1e-06) needs normalise"),
        ({"scores": "sparse_mixer"}, "scores (sparse_mixer) need a router without normalise, correction and groups"),
        (
            {"scores": "sparse_mixer", "normalise": False, "corrects": "logits"},
            "scores (sparse_mixer) need a router without normalise, correction and groups",
        ),
    ),
    *_kinds("Router", {"groups": "ExpertGroups", "norm": "RMSNormConfig"}),
    *_kinds("MixtureOfExpertsConfig", {"norm": "RMSNormConfig"}),
    _choices("MixtureOfExpertsConfig", "weighs", "'outputs', 'inputs'"),
    *_relations(
        "MixtureOfExpertsConfig",
        ({"norm": NARROW}, "emb_dim of norm (5) must be the width of the experts (6)"),
        (
            {"router": specs.Router(norm=NARROW)},
            "emb_dim of norm of router (5) must be the width of the experts (6)",
        ),
        ({"norm": NORM, "shared": FEED_FORWARD}, "shared must be None where the experts' input has a norm"),
    ),
    BadConfig("AlternatingUpdatesConfig", {"active": 1.5}, TypeError, "active must be an integer, got float"),
    *_relations(
        "AlternatingUpdatesConfig",
        ({"num_streams": 1}, "num_streams (1) must be at least 2"),
        ({"active": 3}, "active (3) must be at least 0 and below num_streams (3)"),
        ({"active": -1}, "active (-1) must be at least 0 and below num_streams (3)"),
    ),
    _choices("LayerInputConfig", "activation", "'silu', 'gelu', 'gelu_tanh', 'relu', 'quick_gelu', 'relu2'"),
    *_kinds(
        "MixtureOfExpertsConfig", {"expert": "FeedForwardConfig", "router": "Router", "shared": "FeedForwardConfig"}
    ),
    *_relations(
        "MixtureOfExpertsConfig",
        ({"top_k": 7}, "top_k (7) must be at most num_experts (6)"),
        (
            {"weighs": "inputs", "expert": FEED_FORWARD.replace(bias=True)},
            "weighs (inputs) needs experts without biases",
        ),
        ({"expert": FEED_FORWARD.replace(gated=False)}, f"expert ({FEED_FORWARD.replace(gated=False)}) must be gated"),
        (
            {"shared": FEED_FORWARD.replace(d_in=5)},
            f"shared ({FEED_FORWARD.replace(d_in=5)}) must be gated and of the width of the experts (6)",
        ),
        (
            {"shared": FEED_FORWARD.replace(gated=False)},
            f"shared ({FEED_FORWARD.replace(gated=False)}) must be gated and of the width of the experts (6)",
        ),
        ({"shared_gate": True}, "shared_gate (True) needs shared"),
        ({"router": specs.Router(groups=specs.ExpertGroups(4, 2))}, "num_experts (6) must be a multiple of groups (4)"),
        (
            {"router": specs.Router(groups=specs.ExpertGroups(3, 1)), "top_k": 3},
            "top_k (3) must be at most the experts of the chosen groups",
        ),
        (
            {"router": specs.Router(groups=specs.ExpertGroups(6, 2, "top2"))},
            "groups of 1 expert have no best two, which their score needs",
        ),
    ),
    # ---- decoders
    *_relations(
        "LayerNormConfig", ({"affine": False, "unit_offset": True}, "unit_offset (True) must be False without a scale")
    ),
    *_kinds(
        "DecoderBlockConfig",
        {
            "attention": "GroupedQueryAttentionConfig or MultiHeadLatentAttentionConfig or "
            "SparseIndexedAttentionConfig or GatedConvolutionConfig or GatedDeltaNetConfig or "
            "KimiDeltaAttentionConfig or LightningAttentionConfig or LinearAttentionConfig or MambaConfig or "
            "Mamba2Config or DifferentialAttentionConfig",
            "feed_forward": "FeedForwardConfig or MixtureOfExpertsConfig",
            "norm": NORMS,
        },
    ),
    _choices(
        "DecoderBlockConfig",
        "norms",
        "'pre', 'pre_last', 'post', 'sandwich', 'pre_and_last', 'parallel', 'parallel_two', 'residual', 'stream'",
    ),
    BadConfig("DecoderBlockConfig", {"mixer_scales": 3}, TypeError, "mixer_scales must be 2 numbers, got int"),
    BadConfig(
        "DecoderBlockConfig",
        {"recurrent": "x"},
        TypeError,
        "recurrent must be a GatedConvolutionConfig or GatedDeltaNetConfig or KimiDeltaAttentionConfig or "
        "LightningAttentionConfig or LinearAttentionConfig or MambaConfig or Mamba2Config, got str",
    ),
    BadConfig("DecoderBlockConfig", {"stream_scales": 3}, TypeError, "stream_scales must be 2 numbers, got int"),
    *_relations(
        "DecoderBlockConfig",
        (
            {"attention": WITHOUT_TABLE},
            "position of attention must not be shared: blocks of decoders have their own tables",
        ),
        ({"attention": GROUPED.replace(d_out=5)}, "d_out of attention (5) must be d_in of attention (6)"),
        ({"feed_forward": specs.FeedForwardConfig(5, 8)}, "d_in of feed_forward (5) must be d_in of attention (6)"),
        ({"norm": NARROW}, "emb_dim of norm (5) must be d_in of attention (6)"),
        ({"stream_scales": (1.0, 0.0)}, "stream_scales[1] (0.0) must be positive and finite"),
        ({"stream_scales": (2.0, 1.0)}, "stream_scales ((2.0, 1.0)) must be (1.0, 1.0) unless norms is stream"),
        ({"feed_forward": None, "norms": "post"}, "norms (post) must be pre without feed_forward"),
        ({"attention": None, "norms": "post"}, "norms (post) must be pre without attention"),
        ({"attention": None, "feed_forward": None}, "attention and feed_forward must not both be None"),
        ({"attention": None, "norm": NARROW}, "d_in of feed_forward (6) must be emb_dim of norm (5)"),
        ({"mixer_scales": (2.0, 1.0)}, "mixer_scales ((2.0, 1.0)) must be (1.0, 1.0) without recurrent"),
        ({"recurrent": specs.Mamba2Config(5, 5)}, "d_in of recurrent (5) must be d_in of attention (6)"),
        ({"recurrent": specs.Mamba2Config(6, 4, d_out=5)}, "d_out of recurrent (5) must be d_in of attention (6)"),
        (
            {"attention": specs.Mamba2Config(6, 4), "recurrent": specs.Mamba2Config(6, 4)},
            "recurrent must be None unless attention is given and not a recurrent layer itself",
        ),
    ),
    *_kinds("DecoderBlockConfig", {"layer_input": "LayerInputConfig", "dense": "FeedForwardConfig"}),
    *_kinds("DecoderBlockConfig", {"updates": "AlternatingUpdatesConfig"}),
    BadConfig("DecoderBlockConfig", {"laurel_rank": 1.5}, TypeError, "laurel_rank must be an integer, got float"),
    *_relations(
        "DecoderBlockConfig",
        ({"laurel_rank": 0}, "laurel_rank (0) must be at least 1"),
        ({"laurel_rank": 2}, "norms (pre) must be sandwich with laurel_rank"),
        ({"updates": UPDATES.replace(d_in=5)}, "d_in of updates (5) must be d_in of attention (6)"),
    ),
    *_relations(
        "DecoderConfig",
        (
            {"blocks": (DECODER_BLOCK, DECODER_BLOCK.replace(updates=UPDATES))},
            "num_streams of updates must be the same in all blocks, got 3 and none",
        ),
    ),
    BadConfig("DecoderBlockConfig", {"keys_of": 1.5}, TypeError, "keys_of must be an integer, got float"),
    *_relations(
        "DecoderBlockConfig",
        ({"dense": FEED_FORWARD}, "dense must be None unless feed_forward are experts and norms is sandwich"),
        (
            {"dense": FEED_FORWARD, "feed_forward": EXPERTS},
            "dense must be None unless feed_forward are experts and norms is sandwich",
        ),
        (
            {"dense": specs.FeedForwardConfig(5, 8), "feed_forward": EXPERTS, "norms": "sandwich"},
            "d_in of dense (5) must be d_in of attention (6)",
        ),
        ({"keys_of": 1}, "keys_of (1) must name a block where attention is shared, and only there"),
        (
            {"attention": GROUPED.replace(shared=True)},
            "keys_of (None) must name a block where attention is shared, and only there",
        ),
        ({"attention": GROUPED.replace(shared=True), "keys_of": -1}, "keys_of (-1) must be at least 0"),
        (
            {"attention": GROUPED.replace(shared=True), "keys_of": 0, "recurrent": specs.Mamba2Config(6, 4)},
            "recurrent must be None where attention is shared",
        ),
    ),
    *_kinds("DecoderConfig", {"layer_embeddings": "LayerEmbeddingsConfig"}),
    *_relations(
        "DecoderConfig",
        ({"blocks": (WITHOUT_KEYS,)}, "keys_of of blocks[0] (0) must be the number of an earlier block"),
        (
            {"blocks": (DECODER_BLOCK, WITHOUT_KEYS, WITHOUT_KEYS.replace(keys_of=1))},
            "keys_of of blocks[2] (1) must be a block of grouped-query attention alone, with keys of its own",
        ),
        (
            {"blocks": (DECODER_BLOCK.replace(attention=GROUPED.replace(num_kv_heads=3)), WITHOUT_KEYS)},
            "keys_of of blocks[1] (0) must be a block of the same num_kv_heads: 3 is not 2",
        ),
        ({"layer_embeddings": LAYERS.replace(d_in=5)}, "d_in of layer_embeddings (5) must be emb_dim (6)"),
        ({"layer_embeddings": LAYERS.replace(layers=2)}, "layers of layer_embeddings (2) must be that of blocks (1)"),
        (
            {"layer_embeddings": LAYERS},
            "dim of layer_input (None) must be that of layer_embeddings (3) in every block",
        ),
        (
            {"blocks": (DECODER_BLOCK.replace(layer_input=specs.LayerInputConfig(3)),)},
            "dim of layer_input (3) must be that of layer_embeddings (None) in every block",
        ),
    ),
    *_kinds("DecoderConfig", {"norm": NORMS, "embedding_norm": NORMS}),
    BadConfig(
        "DecoderConfig",
        {"head_activation": "relu", "head_norm": "x"},
        TypeError,
        "head_norm must be a RMSNormConfig or LayerNormConfig, got str",
    ),
    _choices("DecoderConfig", "sinusoids", "'transformer', 'tensor2tensor'"),
    _choices("DecoderConfig", "head_activation", "'silu', 'gelu', 'gelu_tanh', 'relu', 'quick_gelu', 'relu2'"),
    BadConfig("DecoderConfig", {"position_offset": 1.5}, TypeError, "position_offset must be an integer, got float"),
    BadConfig("DecoderConfig", {"num_token_types": 1.5}, TypeError, "num_token_types must be an integer, got float"),
    BadConfig("DecoderConfig", {"num_positions": 1.5}, TypeError, "num_positions must be an integer, got float"),
    BadConfig("DecoderConfig", {"blocks": ("x",)}, TypeError, "blocks[0] must be a DecoderBlockConfig, got str"),
    *_relations(
        "DecoderConfig",
        ({"num_positions": -1}, "num_positions (-1) must be at least 1"),
        ({"position_offset": -1}, "position_offset (-1) must be at least 1"),
        ({"num_positions": None, "position_offset": 2}, "position_offset (2) must be 0 without num_positions"),
        ({"sinusoids": "transformer"}, "sinusoids (transformer) must be None with num_positions"),
        (
            {"num_positions": None, "sinusoids": "transformer", "emb_dim": 5, "blocks": ()},
            "emb_dim (5) must be even with sinusoids",
        ),
        ({"num_token_types": 0}, "num_token_types (0) must be at least 1"),
        ({"norm_tokens": True}, "norm_tokens (True) must be False without embedding_norm"),
        ({"head_norm": NORM}, "head_norm must be None without head_activation"),
        ({"head_linear_bias": False}, "head_linear_bias (False) must be True without head_activation"),
        ({"embedding_width": 0}, "embedding_width (0) must be at least 1"),
        ({"embedding_width": 5, "embedding_norm": NORM}, "emb_dim of embedding_norm (6) must be embedding_width (5)"),
        ({"embedding_width": 6, "sinusoids": "transformer"}, "sinusoids must be None with embedding_width (6)"),
        (
            {"embedding_width": 5, "tie": True},
            "tie (True) needs embeddings as wide as the input of the head: 5 is not 6",
        ),
        ({"head_width": 5}, "head_width (5) must be None without head_activation"),
        ({"head_width": 0, "head_activation": "relu"}, "head_width (0) must be at least 1"),
        (
            {"head_width": 5, "head_activation": "relu", "head_norm": NORM},
            "emb_dim of head_norm (6) must be head_width (5)",
        ),
        ({"head_activation": "relu", "head_norm": NARROW}, "emb_dim of head_norm (5) must be emb_dim (6)"),
        ({"emb_dim": 5}, "width of blocks[0] (6) must be emb_dim (5)"),
        ({"norm": NARROW}, "emb_dim of norm (5) must be emb_dim (6)"),
        ({"embedding_norm": NARROW}, "emb_dim of embedding_norm (5) must be emb_dim (6)"),
    ),
    # ---- encoders and decoders
    _choices("ConvolutionsConfig", "activation", "'silu', 'gelu', 'gelu_tanh', 'relu', 'quick_gelu', 'relu2'"),
    *_relations("ConvolutionsConfig", ({"size": 4}, "size (4) must be odd")),
    *_kinds(
        "EncoderDecoderBlockConfig",
        {
            "attention": "GroupedQueryAttentionConfig",
            "feed_forward": "FeedForwardConfig",
            "norm": NORMS,
            "cross_attention": "CrossAttentionConfig",
        },
    ),
    _choices("EncoderDecoderBlockConfig", "norms", "'pre', 'post'"),
    *_relations(
        "EncoderDecoderBlockConfig",
        ({"attention": GROUPED.replace(d_out=5)}, "d_out of attention (5) must be d_in of attention (6)"),
        ({"feed_forward": specs.FeedForwardConfig(5, 8)}, "d_in of feed_forward (5) must be d_in of attention (6)"),
        ({"norm": NARROW}, "emb_dim of norm (5) must be d_in of attention (6)"),
        ({"cross_attention": CROSS.replace(d_in=5)}, "d_in of cross_attention (5) must be d_in of attention (6)"),
        ({"cross_attention": CROSS.replace(d_out=5)}, "d_out of cross_attention (5) must be d_in of attention (6)"),
    ),
    *_kinds("StackConfig", {"convolutions": "ConvolutionsConfig", "embedding_norm": NORMS, "norm": NORMS}),
    BadConfig("StackConfig", {"blocks": ("x",)}, TypeError, "blocks[0] must be a EncoderDecoderBlockConfig, got str"),
    BadConfig("StackConfig", {"position_offset": True}, TypeError, "position_offset must be an integer, got bool"),
    *_relations(
        "StackConfig",
        ({"position_offset": -1}, "position_offset (-1) must be at least 0"),
        ({"num_positions": 0}, "num_positions (0) must be at least 1"),
        ({"num_positions": None, "position_offset": 2}, "position_offset (2) must be 0 without num_positions"),
        (
            {"num_positions": None, "learned_positions": False},
            "learned_positions (False) must be True without num_positions",
        ),
        (
            {"blocks": (ENCODER_BLOCK, ENCODER_BLOCK.replace(attention=WITHOUT_TABLE))},
            "position of blocks[1] shares the table of blocks[0], whose attention must have 6 heads and RelativeBias("
            "num_buckets=8, max_distance=9, bidirectional=False, shared=False), got 6 and None",
        ),
        ({"emb_dim": 5}, "width of blocks[0] (6) must be emb_dim (5)"),
        ({"norm": NARROW}, "emb_dim of norm (5) must be emb_dim (6)"),
        ({"embedding_norm": NARROW}, "emb_dim of embedding_norm (5) must be emb_dim (6)"),
        ({"convolutions": specs.ConvolutionsConfig(4, 5)}, "emb_dim of convolutions (5) must be emb_dim (6)"),
        ({"convolutions": CONVOLUTIONS}, "vocab_size (9) must be None beside convolutions"),
        (
            {"emb_dim": 5, "blocks": (), "learned_positions": False},
            "emb_dim (5) must be even for positions that are not learned",
        ),
    ),
    *_kinds("EncoderDecoderConfig", {"encoder": "StackConfig", "decoder": "StackConfig"}),
    *_relations(
        "EncoderDecoderConfig",
        (
            {"decoder": DECODER.replace(convolutions=CONVOLUTIONS)},
            "convolutions of decoder must be None: it reads tokens",
        ),
        ({"decoder": DECODER.replace(vocab_size=8)}, "vocab_size of decoder (8) must be vocab_size (9)"),
        ({"encoder": ENCODER.replace(emb_dim=4, blocks=())}, "emb_dim of encoder (4) must be that of decoder (6)"),
        ({"decoder": DECODER.replace(blocks=())}, "blocks of decoder must hold at least 1 block"),
        ({"encoder": DECODER}, "cross_attention of encoder.blocks[0] must be None"),
        ({"decoder": ENCODER}, "cross_attention of decoder.blocks[0] must be a CrossAttentionConfig, got None"),
        (
            {"decoder": DECODER.replace(blocks=(ENCODER_BLOCK.replace(cross_attention=CROSS),))},
            "d_context of decoder.blocks[0] (5) must be emb_dim of encoder (6)",
        ),
    ),
    # ---- models with configs of their own
    *_relations("GPTModelConfig", ({"n_heads": 4}, "emb_dim (6) must be a multiple of n_heads (4)")),
    *_relations(
        "BertEncoderConfig",
        ({"num_attention_heads": 4}, "hidden_size (6) must be a multiple of num_attention_heads (4)"),
        ({"hidden_act": "relu"}, "hidden_act ('relu') must be 'gelu'"),
    ),
)


def _by_annotation() -> Iterator[BadConfig]:
    for target, config in VALID.items():
        for field in dataclasses.fields(config):
            kind = "rate" if field.name in RATES else str(field.type).removesuffix(" | None")
            if kind in FIELD_RULES and (target, field.name) not in OWN_RULES:
                for value, error, message in FIELD_RULES[kind]:
                    yield BadConfig(target, {field.name: value}, error, message.format(name=field.name))


BAD_CONFIGS: tuple[BadConfig, ...] = (*_by_annotation(), *RULES)
