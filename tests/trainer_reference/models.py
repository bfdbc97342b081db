"""Tiny models with random weights on disk, and a tokenizer that only pads."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

# Large enough for logits, attention and optimizer state to each take part of the peak, and for
# what is a few numbers long to stay far below 0.5 % of it.
VOCABULARY = 4096
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,  # as published
        "sliding_window": None,
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "moe_intermediate_size": 160,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,  # as published
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 48},
}


def write_model(name: str, folder: Path) -> Path:
    """Write the configuration and random weights of a model; return its folder."""
    configuration = AutoConfig.for_model(**_SHAPE | CONFIGURATIONS[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)
    model.save_pretrained(folder / name)
    return folder / name


def tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of words that no example uses: examples are token ids."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = {word: number for number, word in enumerate(special.values())}
    plain = Tokenizer(WordLevel(words, unk_token=special["unk_token"]))
    return PreTrainedTokenizerFast(tokenizer_object=plain, **special)
