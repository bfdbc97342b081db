"""Tiny vision-language models, by the configurations of transformers' own classes."""

from typing import Any

from trials.records.model import Model

IMAGE = {"image_size": 32, "patch_size": 8}
TOWER = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
} | IMAGE
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 4,
    "image_token_index": 90,
    "text_config": DECODER
    | {"model_type": "gemma3_text", "head_dim": 16, "layer_types": ["full_attention"] * 6},
    "vision_config": TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
}
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 90,
    "text_config": DECODER | {"model_type": "llama"},
    "vision_config": TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
"""Positions of tokens in time, height and width."""
TOKENS = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92}
PATCHES = {
    "depth": 3,
    "num_heads": 3,
    "hidden_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": DECODER["hidden_size"],
}
"""A tower that takes images of any size."""


def any_size(family: str, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """Configuration of a model of Qwen's with the given facts of its parts."""
    decoder = DECODER | {"model_type": f"{family}_text", "rope_parameters": ROPE} | text
    config = {"model_type": family, "text_config": decoder, "vision_config": PATCHES | tower}
    return config | TOKENS | {"video_token_id": 93}


QWEN2 = any_size("qwen2_vl", {}, {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2})
WINDOWED = {"window_size": 16, "fullatt_block_indexes": [1]}
QWEN25 = any_size("qwen2_5_vl", {}, WINDOWED | {"intermediate_size": 96})
FEATURES = {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64}
QWEN3 = any_size("qwen3_vl", {"head_dim": 16}, FEATURES | {"intermediate_size": 96})
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN3_MOE = any_size(
    "qwen3_vl_moe", EXPERTS | {"head_dim": 16}, FEATURES | {"intermediate_size": 96}
)
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "num_hidden_layers": 16}
WIDTHS = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
PART = ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
QWEN35 = any_size(
    "qwen3_5",
    LINEAR | WIDTHS | {"rope_parameters": PART},
    {"num_position_embeddings": 64, "intermediate_size": 96},
)
QWEN35_MOE = any_size(
    "qwen3_5_moe",
    LINEAR | WIDTHS | EXPERTS | {"rope_parameters": PART, "shared_expert_intermediate_size": 32},
    {"num_position_embeddings": 64, "intermediate_size": 96},
) | {"initializer_range": 0.02}  # as of GLM_MOE below
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "image_token_id": 90,
    "video_token_id": 93,
    "audio_token_id": 94,
    "text_config": DECODER
    | {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "layer_types": ["full_attention"] * 6,
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "patch_size": 2,
        "position_embedding_size": 64,
    },
}
GLM = any_size(
    "glm4v",
    {"pad_token_id": 0},
    {"intermediate_size": 96, "image_size": 16, "in_channels": 3, "out_hidden_size": 64},
) | {"image_start_token_id": 91, "image_end_token_id": 92}
GLM46 = GLM | {
    "model_type": "glm46v",
    "vision_config": GLM["vision_config"] | {"model_type": "glm4v_vision"},
}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM_MOE = GLM | {
    "model_type": "glm4v_moe",
    "initializer_range": 0.02,  # the class draws weights by it, and has none
    "text_config": GLM["text_config"]
    | ROUTED
    | {
        "model_type": "glm4v_moe_text",
        "head_dim": 16,
        "rope_parameters": ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
    },
}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 16, "image_size": 64, "patch_size": 4}
MISTRAL3: dict[str, Any] = {
    "model_type": "mistral3",
    "image_token_index": 90,
    "spatial_merge_size": 2,
    "text_config": DECODER | {"model_type": "mistral", "head_dim": 16},
    "vision_config": PIXTRAL,
}
LLAVA_PIXTRAL = LLAVA | {"vision_config": PIXTRAL, "vision_feature_select_strategy": "full"}
MLLAMA: dict[str, Any] = {
    "model_type": "mllama",
    "image_token_index": 90,
    "text_config": DECODER
    | {
        "model_type": "mllama_text_model",
        "pad_token_id": 0,
        "num_hidden_layers": 20,
        "cross_attention_layers": [3, 8, 13, 18],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "vision_config": TOWER
    | {
        "model_type": "mllama_vision_model",
        "attention_heads": 3,
        "num_global_layers": 1,
        "vision_output_dim": 144,
        "max_num_tiles": 2,
        "intermediate_layers_indices": [0, 1],
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    },
}
SMOL: dict[str, Any] = {
    "model_type": "smolvlm",
    "image_token_id": 90,
    "scale_factor": 2,
    "text_config": DECODER | {"model_type": "llama", "pad_token_id": 0},
    "vision_config": TOWER,
}
IDEFICS3 = SMOL | {"model_type": "idefics3"}
SIGLIP = GEMMA["vision_config"]
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_vl",
    "image_token_id": 90,
    "text_config": DECODER | {"model_type": "llama"},
    "vision_config": SIGLIP,
}
EXAONE = any_size(
    "exaone4_5",
    {"model_type": "exaone4", "layer_types": ["full_attention"] * 6, "rope_parameters": None},
    WINDOWED | {"intermediate_size": 96, "num_key_value_heads": 3},
)
LLAMA4: dict[str, Any] = {
    "model_type": "llama4",
    "image_token_index": 90,
    "text_config": DECODER
    | {
        "model_type": "llama4_text",
        "num_hidden_layers": 8,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 16,
        "head_dim": 16,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "pad_token_id": 0,
    },
    "vision_config": TOWER
    | {
        "model_type": "llama4_vision_model",
        "intermediate_size": 192,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
}
SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
    },
    "vision_config": {
        "model_type": "llama4_vision_model",
        "hidden_size": 1408,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "image_size": 336,
        "vision_output_dim": 4096,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
    },
}
"""Llama-4-Scout-17B-16E as published."""
HYBRID: dict[str, Any] = DEEPSEEK | {
    "model_type": "deepseek_vl_hybrid",
    "high_res_vision_config": {
        "model_type": "sam_vision_model",
        "hidden_size": 48,
        "output_channels": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 64,
        "patch_size": 8,
        "global_attn_indexes": [1],
        "window_size": 4,
        "mlp_dim": 96,
    },
}
LLAVA_NEXT = LLAVA | {
    "model_type": "llava_next",
    "image_grid_pinpoints": [[64, 64], [32, 96]],
    "vision_config": LLAVA["vision_config"] | {"patch_size": 16},
}
"""Images of four tiles, or three in a row, beside the whole."""
ONEVISION = LLAVA_NEXT | {
    "model_type": "llava_onevision",
    "video_token_index": 93,
    "vision_aspect_ratio": "anyres_max_2",
    "text_config": DECODER | {"model_type": "qwen2"},
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_config": SIGLIP | {"patch_size": 16},
}
LFM2: dict[str, Any] = {
    "model_type": "lfm2_vl",
    "image_token_id": 90,
    "projector_hidden_size": 96,
    "text_config": DECODER
    | {"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention"] * 2},
    "vision_config": TOWER
    | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
}
LLAVA_NEXT_VIDEO = LLAVA_NEXT | {"model_type": "llava_next_video", "video_token_index": 93}
AYA = LLAVA | {
    "model_type": "aya_vision",
    "text_config": DECODER
    | {"model_type": "cohere2", "layer_types": ["full_attention"] * 6, "pad_token_id": 0},
    "vision_config": SIGLIP,
}
COHERE = AYA | {
    "model_type": "cohere2_vision",
    "image_token_id": 90,
    "alignment_intermediate_size": 128,
}
JANUS: dict[str, Any] = DEEPSEEK | {
    "model_type": "janus",
    "vision_config": TOWER
    | {"model_type": "janus_vision_model", "projection_dim": 64, "num_image_tokens": 16},
    "vq_config": {
        "model_type": "janus_vqgan",
        "embed_dim": 8,
        "num_embeddings": 32,
        "latent_channels": 16,
        "double_latent": False,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "projection_dim": 64,
        "image_token_embed_dim": 64,
        "num_patches": 4,
    },
}
PADDLE = any_size("paddleocr_vl", {"head_dim": 16}, {})
PADDLE["vision_config"] = TOWER | {"patch_size": 4, "spatial_merge_size": 2}
ERNIE = any_size(
    "ernie4_5_vl_moe",
    {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [32, 16],
        "moe_num_shared_experts": 1,
        "rope_parameters": ROPE | {"mrope_section": [3, 3, 2]},
    },
    {},
) | {"initializer_range": 0.02, "image_start_token_id": 91, "image_end_token_id": 92}
ERNIE["vision_config"] = {"intermediate_size": 96} | {
    key: value
    for key, value in PATCHES.items()
    if key not in {"temporal_patch_size", "out_hidden_size"}
}
OF_ANY_SIZE = (
    ERNIE,
    QWEN2,
    QWEN25,
    QWEN3,
    QWEN3_MOE,
    QWEN35,
    GEMMA4,
    GLM,
    GLM46,
    GLM_MOE,
    MISTRAL3,
    QWEN35_MOE,
    EXAONE,
    PADDLE,
    LFM2,
)
LAYERS = {"llama4": 2, "mllama": 4, "qwen3_5": 4, "qwen3_5_moe": 4}
"""Fewest layers of all kinds, of models that do not have all in three."""
TOKENS_PER_IMAGE = {
    "gemma3": 4,
    "llava": 16,
    "smolvlm": 4,
    "idefics3": 4,
    "mllama": 1,
    "llava_next": 7,
    "llava_next_video": 7,
    "aya_vision": 4,
    "cohere2_vision": 4,
    "janus": 16,
    "llava_onevision": 5,
    "deepseek_vl": 16,
    "deepseek_vl_hybrid": 16,
    "llama4": 4,
} | dict.fromkeys((config["model_type"] for config in OF_ANY_SIZE), 6)


def tiny_vision(config: dict[str, Any]) -> Model:
    """A vision-language model without weights, named after its family."""
    return Model(name=config["model_type"], source="made for this test", config=config)


def of_few_layers(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one decoder layer of each kind, or three."""
    text = dict(config["text_config"])
    text["num_hidden_layers"] = layers = LAYERS.get(config["model_type"], 3)
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    if "cross_attention_layers" in text:
        text["cross_attention_layers"] = [
            layer for layer in text["cross_attention_layers"] if layer < layers
        ]
    return config | {"text_config": text}
