"""Tiny random models of `transformers` that hold one of our text models, and folders of them in both spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers

from attn_parity.frameworks.torch.running.promotion import promoted

from .hf_folders import COHERE2_MOE, GATED, GEMMA3N, GEMMA4, GROUPED, LATENT, LLAMA4, MAMBA, SLIDING, SPARSE, saved

T = transformers
IDS = np.random.default_rng(7).integers(1, 25, (2, 5))

IMAGE = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SOUND = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_source_positions": 6,
    "max_position_embeddings": 6,
    "num_mel_bins": 5,
    "d_model": 8,
    "encoder_ffn_dim": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
}
PIXELS = {"hidden_size": 8, "out_hidden_size": 16, "intermediate_size": 8, "depth": 1, "num_heads": 2, "patch_size": 4}
OCR = {
    "hidden_size": 8,
    "output_channels": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "mlp_dim": 8,
    "window_size": 2,
    "global_attn_indexes": [0],
}
LLAMA = {**GROUPED, "model_type": "llama", "pad_token_id": 0}
MISTRAL = {**GROUPED, "model_type": "mistral", "sliding_window": 4, "pad_token_id": 0}
QWEN2 = {**GROUPED, "model_type": "qwen2"}
QWEN3 = {**GROUPED, "model_type": "qwen3", "head_dim": 6}
EXPERTS = {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2}
HYBRID = {**EXPERTS, **MAMBA, "shared_intermediate_size": 6, "layer_types": ["linear_attention", "full_attention"]}
CLIP, SIGLIP, PIXTRAL = ({**IMAGE, "model_type": f"{kind}_vision_model"} for kind in ("clip", "siglip", "siglip"))
PIXTRAL["model_type"] = "pixtral"


GRANITE = {**GROUPED, "model_type": "granite"}
SPEECH = {
    "encoder_config": {"input_dim": 5, "num_layers": 1, "hidden_dim": 8, "feedforward_mult": 1, "num_heads": 2,
                       "dim_head": 4, "output_dim": 5, "context_size": 4, "max_pos_emb": 8},
    "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 8, "num_hidden_layers": 1,
                         "num_attention_heads": 2, "intermediate_size": 8, "encoder_hidden_size": 8},
}  # fmt: skip


def sections(*sizes: int, interleaved: bool = False) -> dict[str, Any]:
    """Return the rotary part of a config of Qwen-VL."""
    if interleaved:
        return {"rope_parameters": {"rope_type": "default", "mrope_section": list(sizes), "mrope_interleaved": True,
                                    "rope_theta": 5000.0}}  # fmt: skip
    return {"rope_scaling": {"type": "mrope", "mrope_section": list(sizes)}, "rope_theta": 7000.0}


def of(text: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return a config with a text model."""
    return {"text_config": text, **parts}


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3Config", of({**SLIDING, "model_type": "gemma3_text"},
               vision_config=IMAGE)),
    "gemma4": ("Gemma4ForConditionalGeneration", "Gemma4Config",
               of({**GEMMA4, "model_type": "gemma4_text", "use_bidirectional_attention": "vision"},
                  vision_config={**IMAGE, "head_dim": 4, "num_key_value_heads": 2, "position_embedding_size": 16})),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedConfig",
                       of({**{key: value for key, value in GEMMA4.items() if "per_layer" not in key},
                           "model_type": "gemma4_unified_text"},
                          vision_config={"patch_size": 2, "mm_embed_dim": 8, "mm_posemb_size": 4},
                          audio_config={"audio_embed_dim": 8})),
    "llama4": ("Llama4ForConditionalGeneration", "Llama4Config",
               of({**LLAMA4, "model_type": "llama4_text", "pad_token_id": 0},
                  vision_config={**IMAGE, "vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8,
                                 "pixel_shuffle_ratio": 0.5, "intermediate_size": 32})),
    "llava": ("LlavaForConditionalGeneration", "LlavaConfig", of(LLAMA, vision_config=CLIP)),
    "llava_next": ("LlavaNextForConditionalGeneration", "LlavaNextConfig", of(MISTRAL, vision_config=CLIP)),
    "llava_next_video": ("LlavaNextVideoForConditionalGeneration", "LlavaNextVideoConfig",
                         of(LLAMA, vision_config=CLIP)),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", "LlavaOnevisionConfig",
                        of(QWEN2, vision_config=SIGLIP)),
    "vipllava": ("VipLlavaForConditionalGeneration", "VipLlavaConfig",
                 of(LLAMA, vision_config=CLIP, vision_feature_layers=[-1])),
    "video_llava": ("VideoLlavaForConditionalGeneration", "VideoLlavaConfig", of(LLAMA, vision_config=CLIP)),
    "mistral3": ("Mistral3ForConditionalGeneration", "Mistral3Config", of(MISTRAL, vision_config=PIXTRAL)),
    "internvl": ("InternVLForConditionalGeneration", "InternVLConfig", of(QWEN2, vision_config=IMAGE)),
    "got_ocr2": ("GotOcr2ForConditionalGeneration", "GotOcr2Config", of(QWEN2, vision_config=OCR)),
    "idefics2": ("Idefics2ForConditionalGeneration", "Idefics2Config",
                 of(MISTRAL, vision_config=IMAGE, perceiver_config={"hidden_size": 16, "resampler_n_latents": 2,
                    "resampler_depth": 1, "resampler_n_heads": 2, "num_key_value_heads": 2, "resampler_head_dim": 8})),
    "idefics3": ("Idefics3ForConditionalGeneration", "Idefics3Config", of(LLAMA, vision_config=IMAGE, scale_factor=1)),
    "smolvlm": ("SmolVLMForConditionalGeneration", "SmolVLMConfig", of(LLAMA, vision_config=IMAGE, scale_factor=1)),
    "ovis2": ("Ovis2ForConditionalGeneration", "Ovis2Config",
              of(QWEN2, vision_config={**IMAGE, "vocab_size": 9, "num_visual_indicator_tokens": 5}, hidden_size=16)),
    "deepseek_vl": ("DeepseekVLForConditionalGeneration", "DeepseekVLConfig", of(LLAMA, vision_config=SIGLIP)),
    "lighton_ocr": ("LightOnOcrForConditionalGeneration", "LightOnOcrConfig", of(QWEN3, vision_config=PIXTRAL)),
    "voxtral": ("VoxtralForConditionalGeneration", "VoxtralConfig", of(LLAMA, audio_config=SOUND)),
    "audioflamingo3": ("AudioFlamingo3ForConditionalGeneration", "AudioFlamingo3Config", of(QWEN2, audio_config=SOUND)),
    "musicflamingo": ("MusicFlamingoForConditionalGeneration", "MusicFlamingoConfig",
                      of(QWEN2, audio_config={**SOUND, "model_type": "audioflamingo3_encoder"})),
    "granite_speech": ("GraniteSpeechForConditionalGeneration", "GraniteSpeechConfig", of(GRANITE, **SPEECH)),
    "granite_speech_plus": ("GraniteSpeechPlusForConditionalGeneration", "GraniteSpeechPlusConfig",
                            of(GRANITE, **SPEECH)),
    "vibevoice_asr": ("VibeVoiceAsrForConditionalGeneration", "VibeVoiceAsrConfig",
                      of(QWEN2, **{f"{kind}_tokenizer_encoder_config": {"hidden_size": 8, "num_filters": 2,
                         "depths": [1, 1], "downsampling_ratios": [2]} for kind in ("acoustic", "semantic")})),
    "glmasr": ("GlmAsrForConditionalGeneration", "GlmAsrConfig", of(LLAMA, audio_config=SOUND)),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", "Qwen2AudioConfig", of(QWEN2, audio_config=SOUND)),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
                 of({**GROUPED, **sections(1, 1, 0)}, vision_config={"embed_dim": 8, "hidden_size": 16, "depth": 1,
                    "num_heads": 2, "mlp_ratio": 1, "patch_size": 4})),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
                   of({**GROUPED, **sections(1, 0, 1)}, vision_config=PIXELS)),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig",
                 of({**GROUPED, "head_dim": 8, **sections(2, 1, 1, interleaved=True)},
                    vision_config={**PIXELS, "deepstack_visual_indexes": [0]})),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config",
                of({**GATED, "model_type": "qwen3_5_text"}, vision_config=PIXELS)),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig",
                    of({**GATED, "model_type": "qwen3_5_moe_text"}, vision_config=PIXELS)),
    "moss_transcribe_diarize": ("MossTranscribeDiarizeForConditionalGeneration", "MossTranscribeDiarizeConfig",
                                of(QWEN3, audio_config=SOUND)),
    "emu3": ("Emu3ForConditionalGeneration", "Emu3Config",
             of({**GROUPED, "model_type": "emu3_text_model", "pad_token_id": 0}, vocabulary_map={"<image>": 27},
                vq_config={"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "hidden_size": 32,
                           "codebook_size": 4, "attn_resolutions": [3]})),
    "fuyu": ("FuyuForCausalLM", "FuyuConfig",
             of({"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                 "num_attention_heads": 2, "model_type": "persimmon", "pad_token_id": 0}, patch_size=2)),
    "phi4_multimodal": ("Phi4MultimodalForCausalLM", "Phi4MultimodalConfig",
                        {**GROUPED, "pad_token_id": 0,
                         "vision_config": {**IMAGE, "crop_size": 28},
                         "audio_config": {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
                                          "num_blocks": 1, "nemo_conv_channels": 8, "ext_pw_out_channel": 8,
                                          "depthwise_separable_out_channel": 8}}),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig",
                   {**GROUPED, "head_dim": 6, "mamba_num_heads": 4, "mamba_head_dim": 4, "ssm_state_size": 3,
                    "n_groups": 2, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig",
                  {**GROUPED, "head_dim": 6, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4,
                   "mlp_only_layers": [1]}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", GATED),
    "gemma3n_text": ("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N),
    "cohere2_moe": ("Cohere2MoeForCausalLM", "Cohere2MoeConfig", COHERE2_MOE),
    "llama4_text": ("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4),
    "gemma4_text": ("Gemma4ForCausalLM", "Gemma4TextConfig",
                    {**GEMMA4, "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 3,
                     "top_k_experts": 2, "moe_intermediate_size": 4}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", GATED),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", GATED),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", HYBRID),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig",
                 {**EXPERTS, "num_experts": 3, "moe_intermediate_size": 4, "num_dense_layers": 1,
                  "layer_types": ["conv", "full_attention"]}),
    "lfm3": ("Lfm3ForCausalLM", "Lfm3Config",
             {**GROUPED, "head_dim": 8, "num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 1,
              "eos_token_id": 2, "layer_types": ["conv", "full_attention", "sliding_attention"]}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig",
                      {**EXPERTS, "head_dim": 12, "v_head_dim": 5, "moe_intermediate_size": 4, "n_routed_experts": 3,
                       "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]}),
    "jamba": ("JambaForCausalLM", "JambaConfig",
              {**EXPERTS, "num_experts": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 3,
               "mamba_dt_rank": 2}),
    "minimax": ("MiniMaxForCausalLM", "MiniMaxConfig", {**EXPERTS, "head_dim": 6}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", SPARSE),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", SPARSE),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig",
                    {**LATENT, "pad_token_id": 0, "linear_num_heads": 2, "linear_head_dim": 4, "num_experts": 3,
                     "num_hidden_layers": 3,
                     "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig",
                    {**GROUPED, "pad_token_id": 0, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                     "linear_key_head_dim": 4, "linear_value_head_dim": 7}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**EXPERTS, "head_dim": 6}),
}  # fmt: skip
"""``model_type`` -> class, its config's, and what that holds."""

TOKENS = dict.fromkeys(("image_token_index", "image_token_id", "audio_token_id", "audio_token_index"), 27) | {
    "video_token_id": 28, "video_token_index": 28, "vision_start_token_id": 29, "vision_end_token_id": 30
}  # fmt: skip


def folders(name: str, target: Path) -> tuple[dict[str, Path], np.ndarray]:
    """Write a model as `transformers` saves it and by its names in memory; return the folders and text's logits."""
    kind, config, sizes = MODELS[name]
    tokens = TOKENS if "text_config" in sizes else {}
    model = saved(target / "saved", getattr(T, kind), getattr(T, config), {**tokens, **sizes}, "1GB")
    memory = target / "memory"
    memory.mkdir()
    (memory / "config.json").write_bytes((target / "saved" / "config.json").read_bytes())
    own: dict[int, str] = {}
    for full, one in model.state_dict().items():
        own.setdefault(one.data_ptr(), full)
    state = {full: one.contiguous() for full, one in model.state_dict().items() if own[one.data_ptr()] == full}
    safetensors.torch.save_file(state, memory / "model.safetensors", {"format": "pt"})
    with promoted(), torch.no_grad():
        exact = getattr(T, kind).from_pretrained(target / "saved", dtype=torch.float64).eval()
        for module in exact.modules():
            if hasattr(module, "decay_factors"):  # of MiniMax, which the file has in float32
                rate = module.get_slope_rate()
                for one, value in zip(("query", "key", "diagonal"), module.decay_factors(rate), strict=True):
                    getattr(module, f"{one}_decay").copy_(value)
                module.slope_rate.copy_(rate)
        logits = exact(input_ids=torch.from_numpy(IDS)).logits.numpy()
    return {"saved": target / "saved", "memory": memory}, logits
