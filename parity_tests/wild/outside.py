"""Pairs with code of others, run where it is importable: `transformers`, `recurrentgemma`, the book's package, `tunix`.

Tiny random configurations. The ports are those of this gallery, or the package's own twin. Faults of a side that is not
ours are its configuration's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .gallery import Case, entry, fault, inside
from .ports import encoder_decoders, encoders, gpt2, llama, vision
from .weights import carry, fill, fresh, held, linen, numbers, onto, rules, tokens

LLAMA_NAMES = """
hf.model.embed_tokens.weight | embed.embedding
hf.model.layers.{i}.input_layernorm.weight | blocks.{i}.attn_norm.scale
hf.model.layers.{i}.post_attention_layernorm.weight | blocks.{i}.mlp_norm.scale
hf.model.layers.{i}.self_attn.{rest}.weight | blocks.{i}.attn.{rest}.kernel | o d -> d o
hf.model.layers.{i}.mlp.{rest}.weight | blocks.{i}.mlp.{rest}.kernel | o d -> d o
hf.model.norm.weight | norm.scale
hf.lm_head.weight | head.kernel | o d -> d o
"""
ATTENTION = inside("hf.model.layers.*.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
MLP = inside("hf.model.layers.*.mlp", "gate_proj", "up_proj", "down_proj", "act_fn")
TABLES = ("", "hf", "hf.model", "hf.model.rotary_emb")


def logits_of(model: Any, **keywords: Any) -> Any:
    """Return a module ``ids -> logits`` around a model of ``transformers``, with drawn weights."""
    from torch import nn

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hf = model

        def forward(self, ids):
            return self.hf(ids, use_cache=False, **keywords).logits

    return fresh(Logits())


def llama_sizes() -> dict[str, Any]:
    """Return the sizes of the gallery's decoder."""
    return {
        "vocab_size": llama.VOCABULARY,
        "hidden_size": llama.WIDTH,
        "intermediate_size": llama.HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": llama.HEADS,
        "num_key_value_heads": llama.KV_HEADS,
        "head_dim": llama.HEAD,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }


@entry(
    "transformers",
    "Llama",
    needs=("transformers",),
    faults={
        "theta-off-by-1e-3": fault(*TABLES),
        "heads-tiled": fault(*ATTENTION),
        "norm-eps": fault("hf.model.layers.0.input_layernorm"),
        "gelu-for-silu": fault(*MLP),
    },
)
def outside_llama(wrong: str | None) -> Case:
    """``LlamaForCausalLM``; its tables are float32 whatever the model is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    first = logits_of(LlamaForCausalLM(LlamaConfig(**llama_sizes())))
    return Case(first, onto(first, llama.nnx_llama(wrong, where="constant"), LLAMA_NAMES), tokens(2, llama.T))


@entry(
    "transformers",
    "Mistral",
    "sliding window",
    needs=("transformers",),
    faults={"window-off-by-one": fault("", *ATTENTION), "rotary-interleaved": fault(*ATTENTION)},
)
def outside_mistral(wrong: str | None) -> Case:
    """``MistralForCausalLM`` with a window of three tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**llama_sizes(), sliding_window=3, attn_implementation="eager")
    first = logits_of(MistralForCausalLM(config))
    return Case(first, onto(first, llama.nnx_llama(wrong, window=3), LLAMA_NAMES), tokens(2, llama.T))


@entry(
    "transformers",
    "GPT-2",
    "Conv1D",
    needs=("transformers",),
    faults={
        "gelu-exact": fault(*inside("hf.transformer.h.*.mlp", "c_fc", "act", "c_proj")),
        "flax-eps": fault("hf.transformer.h.0.ln_1"),
        "fused-per-head": fault(*inside("hf.transformer.h.*.attn", "c_attn", "c_proj")),
    },
)
def outside_gpt2(wrong: str | None) -> Case:
    """``GPT2LMHeadModel``, tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=gpt2.VOCABULARY, n_positions=16, n_embd=gpt2.WIDTH, n_layer=1, n_head=gpt2.HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    first = logits_of(GPT2LMHeadModel(config))
    arrays = {name.removeprefix("hf.transformer."): array for name, array in held(first).items()}
    return Case(first, fill(gpt2.nnx_gpt2(wrong), carry(arrays, rules(gpt2.NAMES))), tokens(2, gpt2.T))


BERT_NAMES = """
hf.embeddings.word_embeddings.weight | embeddings.word.embedding
hf.embeddings.position_embeddings.weight | embeddings.position.embedding
hf.embeddings.token_type_embeddings.weight | embeddings.token_type.embedding
hf.embeddings.LayerNorm.weight | embeddings.norm.scale
hf.embeddings.LayerNorm.bias | embeddings.norm.bias
hf.encoder.layer.{i}.attention.self.{rest}.weight | layer.{i}.{rest}.kernel | o d -> d o
hf.encoder.layer.{i}.attention.self.{rest}.bias | layer.{i}.{rest}.bias
hf.encoder.layer.{i}.attention.output.dense.weight | layer.{i}.out.kernel | o d -> d o
hf.encoder.layer.{i}.attention.output.dense.bias | layer.{i}.out.bias
hf.encoder.layer.{i}.attention.output.LayerNorm.weight | layer.{i}.attn_norm.scale
hf.encoder.layer.{i}.attention.output.LayerNorm.bias | layer.{i}.attn_norm.bias
hf.encoder.layer.{i}.intermediate.dense.weight | layer.{i}.up.kernel | o d -> d o
hf.encoder.layer.{i}.intermediate.dense.bias | layer.{i}.up.bias
hf.encoder.layer.{i}.output.dense.weight | layer.{i}.down.kernel | o d -> d o
hf.encoder.layer.{i}.output.dense.bias | layer.{i}.down.bias
hf.encoder.layer.{i}.output.LayerNorm.weight | layer.{i}.mlp_norm.scale
hf.encoder.layer.{i}.output.LayerNorm.bias | layer.{i}.mlp_norm.bias
hf.pooler.dense.weight | pooler.kernel | o d -> d o
hf.pooler.dense.bias | pooler.bias
"""


@entry(
    "transformers",
    "BERT",
    needs=("transformers",),
    faults={
        "token-types-ignored": fault("hf.embeddings", "hf.embeddings.token_type_embeddings"),
        "gelu-tanh": fault("hf.encoder.layer.0", "hf.encoder.layer.0.intermediate"),
        "norm-before-the-residual": fault("hf.encoder.layer.0", "hf.encoder.layer.0.output"),
    },
)
def outside_bert(wrong: str | None) -> Case:
    """``BertModel``, whose layer has submodules that the port has not."""
    from torch import nn
    from transformers import BertConfig, BertModel

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hf = BertModel(
                BertConfig(
                    vocab_size=encoders.VOCABULARY, hidden_size=encoders.WIDTH, num_hidden_layers=1,
                    num_attention_heads=encoders.HEADS, intermediate_size=encoders.HIDDEN,
                    max_position_embeddings=16, pad_token_id=None,
                )
            )  # fmt: skip

        def forward(self, ids, types, mask):
            found = self.hf(ids, attention_mask=mask, token_type_ids=types)
            return found.last_hidden_state, found.pooler_output

    first = fresh(Bert())
    return Case(first, onto(first, encoders.nnx_bert(wrong), BERT_NAMES), encoders.bert_inputs())


T5_PARTS = ("q", "k", "v", "relative_attention_bias", "o")


def t5_names() -> str:
    """Return the rules from ``transformers``' T5 to the gallery's."""
    rows = ["hf.shared.weight | shared.embedding"]
    for side, layers in (
        ("enc", ("SelfAttention", "DenseReluDense")),
        ("dec", ("SelfAttention", "EncDecAttention", "DenseReluDense")),
    ):
        stack = f"hf.{side}oder.block.0.layer"
        parts = {"SelfAttention": f"{side}_attn", "EncDecAttention": "cross_attn", "DenseReluDense": f"{side}_mlp"}
        norms = {
            "SelfAttention": f"{side}_norm", "EncDecAttention": "cross_norm", "DenseReluDense": f"{side}_mlp_norm",
        }  # fmt: skip
        for i, layer in enumerate(layers):
            if layer == "SelfAttention":
                bias = "relative_attention_bias"
                rows.append(f"{stack}.{i}.{layer}.{bias}.weight | {parts[layer]}.{bias}.embedding")
            rows.append(f"{stack}.{i}.{layer}.{{rest}}.weight | {parts[layer]}.{{rest}}.kernel | o d -> d o")
            rows.append(f"{stack}.{i}.layer_norm.weight | {norms[layer]}.scale")
        rows.append(f"hf.{side}oder.final_layer_norm.weight | {side}_final.scale")
    return "\n".join(rows)


@entry(
    "transformers",
    "T5",
    needs=("transformers",),
    faults={
        "bucket-off-by-one": fault("hf.*", *inside("hf.*coder.block.0.layer.*.*Attention", *T5_PARTS)),
        "scaled-after-all": fault("hf.*", *inside("hf.*coder.block.0.layer.*.*Attention", *T5_PARTS)),
        "logits-not-scaled": fault("", "hf"),
    },
)
def outside_t5(wrong: str | None) -> Case:
    """``T5ForConditionalGeneration``, tied, with a padding mask."""
    from torch import nn
    from transformers import T5Config, T5ForConditionalGeneration

    ours = encoder_decoders
    config = T5Config(
        vocab_size=ours.VOCABULARY, d_model=ours.WIDTH, d_kv=ours.WIDTH // ours.HEADS, d_ff=ours.HIDDEN, num_layers=1,
        num_decoder_layers=1, num_heads=ours.HEADS, relative_attention_num_buckets=ours.BUCKETS,
        relative_attention_max_distance=ours.FURTHEST, dropout_rate=0.0, feed_forward_proj="relu",
    )  # fmt: skip

    class T5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hf = T5ForConditionalGeneration(config)

        def forward(self, source, target, mask):
            return self.hf(source, attention_mask=mask.int(), decoder_input_ids=target, use_cache=False).logits

    first = fresh(T5())
    rules = []
    for row in t5_names().splitlines():
        names = [part.strip() for part in row.split("|")][:2]
        parts = ("wi", "wo") if "Dense" in row else "qkvo"
        for rest in parts if "{rest}" in row else ("",):
            torch, flax = (name.replace("{rest}", rest) for name in names)
            rules.append({"torch": torch, "flax": flax, **({"pattern": "o d -> d o"} if rest else {})})
    return Case(first, onto(first, ours.nnx_t5(wrong), t5_names()), ours.t5_inputs(), {"rules": rules})


VIT_NAMES = """
hf.embeddings.cls_token | cls
hf.embeddings.position_embeddings | posembed
hf.embeddings.patch_embeddings.projection.weight | embedding.kernel | o i y x -> y x i o
hf.embeddings.patch_embeddings.projection.bias | embedding.bias
hf.layernorm.weight | encoder_norm.scale
hf.layernorm.bias | encoder_norm.bias
head.weight | head.kernel | o d -> d o
head.bias | head.bias
"""


def vit_names(arrays: Any) -> str:
    """Return the rules to the gallery's Linen ViT; the names of the attention's layers differ by version."""
    rows, own = [VIT_NAMES], "encoderblock_0.MultiHeadDotProductAttention_0"
    for name in arrays:
        word = name.rpartition(".")[2]
        flat = "o d -> d o" if word == "weight" else ""
        end = "kernel" if word == "weight" else "bias"
        for part in ("query", "key", "value"):
            if f".{part}." in name or f".{part[0]}_proj." in name:
                pattern = "(h c) d -> d h c" if word == "weight" else "(h c) -> h c"
                rows.append(f"{name} | {own}.{part}.{end} | {pattern}")
        for i, norm in enumerate(("layernorm_before", "layernorm_after")):
            if norm in name:
                rows.append(f"{name} | encoderblock_0.LayerNorm_{i}.{'scale' if word == 'weight' else 'bias'}")
        if "attention.output.dense" in name or "attention.o_proj" in name:
            rows.append(f"{name} | {own}.out.{end} | {'d (h c) -> h c d' if word == 'weight' else ''}")
        elif "intermediate.dense" in name or "mlp.fc1" in name:
            rows.append(f"{name} | encoderblock_0.MlpBlock_0.Dense_0.{end} | {flat}")
        elif "output.dense" in name or "mlp.fc2" in name:
            rows.append(f"{name} | encoderblock_0.MlpBlock_0.Dense_1.{end} | {flat}")
    return "\n".join(rows)


@entry(
    "transformers",
    "ViT",
    "Linen",
    needs=("transformers",),
    faults={
        "class-token-without-position": fault("hf.embeddings", *inside("", "hf.embeddings.*", "hf.*layer*.0*")),
        "final-norm-missing": fault("hf.layernorm", ("hf.layernorm", "head")),
        "dropped-scale": fault("hf.*", *inside("hf.*layer*.0", "*")),
    },
)
def outside_vit(wrong: str | None) -> Case:
    """``ViTModel`` and a head, against Linen."""
    from torch import nn
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=vision.WIDTH, num_hidden_layers=1, num_attention_heads=vision.HEADS,
        intermediate_size=vision.HIDDEN, image_size=vision.IMAGE, patch_size=vision.PATCH, layer_norm_eps=1e-6,
    )  # fmt: skip

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hf, self.head = ViTModel(config, add_pooling_layer=False), nn.Linear(vision.WIDTH, 7)

        def forward(self, image):
            return self.head(self.hf(image).last_hidden_state[:, 0])

    first, image = fresh(ViT()), numbers(2, 3, vision.IMAGE, vision.IMAGE)
    arrays, last = held(first), image.transpose(0, 2, 3, 1)
    carried = carry(arrays, rules(vit_names(arrays), h=vision.HEADS))
    return Case(first, linen(vision.linen_vit(wrong), carried, last), image, {"second_inputs": last})


@entry(
    "recurrentgemma",
    "Linen",
    "checkpoint",
    "RG-LRU",
    needs=("recurrentgemma", "typeguard"),
    faults={
        "window-off-by-one": fault("griffin", *inside("griffin.blocks.1.*attention_block", "proj_*")),
        "embedding-not-scaled": fault("griffin", "griffin.embedder"),
        "soft-cap-of-another-model": fault("", "griffin"),
    },
)
def outside_recurrentgemma(wrong: str | None) -> Case:
    """Griffin of torch, checkpointed, against its Linen twin; packed positions."""
    from flax import linen as fnn
    from recurrentgemma import common
    from recurrentgemma.jax import griffin as jax_griffin
    from recurrentgemma.torch import griffin as torch_griffin
    from torch import nn

    kinds = common.TemporalBlockType.RECURRENT, common.TemporalBlockType.ATTENTION
    config = common.GriffinConfig(
        vocab_size=16, width=16, mlp_expanded_width=24, num_heads=2, lru_width=16, block_types=kinds,
        embeddings_scale_by_sqrt_dim=True, attention_window_size=4, logits_soft_cap=30.0,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )  # fmt: skip
    changes = {
        "window-off-by-one": {"attention_window_size": 5},
        "embedding-not-scaled": {"embeddings_scale_by_sqrt_dim": False},
        "soft-cap-of-another-model": {"logits_soft_cap": 20.0},
    }

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.griffin = torch_griffin.Griffin(config)

        def forward(self, tokens, segment_pos):
            return self.griffin(tokens, segment_pos, return_cache=False)[0]

    class Linen(fnn.Module):
        @fnn.compact
        def __call__(self, tokens, segment_pos):
            model = jax_griffin.Griffin(config._replace(**changes.get(wrong or "", {})), name="griffin")
            return model(tokens, segment_pos, return_cache=False)[0]

    first = fresh(Torch())
    positions = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]], np.int32)
    inputs = {"tokens": tokens(2, 8, vocabulary=16).astype(np.int32), "segment_pos": positions}
    carried = {}
    for name, array in held(first).items():
        turned = array.T if name.endswith("weight") and array.ndim == 2 and "conv_1d" not in name else array
        carried[name.replace("weight", "kernel")] = turned
    return Case(first, linen(Linen(), carried, **inputs), inputs)


@entry(
    "llms-from-scratch",
    "GPT",
    needs=("llms_from_scratch",),
    faults={
        "first-norm-twice": fault("*trf_blocks.0*"),
        "scale-missing": fault("*trf_blocks.0*"),
    },
)
def outside_book_gpt(wrong: str | None) -> Case:
    """Tie the head of the book's ``GPTModel``, against the gallery's NNX decoder."""
    from llms_from_scratch.ch04 import GPTModel

    sizes = {"vocab_size": gpt2.VOCABULARY, "context_length": 16, "emb_dim": gpt2.WIDTH, "n_heads": gpt2.HEADS}
    model = GPTModel({**sizes, "n_layers": 1, "drop_rate": 0.0, "qkv_bias": True})
    model.out_head.weight = model.tok_emb.weight
    first = fresh(model)
    names = """
    tok_emb.weight | token_embedding.embedding
    pos_emb.weight | position_embedding.embedding
    trf_blocks.{i}.norm1.scale | layers.{i}.norm1.scale
    trf_blocks.{i}.norm1.shift | layers.{i}.norm1.bias
    trf_blocks.{i}.norm2.scale | layers.{i}.norm2.scale
    trf_blocks.{i}.norm2.shift | layers.{i}.norm2.bias
    trf_blocks.{i}.att.W_{rest}.weight | layers.{i}.{rest}.kernel | o d -> d o
    trf_blocks.{i}.att.W_{rest}.bias | layers.{i}.{rest}.bias
    trf_blocks.{i}.att.out_proj.weight | layers.{i}.out.kernel | o d -> d o
    trf_blocks.{i}.att.out_proj.bias | layers.{i}.out.bias
    trf_blocks.{i}.ff.layers.0.weight | layers.{i}.up.kernel | o d -> d o
    trf_blocks.{i}.ff.layers.0.bias | layers.{i}.up.bias
    trf_blocks.{i}.ff.layers.2.weight | layers.{i}.down.kernel | o d -> d o
    trf_blocks.{i}.ff.layers.2.bias | layers.{i}.down.bias
    final_norm.scale | ln_f.scale
    final_norm.shift | ln_f.bias
    """
    return Case(first, onto(first, gpt2.split_gpt2(wrong), names), tokens(2, gpt2.T))


@entry(
    "llms-from-scratch",
    "transformers",
    "Qwen3",
    "torch and torch",
    "float32 only",
    needs=("llms_from_scratch", "transformers"),
    faults={
        "theta-of-another-model": fault(
            *TABLES, *inside("hf.model.layers.*.self_attn", "q_norm", "k_norm", "v_proj", "o_proj")
        ),
        "norms-of-q-and-k-missing": fault("hf.model.layers.*.self_attn.q_norm"),
    },
)
def outside_book_qwen3(wrong: str | None) -> Case:
    """``Qwen3ForCausalLM`` against the book's ``Qwen3Model``, both torch's."""
    import torch
    from llms_from_scratch.qwen3 import Qwen3Model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    first = logits_of(Qwen3ForCausalLM(Qwen3Config(**llama_sizes(), rope_theta=10000.0)))
    second = Qwen3Model(
        {
            "vocab_size": llama.VOCABULARY, "context_length": 32, "emb_dim": llama.WIDTH, "n_heads": llama.HEADS,
            "n_layers": 1, "hidden_dim": llama.HIDDEN, "head_dim": llama.HEAD, "n_kv_groups": llama.KV_HEADS,
            "qk_norm": True, "dtype": torch.float32,
            "rope_base": 1000000.0 if wrong == "theta-of-another-model" else 10000.0,
        }
    )  # fmt: skip
    names = """
    hf.model.embed_tokens.weight | tok_emb.weight
    hf.model.layers.{i}.input_layernorm.weight | trf_blocks.{i}.norm1.scale
    hf.model.layers.{i}.post_attention_layernorm.weight | trf_blocks.{i}.norm2.scale
    hf.model.layers.{i}.self_attn.q_proj.weight | trf_blocks.{i}.att.W_query.weight
    hf.model.layers.{i}.self_attn.k_proj.weight | trf_blocks.{i}.att.W_key.weight
    hf.model.layers.{i}.self_attn.v_proj.weight | trf_blocks.{i}.att.W_value.weight
    hf.model.layers.{i}.self_attn.o_proj.weight | trf_blocks.{i}.att.out_proj.weight
    hf.model.layers.{i}.self_attn.q_norm.weight | trf_blocks.{i}.att.q_norm.scale
    hf.model.layers.{i}.self_attn.k_norm.weight | trf_blocks.{i}.att.k_norm.scale
    hf.model.layers.{i}.mlp.gate_proj.weight | trf_blocks.{i}.ff.fc1.weight
    hf.model.layers.{i}.mlp.up_proj.weight | trf_blocks.{i}.ff.fc2.weight
    hf.model.layers.{i}.mlp.down_proj.weight | trf_blocks.{i}.ff.fc3.weight
    hf.model.norm.weight | final_norm.scale
    hf.lm_head.weight | out_head.weight
    """
    second = onto(first, second, names)
    if wrong == "norms-of-q-and-k-missing":
        attention = second.trf_blocks[0].att
        for norm in (attention.q_norm, attention.k_norm):
            norm.forward = lambda x, norm=norm: x * norm.scale
    return Case(first, second, tokens(2, llama.T))


@entry(
    "tunix",
    "transformers",
    "Llama",
    needs=("tunix", "transformers"),
    faults={
        "theta-of-the-configuration": fault(*TABLES, *ATTENTION, side="first"),
        "norm-eps": fault("hf.model.layers.0.input_layernorm"),
    },
)
def outside_tunix_llama3(wrong: str | None) -> Case:
    """``LlamaForCausalLM`` against Tunix's NNX model, whose kernels keep heads apart.

    Version 0.1.7 of Tunix turns by a theta of a million whatever its configuration says.
    """
    import jax.numpy as jnp
    from flax import nnx
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..support.models.tunix_models import as_tunix_needs, library

    tunix = library("llama3")
    config = tunix.ModelConfig(
        num_layers=1, vocab_size=llama.VOCABULARY, embed_dim=llama.WIDTH, hidden_dim=llama.HIDDEN,
        num_heads=llama.HEADS, head_dim=llama.HEAD, num_kv_heads=llama.KV_HEADS, weight_tying=False,
        rope_theta=1_000_000, norm_eps=1e-5 if wrong == "norm-eps" else 1e-6,
    )  # fmt: skip

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.model = tunix.Llama3(config, rngs=nnx.Rngs(0))

        def __call__(self, ids):
            b, t = ids.shape
            seen = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
            return self.model(ids, jnp.broadcast_to(jnp.arange(t), (b, t)), None, seen)[0]

    theta = 10000.0 if wrong == "theta-of-the-configuration" else 1000000.0
    first = logits_of(LlamaForCausalLM(LlamaConfig(**llama_sizes(), rope_theta=theta)))
    names = """
    hf.model.embed_tokens.weight | model.embedder.input_embedding
    hf.model.layers.{i}.input_layernorm.weight | model.layers.{i}.input_layernorm.w
    hf.model.layers.{i}.post_attention_layernorm.weight | model.layers.{i}.post_attention_layernorm.w
    hf.model.layers.{i}.self_attn.q_proj.weight | model.layers.{i}.attn.q_proj.w | (h c) d -> d h c
    hf.model.layers.{i}.self_attn.k_proj.weight | model.layers.{i}.attn.k_proj.w | (k c) d -> d k c
    hf.model.layers.{i}.self_attn.v_proj.weight | model.layers.{i}.attn.v_proj.w | (k c) d -> d k c
    hf.model.layers.{i}.self_attn.o_proj.weight | model.layers.{i}.attn.o_proj.w | d (h c) -> h c d
    hf.model.layers.{i}.mlp.{rest}.weight | model.layers.{i}.mlp.{rest}.kernel | o d -> d o
    hf.model.norm.weight | model.final_norm.w
    hf.lm_head.weight | model.lm_head.w | o d -> d o
    """
    table = rules(names, h=llama.HEADS, k=llama.KV_HEADS)
    with as_tunix_needs():
        port = Port()
    return Case(first, onto(first, port, table), tokens(2, llama.T))
