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
TOKENS_PER_IMAGE = {"gemma3": 4, "llava": 16}


def tiny_vision(config: dict[str, Any]) -> Model:
    """A vision-language model without weights, named after its family."""
    return Model(name=config["model_type"], source="made for this test", config=config)
