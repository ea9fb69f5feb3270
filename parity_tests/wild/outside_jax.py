"""Pairs with JAX packages of others, run where these are importable.

DeepMind's gemma, recurrentgemma and Haiku, Google's Tunix, flaxmodels, Equinox, Keras. Tiny random configurations
against `transformers`, torch's own layers, or the package's torch twin. A fault is a line of the package's own source
that is changed (`changed`), or a setting.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from .gallery import Case, entry, fault, inside
from .outside import logits_of
from .weights import carry, fill, fresh, held, linen, numbers, onto, rules, tokens

VOCABULARY, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD = 24, 16, 24, 4, 2, 8
B, T = 2, 7
POSITIONS = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
CAUSAL = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, T, T))

_NUMBERS = itertools.count()


def changed(name: str, *lines: tuple[str, str], **members: Any) -> Any:
    """Return a copy of a module with some of its source replaced, and with other members; as it is without any."""
    if not lines and not members:
        return importlib.import_module(name)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for old, new in lines:
        assert old in source, f"{name} has no {old!r}"
        source = source.replace(old, new, 1)
    module = types.ModuleType(f"{name}_{next(_NUMBERS)}")
    module.__package__, module.__file__ = name.rpartition(".")[0], spec.origin
    sys.modules[module.__name__] = module
    exec(compile(source, module.__name__, "exec"), vars(module))
    vars(module).update(members)
    return module


def line(faults: dict[str, tuple[str, str]], wrong: str | None) -> list[tuple[str, str]]:
    """Return the line that a fault changes, if it is one of those."""
    return [faults[wrong]] if wrong in faults else []


def sizes(**more: Any) -> dict[str, Any]:
    """Return the sizes of a decoder of `transformers`."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32, "attention_dropout": 0.0, "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": None, "attn_implementation": "eager", **more,
    }  # fmt: skip


def tunix_sizes(**more: Any) -> dict[str, Any]:
    """Return the same sizes as Tunix calls them."""
    return {
        "num_layers": 1, "embed_dim": WIDTH, "hidden_dim": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS,
        "head_dim": HEAD, **more,
    }  # fmt: skip


def port_of(model: Any) -> Any:
    """Return an NNX module ``ids -> logits`` around a model of Tunix."""
    import jax.numpy as jnp
    from flax import nnx

    class Port(nnx.Module):
        def __init__(self) -> None:
            self.model = model

        def __call__(self, ids):
            b, t = ids.shape
            seen = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
            return self.model(ids, jnp.broadcast_to(jnp.arange(t), (b, t)), None, seen)[0]

    return Port()


LAYER = "hf.model.layers.0"
ATTENTION = inside(f"{LAYER}.self_attn", "*_proj", "*_norm")
MLP = inside(f"{LAYER}.mlp", "gate_proj", "up_proj", "down_proj", "act_fn")

TUNIX_NAMES = """
hf.model.embed_tokens.weight | model.embedder.input_embedding
hf.model.layers.{i}.self_attn.q_proj.weight | model.layers.{i}.attn.q_proj.w | (h c) d -> d h c
hf.model.layers.{i}.self_attn.k_proj.weight | model.layers.{i}.attn.k_proj.w | (k c) d -> d k c
hf.model.layers.{i}.self_attn.v_proj.weight | model.layers.{i}.attn.v_proj.w | (k c) d -> d k c
hf.model.layers.{i}.self_attn.o_proj.weight | model.layers.{i}.attn.o_proj.w | d (h c) -> h c d
hf.model.layers.{i}.self_attn.q_proj.bias | model.layers.{i}.attn.q_bias
hf.model.layers.{i}.self_attn.k_proj.bias | model.layers.{i}.attn.k_bias
hf.model.layers.{i}.self_attn.v_proj.bias | model.layers.{i}.attn.v_bias
hf.model.layers.{i}.self_attn.q_norm.weight | model.layers.{i}.attn.q_norm.w
hf.model.layers.{i}.self_attn.k_norm.weight | model.layers.{i}.attn.k_norm.w
hf.model.layers.{i}.input_layernorm.weight | model.layers.{i}.input_layernorm.w
hf.model.layers.{i}.post_attention_layernorm.weight | model.layers.{i}.post_attention_layernorm.w
hf.model.norm.weight | model.final_norm.w
hf.lm_head.weight | model.lm_head.w | o d -> d o
"""

QWEN2 = {
    "keys-not-turned": (
        "    key_proj = apply_rotary_embedding(\n        key_proj,\n        sin,\n        cos,\n    )\n",
        "",
    ),
    "rotated-the-other-way": (
        "[x1 * cos - x2 * sin, x2 * cos + x1 * sin]",
        "[x1 * cos + x2 * sin, x2 * cos - x1 * sin]",
    ),
    "eps-outside-the-root": (
        "rms = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + self.norm_eps)",
        "rms = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)) + self.norm_eps",
    ),
}


@entry(
    "tunix",
    "transformers",
    "Qwen2",
    "checkpoint",
    "tied",
    needs=("tunix", "transformers"),
    faults={
        "keys-not-turned": fault(*ATTENTION),
        "rotated-the-other-way": fault(*ATTENTION),
        "eps-outside-the-root": fault(f"{LAYER}.input_layernorm"),
        "scale-by-the-width": fault(*ATTENTION),
    },
)
def outside_tunix_qwen2(wrong: str | None) -> Case:
    """``Qwen2ForCausalLM``, tied, against Tunix's model, which recomputes its blocks: two wrappers against one."""
    from flax import nnx
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tunix = changed("tunix.models.qwen2.model", *line(QWEN2, wrong))
    config = tunix.ModelConfig(
        **tunix_sizes(vocab_size=VOCABULARY, rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True),
        remat_config=tunix.RematConfig.BLOCK,
    )
    first = logits_of(Qwen2ForCausalLM(Qwen2Config(**sizes(rope_theta=1e6, tie_word_embeddings=True))))
    names = TUNIX_NAMES + "hf.model.layers.{i}.mlp.{rest}.weight | model.layers.{i}.mlp.{rest}.kernel | o d -> d o"
    second = onto(first, port_of(tunix.Qwen2(config, rngs=nnx.Rngs(0))), rules(names, h=HEADS, k=KV_HEADS))
    if wrong == "scale-by-the-width":
        second.model.layers[0].attn.scale = WIDTH**-0.5
    return Case(first, second, tokens(B, T))


MIXTURE = {
    "not-renormalised": ("routing_weights / jnp.sum(routing_weights, axis=-1, keepdims=True)", "routing_weights"),
    "scores-by-sigmoid": (
        "jax.nn.softmax(scores, axis=-1), self.experts_per_tok",
        "jax.nn.sigmoid(scores), self.experts_per_tok",
    ),
}


@entry(
    "tunix",
    "transformers",
    "Qwen3",
    "mixture of experts",
    needs=("tunix", "transformers"),
    faults={
        "not-renormalised": fault(*inside(f"{LAYER}.mlp", "gate", "experts")),
        "scores-by-sigmoid": fault(*inside(f"{LAYER}.mlp", "gate", "experts")),
        "an-expert-more": fault(*inside(f"{LAYER}.mlp", "gate", "experts")),
    },
)
def outside_tunix_qwen3_moe(wrong: str | None) -> Case:
    """``Qwen3MoeForCausalLM``, whose experts have fused gates, against Tunix's experts in three stacks."""
    from flax import nnx
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tunix = changed("tunix.models.qwen3.model", *line(MIXTURE, wrong))
    chosen = 3 if wrong == "an-expert-more" else 2
    config = tunix.ModelConfig(
        **tunix_sizes(vocab_size=VOCABULARY, rope_theta=1_000_000, norm_eps=1e-6),
        num_experts=5,
        num_experts_per_tok=chosen,
    )
    moe = {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": HIDDEN}
    first = logits_of(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes(rope_theta=1e6, tie_word_embeddings=False), **moe)))
    arrays = held(first)
    own = {}
    for name in [name for name in arrays if ".experts." in name]:
        array, to = arrays.pop(name), "model.layers.0.mlp"
        if name.endswith("gate_up_proj"):
            own[f"{to}.gate_proj"], own[f"{to}.up_proj"] = np.split(array.swapaxes(1, 2), 2, axis=-1)
        else:
            own[f"{to}.down_proj"] = array.swapaxes(1, 2)
    names = TUNIX_NAMES + "hf.model.layers.{i}.mlp.gate.weight | model.layers.{i}.mlp.router.kernel | o d -> d o"
    carried = carry(arrays, rules(names, h=HEADS, k=KV_HEADS))
    second = fill(port_of(tunix.Qwen3(config, rngs=nnx.Rngs(0))), carried | own)
    return Case(first, second, tokens(B, T))


GEMMA3_NAMES = """
hf.model.embed_tokens.weight | model.embedder.input_embedding
hf.model.layers.{i}.self_attn.q_proj.weight | model.layers.{i}.attn.q_einsum.w | (h c) d -> h d c
hf.model.layers.{i}.self_attn.k_proj.weight, hf.model.layers.{i}.self_attn.v_proj.weight \
| model.layers.{i}.attn.kv_einsum.w | (k c) d -> p k d c | part=p
hf.model.layers.{i}.self_attn.o_proj.weight | model.layers.{i}.attn.attn_vec_einsum.w | d (h c) -> h c d
hf.model.layers.{i}.self_attn.q_norm.weight | model.layers.{i}.attn._query_norm.scale
hf.model.layers.{i}.self_attn.k_norm.weight | model.layers.{i}.attn._key_norm.scale
hf.model.layers.{i}.input_layernorm.weight | model.layers.{i}.pre_attention_norm.scale
hf.model.layers.{i}.post_attention_layernorm.weight | model.layers.{i}.post_attention_norm.scale
hf.model.layers.{i}.pre_feedforward_layernorm.weight | model.layers.{i}.pre_ffw_norm.scale
hf.model.layers.{i}.post_feedforward_layernorm.weight | model.layers.{i}.post_ffw_norm.scale
hf.model.layers.{i}.mlp.{rest}.weight | model.layers.{i}.mlp.{rest}.kernel | o d -> d o
hf.model.norm.weight | model.final_norm.scale
"""
GEMMA3 = {
    "residual-of-the-input": ("    outputs += attn_output\n", "    outputs += x\n"),
    "gelu-by-erf": ("gate_value = nnx.gelu(ff_gate)", "gate_value = nnx.gelu(ff_gate, approximate=False)"),
    "embedding-not-scaled": ("x *= jnp.sqrt(x.shape[-1]).astype(x.dtype)", "pass"),
}


@entry(
    "tunix",
    "transformers",
    "Gemma 3",
    "tied",
    "float32 only",
    needs=("tunix", "transformers"),
    faults={
        "residual-of-the-input": fault(LAYER, (f"{LAYER}.*norm", LAYER)),
        "gelu-by-erf": fault(*MLP),
        "embedding-not-scaled": fault(*inside("hf.model", "embed_tokens", "layers.0")),
        "window-off-by-one": fault(*ATTENTION),
        "theta-of-the-global-layers": fault(*ATTENTION),
    },
)
def outside_tunix_gemma3(wrong: str | None) -> Case:
    """``Gemma3ForCausalLM`` against Tunix's model: keys and values in one kernel, norms before and behind."""
    import jax.numpy as jnp
    from flax import nnx
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tunix = changed("tunix.models.gemma3.model", *line(GEMMA3, wrong))
    config = tunix.ModelConfig(
        **tunix_sizes(num_embed=VOCABULARY), param_dtype=jnp.float32,
        sliding_window_size=4 if wrong == "window-off-by-one" else 3,
        local_base_frequency=1_000_000 if wrong == "theta-of-the-global-layers" else 10_000,
    )  # fmt: skip
    more = {"layer_types": ["sliding_attention"], "sliding_window": 3, "query_pre_attn_scalar": HEAD}
    first = logits_of(Gemma3ForCausalLM(Gemma3TextConfig(**sizes(**more, rope_local_base_freq=1e4, rope_theta=1e6))))
    second = port_of(tunix.Gemma3(config, rngs=nnx.Rngs(0)))
    return Case(first, onto(first, second, rules(GEMMA3_NAMES, h=HEADS, k=KV_HEADS)), tokens(B, T))


BLOCK = {
    "residual-of-the-input": ("outputs += attn_output", "outputs += x"),
    "norms-exchanged": (
        "outputs = self.pre_ffw_norm(attn_output)\n\n    outputs = self.mlp(outputs)\n\n    "
        "if self.post_ffw_norm is not None:\n      outputs = self.post_ffw_norm(outputs)",
        "outputs = self.post_ffw_norm(attn_output)\n    outputs = self.pre_ffw_norm(self.mlp(outputs))",
    ),
    "keys-and-values-exchanged": ("key_proj, value_proj = self.kv_einsum", "value_proj, key_proj = self.kv_einsum"),
    "gelu-by-erf": ("nn.gelu(gate[..., 0, :])", "nn.gelu(gate[..., 0, :], approximate=False)"),
}


@entry(
    "gemma",
    "transformers",
    "Linen",
    "Gemma 3",
    "float32 only",
    needs=("gemma", "kauldron", "tensorflow", "transformers"),
    faults={
        "residual-of-the-input": fault("block", ("block.*norm", "block")),
        "norms-exchanged": fault("block", ("block.*", "block.pre_feedforward_layernorm")),
        "keys-and-values-exchanged": fault(*inside("block.self_attn", "*_proj", "*_norm")),
        "gelu-by-erf": fault("block.mlp", "block.mlp.*", ("block.mlp*", "block.mlp*")),
    },
)
def outside_gemma_block(wrong: str | None) -> Case:
    """``Gemma3DecoderLayer`` against DeepMind's Linen block, whose feed-forward layer shares its scope."""
    import torch
    from flax import linen as fnn
    from torch import nn
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3 import modeling_gemma3 as theirs

    modules = changed("gemma.gm.nn._modules", *line(BLOCK, wrong))
    window = 3
    config = Gemma3TextConfig(
        **sizes(layer_types=["sliding_attention"], sliding_window=window, query_pre_attn_scalar=HEAD),
        rope_local_base_freq=1e4,
    )

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.rope = theirs.Gemma3DecoderLayer(config, 0), theirs.Gemma3RotaryEmbedding(config)

        def forward(self, x, segment_pos, attn_mask):
            near = segment_pos[:, None, None, :] > segment_pos[:, None, :, None] - window
            mask = torch.where(attn_mask[:, None] & near, 0.0, -1e9)
            tables = self.rope(x, segment_pos, "sliding_attention")
            return self.block(x, position_embeddings=tables, attention_mask=mask, position_ids=segment_pos)

    class Linen(fnn.Module):
        @fnn.compact
        def __call__(self, x, segment_pos, attn_mask):
            block = modules.Block(
                num_heads=HEADS, num_kv_heads=KV_HEADS, embed_dim=WIDTH, head_dim=HEAD, hidden_dim=HIDDEN,
                use_post_attn_norm=True, use_post_ffw_norm=True, attn_type=modules.AttentionType.LOCAL_SLIDING,
                query_pre_attn_scalar=HEAD**-0.5, transpose_gating_einsum=True, sliding_window_size=window,
                use_qk_norm=True, name="block",
            )  # fmt: skip
            return block(x, segment_pos, None, attn_mask)[1]

    first = fresh(Torch())
    inputs = {"x": numbers(B, T, WIDTH), "segment_pos": POSITIONS, "attn_mask": CAUSAL}
    table = """
    block.self_attn.q_proj.weight | block.attn.q_einsum.w | (h c) d -> h d c
    block.self_attn.k_proj.weight, block.self_attn.v_proj.weight \
| block.attn.kv_einsum.w | (k c) d -> p k d c | part=p
    block.self_attn.o_proj.weight | block.attn.attn_vec_einsum.w | d (h c) -> h c d
    block.self_attn.q_norm.weight | block.attn._query_norm.scale
    block.self_attn.k_norm.weight | block.attn._key_norm.scale
    block.mlp.gate_proj.weight, block.mlp.up_proj.weight | block.mlp.gating_einsum | f d -> p f d | part=p
    block.mlp.down_proj.weight | block.mlp.linear | d f -> f d
    block.input_layernorm.weight | block.pre_attention_norm.scale
    block.post_attention_layernorm.weight | block.post_attention_norm.scale
    block.pre_feedforward_layernorm.weight | block.pre_ffw_norm.scale
    block.post_feedforward_layernorm.weight | block.post_ffw_norm.scale
    """
    carried = carry(held(first), rules(table, h=HEADS, k=KV_HEADS))
    return Case(first, linen(Linen(), carried, **inputs), inputs)


RG_LRU = {
    "gates-exchanged": ("log_a = -8.0 * gate_a *", "gate_a, gate_x = gate_x, gate_a\n    log_a = -8.0 * gate_a *"),
    "document-start-not-reset": ("a=a * (1 - reset[..., None])", "a=a"),
    "decay-not-squared": ("complex_lib.exp(log_a), complex_lib.exp(2 * log_a)", "(complex_lib.exp(log_a),) * 2"),
    "gradient-of-the-root-cut": (
        "sqrt_bound_derivative(1 - a_squared, 1000)",
        "sqrt_bound_derivative(1 - a_squared, 0.4)",
    ),
}


@entry(
    "recurrentgemma",
    "Linen",
    "RG-LRU",
    "packed",
    needs=("recurrentgemma", "typeguard"),
    faults={
        **{name: fault(*inside("", "input_gate", "a_gate")) for name in list(RG_LRU)[:3]},
        "gradient-of-the-root-cut": fault(*inside("", "input_gate", "a_gate"), direction="backward"),
    },
)
def outside_recurrentgemma_lru(wrong: str | None) -> Case:
    """The real-gated linear unit of torch against its Linen twin, with packed documents."""
    from recurrentgemma import common
    from recurrentgemma.torch import layers as torch_layers

    layers = changed("recurrentgemma.jax.layers", *line(RG_LRU, wrong))
    positions = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]], np.int32)
    inputs = {"x": numbers(2, 8, WIDTH), "segment_pos": positions}
    first = fresh(torch_layers.RGLRU(WIDTH, HEADS))
    second = layers.RGLRU(WIDTH, HEADS, scan_type=common.ScanType.LINEAR_NATIVE)
    return Case(first, linen(second, held(first), **inputs), inputs)


RESNET = {
    "relu-missing": ("        x += residual\n        x = nn.relu(x)", "        x += residual\n"),
    "padding-same": ("padding=((1, 1), (1, 1)),", "padding='SAME',"),
    "keras-eps": ("epsilon=1e-05", "epsilon=1e-03"),
}


@entry(
    "flaxmodels",
    "ResNet",
    "Linen",
    "BatchNorm",
    needs=("flaxmodels", "h5py"),
    faults={
        "relu-missing": fault("", ("downsample.1", ""), ("relu", "")),
        "padding-same": fault("conv1"),
        "keras-eps": fault("bn1"),
    },
)
def outside_flaxmodels_resnet(wrong: str | None) -> Case:
    """Pair a basic block as torchvision has it with that of flaxmodels, which halves the image."""
    from flax import linen as fnn
    from torch import nn

    resnet = changed("flaxmodels.resnet.resnet", *line(RESNET, wrong))
    channels, features = 4, 8

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(channels, features, 3, 2, 1, bias=False), nn.BatchNorm2d(features)
            self.conv2, self.bn2 = nn.Conv2d(features, features, 3, 1, 1, bias=False), nn.BatchNorm2d(features)
            halved = nn.Conv2d(channels, features, 1, 2, bias=False)
            self.downsample, self.relu = nn.Sequential(halved, nn.BatchNorm2d(features)), nn.ReLU()

        def forward(self, x):
            hidden = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return self.relu(hidden + self.downsample(x))

    class Linen(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            block = resnet.BasicBlock(features, downsample=True, block_name="b", name="block")
            return block(x.transpose(0, 2, 3, 1), {}, train=False).transpose(0, 3, 1, 2)

    first, image = fresh(Torch()), numbers(2, channels, 8, 8)
    rows = []
    for i, (conv, norm) in enumerate((("conv1", "bn1"), ("conv2", "bn2"), ("downsample.0", "downsample.1"))):
        rows.append(f"{conv}.weight | block.Conv_{i}.kernel | o i y x -> y x i o")
        words = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
        rows += [f"{norm}.{word} | block.BatchNorm_{i}.{other}" for word, other in words.items()]
    return Case(first, linen(Linen(), carry(held(first), rules("\n".join(rows))), image), image)


@entry(
    "equinox",
    "function",
    needs=("equinox",),
    faults={"mask-missing": fault("*"), "heads": fault("*"), "scores-not-scaled": fault("*")},
)
def outside_equinox_attention(wrong: str | None) -> Case:
    """``MultiheadAttention`` of torch, causal, against Equinox's, which takes one sequence."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import torch
    from torch import nn

    from attn_bridge import parity

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)

        def forward(self, x):
            hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
            return self.attention(x, x, x, attn_mask=hidden, need_weights=False)[0]

    first = fresh(Torch())
    heads = 2 if wrong == "heads" else HEADS
    made = eqx.nn.MultiheadAttention(heads, WIDTH, key=jax.random.key(0))
    own = held(first)
    query, key, value = np.split(own["attention.in_proj_weight"], 3)
    weights = {"query": query, "key": key, "value": value, "output": own["attention.out_proj.weight"]}

    def attend(weights, x):
        attention = made
        for name, array in weights.items():
            attention = eqx.tree_at(lambda tree, name=name: getattr(tree, f"{name}_proj").weight, attention, array)
        mask = None if wrong == "mask-missing" else jnp.tril(jnp.ones((T, T), bool))
        times = HEAD**0.5 if wrong == "scores-not-scaled" else 1.0
        return jax.vmap(lambda one: attention(one * times, one, one, mask=mask))(x)

    return Case(first, parity.function(attend, jax.tree.map(jnp.asarray, weights)), numbers(B, T, WIDTH))


@entry(
    "haiku",
    "function",
    "LSTM",
    needs=("haiku", "jmp", "tabulate"),
    faults={"forget-gate-plain": fault("*"), "gates-in-torchs-order": fault("*"), "backwards": fault("*")},
)
def outside_haiku_lstm(wrong: str | None) -> Case:
    """An LSTM by hand, as Haiku has it (gates i g f o, 1 added to the forget gate), against Haiku's."""
    import haiku as hk
    import jax
    import torch
    from torch import nn

    from attn_bridge import parity

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH + HIDDEN, 4 * HIDDEN)

        def forward(self, x):
            h = c = x.new_zeros(x.shape[0], HIDDEN)
            out = []
            for step in range(x.shape[1]):
                i, g, f, o = self.linear(torch.cat([x[:, step], h], -1)).chunk(4, -1)
                if wrong == "gates-in-torchs-order":
                    f, g = g, f
                forget = 0.0 if wrong == "forget-gate-plain" else 1.0
                c = torch.sigmoid(f + forget) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                out.append(h)
            return torch.stack(out, 1)

    def unroll(x):
        core = hk.LSTM(HIDDEN)
        found, _ = hk.dynamic_unroll(
            core, x, core.initial_state(x.shape[0]), time_major=False, reverse=wrong == "backwards"
        )
        return found

    net = hk.without_apply_rng(hk.transform(unroll))
    first, x = fresh(Torch()), numbers(B, T, WIDTH)
    shapes = jax.eval_shape(net.init, jax.random.key(0), x)
    own = held(first)
    (path,) = shapes
    weights = {path: {"w": own["linear.weight"].T, "b": own["linear.bias"]}}
    return Case(first, parity.function(net.apply, jax.tree.map(jax.numpy.asarray, weights)), x)


@entry(
    "keras",
    "function",
    "float32 only",
    needs=("keras", "optree", "h5py"),
    faults={"epsilon-of-torch": fault("*"), "padding-valid": fault("*"), "pool-of-the-maximum": fault("*")},
)
def outside_keras_convolutions(wrong: str | None) -> Case:
    """Convolutions, a norm and a pool of Keras on its JAX backend, against torch's."""
    import os

    os.environ.setdefault("KERAS_BACKEND", "jax")
    import jax.numpy as jnp
    import keras
    from torch import nn

    from attn_bridge import parity

    channels, features = 3, 8

    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, features, 3, padding=1)
            self.norm = nn.LayerNorm(features, eps=1e-3)
            self.head = nn.Linear(features, 5)

        def forward(self, image):
            hidden = self.norm(self.conv(image).permute(0, 2, 3, 1)).relu()
            return self.head(hidden.mean((1, 2)))

    layers = [
        keras.layers.Conv2D(features, 3, padding="valid" if wrong == "padding-valid" else "same"),
        keras.layers.LayerNormalization(epsilon=1e-5 if wrong == "epsilon-of-torch" else 1e-3),
        keras.layers.ReLU(),
        keras.layers.GlobalMaxPooling2D() if wrong == "pool-of-the-maximum" else keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(5),
    ]
    model = keras.Sequential([keras.Input((8, 8, channels)), *layers])
    first, image = fresh(Torch()), numbers(2, channels, 8, 8)
    last = image.transpose(0, 2, 3, 1)
    own = held(first)
    weights = [
        own["conv.weight"].transpose(2, 3, 1, 0), own["conv.bias"], own["norm.weight"], own["norm.bias"],
        own["head.weight"].T, own["head.bias"],
    ]  # fmt: skip
    names = [f"{one.path}" for one in model.trainable_variables]
    tree = {name: jnp.asarray(array) for name, array in zip(names, weights, strict=True)}

    def run(weights, x):
        return model.stateless_call([weights[name] for name in names], [], x)[0]

    return Case(first, parity.function(run, tree), image, {"second_inputs": last})
