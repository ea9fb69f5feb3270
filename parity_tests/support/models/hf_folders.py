"""Folders of tiny random `transformers` models, of every family that a layout of whole models is for."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from .hf_configs import LATENT_HEADS

T = transformers
GROUPED = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT = {"vocab_size": 31, "n_positions": 16, "n_embd": 8, "n_head": 2, "n_layer": 2}
BERT = {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"}
SLIDING = {**GROUPED, "head_dim": 6, "sliding_window": 4}
LATENT = {
    **GROUPED,
    "num_hidden_layers": 3,
    **LATENT_HEADS,
    "first_k_dense_replace": 1,
    "n_routed_experts": 3,
    "moe_intermediate_size": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
}
SPARSE = {**LATENT, "num_key_value_heads": 4, "index_n_heads": 8, "index_head_dim": 6, "index_topk": 3}
"""Heads of the indexer enough that no two of its scores are zero, and so equal."""
GEMMA3N = {
    **SLIDING,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 5,
    "vocab_size_per_layer_input": 29,
    "activation_sparsity_pattern": [0.5, 0.0, 0.7, 0.0],
    "laurel_rank": 3,
    "altup_num_inputs": 3,
}
GEMMA4 = {
    **SLIDING,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 8,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 5,
    "vocab_size_per_layer_input": 31,
}
GATED = {
    **GROUPED,
    "num_hidden_layers": 5,
    "head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "num_experts": 3,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 6,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 3, "mamba_d_conv": 3}
STATES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 3,
}
CHANNELS = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 3, "time_step_rank": 2}
LLAMA4 = {
    **GROUPED,
    "head_dim": 6,
    "intermediate_size_mlp": 24,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 4,
    "floor_scale": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
}
COHERE2_MOE = {
    **SLIDING,
    "prefix_dense_intermediate_size": 12,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["full_attention", "sliding_attention"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "tie_word_embeddings": False,
}
JAMBA = {
    **GROUPED,
    "num_experts": 3,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 3,
    "mamba_dt_rank": 2,
}
NEMOTRON = {**GROUPED, "head_dim": 6, "mamba_num_heads": 4, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 3}
DELTA = {
    **GROUPED,
    "pad_token_id": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
SIDES = {
    "vocab_size": 31,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 12,
    "pad_token_id": 0,
}
T5 = {"vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
SPEECH = {
    **SIDES,
    "num_mel_bins": 5,
    "max_source_positions": 7,
    "max_target_positions": 9,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "gpt2": ("hf-gpt2", T.GPT2LMHeadModel, T.GPT2Config, GPT),
    "gpt2-bare": ("hf-gpt2", T.GPT2Model, T.GPT2Config, GPT),
    "gpt2-untied": ("hf-gpt2", T.GPT2LMHeadModel, T.GPT2Config, {**GPT, "tie_word_embeddings": False}),
    "bert": ("hf-bert", T.BertModel, T.BertConfig, BERT),
    "bert-masked": ("hf-bert", T.BertForMaskedLM, T.BertConfig, BERT),
    "llama": ("hf-llama", T.LlamaForCausalLM, T.LlamaConfig, GROUPED),
    "llama-tied": ("hf-llama", T.LlamaForCausalLM, T.LlamaConfig, {**GROUPED, "tie_word_embeddings": True}),
    "llama-bare": ("hf-llama", T.LlamaModel, T.LlamaConfig, {**GROUPED, "tie_word_embeddings": True}),
    "mistral": ("hf-llama", T.MistralForCausalLM, T.MistralConfig, {**GROUPED, "sliding_window": 4}),
    "qwen2": ("hf-llama", T.Qwen2ForCausalLM, T.Qwen2Config, GROUPED),
    "qwen3": ("hf-llama", T.Qwen3ForCausalLM, T.Qwen3Config, {**GROUPED, "head_dim": 6}),
    "gemma2": ("hf-gemma", T.Gemma2ForCausalLM, T.Gemma2Config, SLIDING),
    "gemma3": ("hf-gemma", T.Gemma3ForCausalLM, T.Gemma3TextConfig, SLIDING),
    "gemma3-bare": ("hf-gemma", T.Gemma3TextModel, T.Gemma3TextConfig, {**SLIDING, "attention_bias": True}),
    "gemma3n": ("hf-gemma3n", T.Gemma3nForCausalLM, T.Gemma3nTextConfig, GEMMA3N),
    "gemma4": ("hf-gemma4", T.Gemma4ForCausalLM, T.Gemma4TextConfig, GEMMA4),
    "gemma4-moe": ("hf-gemma4-moe", T.Gemma4ForCausalLM, T.Gemma4TextConfig,
                   {**GEMMA4, "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 3,
                    "top_k_experts": 2, "moe_intermediate_size": 4}),
    "llama4": ("hf-llama4", T.Llama4ForCausalLM, T.Llama4TextConfig, LLAMA4),
    "cohere2-moe": ("hf-cohere2-moe", T.Cohere2MoeForCausalLM, T.Cohere2MoeConfig, COHERE2_MOE),
    "gpt-oss": ("hf-gpt-oss", T.GptOssForCausalLM, T.GptOssConfig,
                {**SLIDING, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "olmo": ("hf-olmo", T.OlmoForCausalLM, T.OlmoConfig, GROUPED),
    "olmo-tied": ("hf-olmo", T.OlmoForCausalLM, T.OlmoConfig, {**GROUPED, "tie_word_embeddings": True}),
    "olmo2": ("hf-olmo2", T.Olmo2ForCausalLM, T.Olmo2Config, GROUPED),
    "olmo3": ("hf-olmo2", T.Olmo3ForCausalLM, T.Olmo3Config, {**GROUPED, "sliding_window": 4}),
    "deepseek-v2": ("hf-deepseek", T.DeepseekV2ForCausalLM, T.DeepseekV2Config, {**LATENT, "attention_bias": True}),
    "deepseek-v2-lite": ("hf-deepseek", T.DeepseekV2ForCausalLM, T.DeepseekV2Config, {**LATENT, "q_lora_rank": None}),
    "deepseek-v3": ("hf-deepseek", T.DeepseekV3ForCausalLM, T.DeepseekV3Config, LATENT),
    "qwen3-next": ("hf-qwen3-next", T.Qwen3NextForCausalLM, T.Qwen3NextConfig, GATED),
    "qwen3.5": ("hf-qwen3-5", T.Qwen3_5ForCausalLM, T.Qwen3_5TextConfig, GATED),
    "mamba2": ("hf-mamba2", T.Mamba2ForCausalLM, T.Mamba2Config, {**STATES, "use_bias": True}),
    "mamba2-bare": ("hf-mamba2", T.Mamba2Model, T.Mamba2Config, {**STATES, "tie_word_embeddings": True}),
    "mamba": ("hf-mamba", T.MambaForCausalLM, T.MambaConfig, {**CHANNELS, "use_bias": True}),
    "mamba-bare": ("hf-mamba", T.MambaModel, T.MambaConfig, CHANNELS),
    "falcon-mamba": ("hf-mamba", T.FalconMambaForCausalLM, T.FalconMambaConfig,
                     {**CHANNELS, "tie_word_embeddings": False}),
    "lfm2": ("hf-lfm2", T.Lfm2ForCausalLM, T.Lfm2Config, {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    "modernbert-decoder": ("hf-modernbert-decoder", T.ModernBertDecoderForCausalLM, T.ModernBertDecoderConfig,
                           {**{key: GROUPED[key] for key in GROUPED if key not in ("num_key_value_heads", "head_dim")},
                            "pad_token_id": 0}),
    "mimo-v2-flash": ("hf-mimo-v2-flash", T.MiMoV2FlashForCausalLM, T.MiMoV2FlashConfig,
                      {**GROUPED, "num_attention_heads": 8, "head_dim": 6, "v_head_dim": 5, "n_routed_experts": 3,
                       "layer_types": ["full_attention", "sliding_attention"], "num_experts_per_tok": 2,
                       "moe_intermediate_size": 4}),
    "lfm3": ("hf-lfm3", T.Lfm3ForCausalLM, T.Lfm3Config,
             {**GROUPED, "layer_types": ["conv", "full_attention"], "pad_token_id": 0}),
    "lfm2-moe": ("hf-lfm2-moe", T.Lfm2MoeForCausalLM, T.Lfm2MoeConfig,
                 {**GROUPED, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 3,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 4}),
    "jamba": ("hf-jamba", T.JambaForCausalLM, T.JambaConfig, JAMBA),
    "bamba": ("hf-bamba", T.BambaForCausalLM, T.BambaConfig, {**GROUPED, **MAMBA, "attn_layer_indices": [1]}),
    "falcon-h1": ("hf-falcon-h1", T.FalconH1ForCausalLM, T.FalconH1Config, {**GROUPED, **MAMBA, "mamba_d_ssm": 32}),
    "nemotron-h": ("hf-nemotron-h", T.NemotronHForCausalLM, T.NemotronHConfig,
                   {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    "granite-4": ("hf-granitemoehybrid", T.GraniteMoeHybridForCausalLM, T.GraniteMoeHybridConfig,
                  {**GROUPED, **MAMBA, "num_local_experts": 3, "shared_intermediate_size": 6,
                   "layer_types": ["linear_attention", "full_attention"]}),
    "granite-4-dense": ("hf-granitemoehybrid-dense", T.GraniteMoeHybridForCausalLM, T.GraniteMoeHybridConfig,
                        {**GROUPED, **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 6,
                         "layer_types": ["full_attention", "linear_attention"]}),
    "minimax": ("hf-minimax", T.MiniMaxForCausalLM, T.MiniMaxConfig, {**GROUPED, "num_local_experts": 3}),
    "kimi-linear": ("hf-kimi-linear", T.KimiLinearForCausalLM, T.KimiLinearConfig,
                    {**LATENT, "pad_token_id": 0, "linear_num_heads": 2, "linear_head_dim": 4, "num_experts": 3,
                     "num_hidden_layers": 3,
                     "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "olmo-hybrid": ("hf-olmo-hybrid", T.OlmoHybridForCausalLM, T.OlmoHybridConfig, DELTA),
    "bloom": ("hf-bloom", T.BloomForCausalLM, T.BloomConfig,
              {"vocab_size": 31, "hidden_size": 24, "n_layer": 2, "n_head": 6}),
    "bloom-bare": ("hf-bloom", T.BloomModel, T.BloomConfig,
                   {"vocab_size": 31, "hidden_size": 24, "n_layer": 2, "n_head": 6}),
    "bart": ("hf-bart", T.BartForConditionalGeneration, T.BartConfig, SIDES),
    "bart-bare": ("hf-bart", T.BartModel, T.BartConfig, SIDES),
    "whisper": ("hf-whisper", T.WhisperForConditionalGeneration, T.WhisperConfig, SPEECH),
    "t5": ("hf-t5", T.T5ForConditionalGeneration, T.T5Config, T5),
    "umt5": ("hf-umt5", T.UMT5ForConditionalGeneration, T.UMT5Config, T5),
    "t5-bare": ("hf-t5", T.T5Model, T.T5Config, T5),
    "whisper-bare": ("hf-whisper", T.WhisperModel, T.WhisperConfig, SPEECH),
}  # fmt: skip
"""Word -> layout, class, config, and what the config says."""


COMPUTED = ("slope_rate", "_decay")
"""Endings of buffers that follow from the config."""


def saved(folder, kind, config, sizes, shard):
    """Save a model with weights that hide nothing, its buffers included, and return it."""
    model = kind(config(**sizes)).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
        state = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in state and buffer.is_floating_point() and not name.endswith(COMPUTED):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def attention_of(arrays, path):
    """Return the arrays below a path, without it."""
    return {name.removeprefix(path): array for name, array in arrays.items() if name.startswith(path)}


def equal(one, two):
    """Say whether two dicts hold the same names, dtypes and numbers."""
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and np.array_equal(one[name], two[name]) for name in one
    )
