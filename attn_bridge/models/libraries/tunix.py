"""Tunix: NNX's state of its Llama 3, Qwen 2, Qwen 3 (with experts, too) and Gemma 3, read off version 0.1.7.

Kernels are ``[in, out]`` as NNX has them, and those of attention keep their heads apart. Gemma's norms scale by
``1 + weight`` there as in `transformers`, so that the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...weights.rows import Row
from ..layout import Layout
from ..ours import MATRIX
from ..parts import towers
from ..rows.attention import PROJECTIONS
from ..rows.common import GROUPED_HEADS, TIE

LAYER, OURS = "layers.{i}.", "trf_blocks.{i}."

LORA = {
    f"{{path}}{leaf}_lora_{one}": "a matrix of LoRA, which the weights don't hold yet; merge it into them first"
    for leaf in ("w", "kernel")
    for one in ("a", "b")
}

VISION = towers("vision_encoder.", "embedder.mm_input_projection.", "embedder.mm_soft_embedding_norm.", fronts=("",))


def _attention() -> list[Row]:
    """Return rows of attention as Llama and the Qwens have it."""
    into = [
        Row(f"{LAYER}attn.{theirs}.w", (f"{OURS}att.{ours}.weight",), "(h c) i -> i h c", sizes={"h": heads})
        for (theirs, ours), heads in zip(PROJECTIONS, ("num_heads", "num_kv_heads", "num_kv_heads"), strict=False)
    ]
    pattern = "o (h c) -> h c o"
    return [*into, Row(f"{LAYER}attn.o_proj.w", (f"{OURS}att.out_proj.weight",), pattern, sizes={"h": "num_heads"})]


def _vectors(names: Iterable[tuple[str, str]]) -> list[Row]:
    """Return rows that map (their name, our name) without a change of shape."""
    return [Row(LAYER + theirs, (OURS + ours,)) for theirs, ours in names]


def _feed_forward(branch: str = "") -> list[Row]:
    return [
        Row(f"{LAYER}mlp.{one}_proj.kernel", (f"{OURS}ff.{fc}.weight",), MATRIX, branch=branch) for one, fc in _GATED
    ]


_GATED = (("gate", "fc1"), ("up", "fc2"), ("down", "fc3"))
_EXPERTS = "feed-forward/experts"


def _experts() -> list[Row]:
    """Return rows of a router and of experts, with one tensor per matrix for all experts; or of dense layers."""
    return [
        *(
            Row(
                f"{LAYER}mlp.{one}_proj",
                (f"{OURS}ff.experts.{{j}}.{fc}.weight",),
                "o i -> e i o",
                stack="e",
                branch=_EXPERTS,
            )
            for one, fc in _GATED
        ),
        Row(f"{LAYER}mlp.router.kernel", (f"{OURS}ff.router.weight",), MATRIX, branch=_EXPERTS),
        *_feed_forward("feed-forward/dense"),
    ]


def _layout(name: str, title: str, rows: Iterable[Row], model_types: tuple[str, ...]) -> Layout:
    """Return the layout of Llama or a Qwen with these rows in addition to those that they share."""
    return Layout(
        name,
        f"tunix's {title}, NNX's state",
        [
            Row("embedder.input_embedding", ("tok_emb.weight",), tied=("out_head.weight",)),
            Row("lm_head.w", ("out_head.weight",), MATRIX, optional=True),
            *_attention(),
            *rows,
            *_vectors((("input_layernorm.w", "norm1.scale"), ("post_attention_layernorm.w", "norm2.scale"))),
            Row("final_norm.w", ("final_norm.scale",)),
        ],
        settings={**GROUPED_HEADS, **TIE},
        defaults={"tie": 0},
        whole=True,
        refused=LORA,
        model_types=model_types,
        nnx=True,
    )


_BIASES = [(f"attn.{one}_bias", f"att.W_{ours}.bias") for one, ours in (("q", "query"), ("k", "key"), ("v", "value"))]
_NORMS = [(f"attn.{one}_norm.w", f"att.{one}_norm.scale") for one in ("q", "k")]


def _gemma3() -> list[Row]:
    """Return rows of Gemma 3, which has keys and values in one tensor, together with queries if no heads share keys."""
    query, key, value = (f"{OURS}att.W_{name}.weight" for name in ("query", "key", "value"))
    attention = f"{LAYER}attn."
    fused, split = "attention/qkv", "attention/q-and-kv"
    several = "(h c) i -> part h i c"
    return [
        Row("embedder.input_embedding", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row(f"{attention}qkv_einsum.w", (query, key, value), several, "part", sizes={"h": "num_heads"}, branch=fused),
        Row(f"{attention}q_einsum.w", (query,), "(h c) i -> h i c", sizes={"h": "num_heads"}, branch=split),
        Row(f"{attention}kv_einsum.w", (key, value), several, "part", sizes={"h": "num_kv_heads"}, branch=split),
        Row(
            f"{attention}attn_vec_einsum.w",
            (f"{OURS}att.out_proj.weight",),
            "o (h c) -> h c o",
            sizes={"h": "num_heads"},
        ),
        *_feed_forward(),
        *_vectors(
            (
                ("attn._query_norm.scale", "att.q_norm.scale"),
                ("attn._key_norm.scale", "att.k_norm.scale"),
                ("pre_attention_norm.scale", "norm1.scale"),
                ("post_attention_norm.scale", "post_norm1.scale"),
                ("pre_ffw_norm.scale", "norm2.scale"),
                ("post_ffw_norm.scale", "post_norm2.scale"),
            )
        ),
        Row("final_norm.scale", ("final_norm.scale",)),
    ]


LAYOUTS = (
    _layout("tunix-llama3", "Llama 3", _feed_forward(), ("llama",)),
    _layout("tunix-qwen2", "Qwen 2", [*_vectors(_BIASES), *_feed_forward()], ("qwen2",)),
    _layout("tunix-qwen3", "Qwen 3", [*_vectors(_NORMS), *_experts()], ("qwen3", "qwen3_moe")),
    Layout(
        "tunix-gemma3",
        "tunix's Gemma 3, NNX's state of the text model",
        _gemma3(),
        settings=GROUPED_HEADS,
        whole=True,
        refused=LORA,
        parts=VISION,
        model_types=("gemma3", "gemma3_text"),
        nnx=True,
    ),
)
