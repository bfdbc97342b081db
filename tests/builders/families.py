"""Tiny models of every causal language model family of transformers."""

import json
from typing import Any

from pydantic import ValidationError
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpu_catalog.catalog import load_catalog
from trials.models.build import KernelError
from trials.recipes.fields import Method
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import incompatibility, with_defaults
from trials.records.model import Model
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing.tracing_worker import REFUSALS, Tracing, refusal

METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
GPU = load_catalog().gpu("A100-80GB-SXM")

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
MOST_USED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2"),
    *("phi3", "gpt2", "mixtral", "qwen3_moe", "falcon"),
)
# Families whose default configurations make no tiny language model by their sizes alone, nor do
# they train on tokens alone.
UNSHRINKABLE = frozenset(
    {
        *("bailing_hybrid", "cohere_compass_text", "dbrx", "dots1", "gemma3n_text"),
        *("gemma4_assistant", "git", "reformer", "xlstm", "xmod"),
    }
)
WIDTH, HEADS, LAYERS = 64, 4, 2
# Fields that are absent from the default configuration, but not from published ones.
PUBLISHED = frozenset({"head_dim", "num_experts_per_tok", "num_key_value_heads"})
OVERRIDES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
}
LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("decoder_layers", "encoder_layers"),
)
# Sizes by the names that configurations have for them.
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(LAYER_COUNTS, LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        (
            "head_dim",
            "query_pre_attn_scalar",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
            "rotary_dim",
        ),
        WIDTH // HEADS,
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups"), 1),
    **dict.fromkeys(("num_kv_shared_layers", "moe_layer_start_index"), 0),
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "decoder_vocab_size": 256,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}


def tiny_model(family: str) -> Model | None:
    """A tiny model of a family by its default configuration; None where it has no vocabulary."""
    config = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    try:
        model = Model(
            name=family,
            source="made for this test",
            config=_shrunk(config) | OVERRIDES.get(family, {}) | {"model_type": family},
        )
    except ValidationError:
        return None
    return None if model.has_vision else model


def refusal_of(model: Model, settings: Recipe) -> str | None:
    """Line that refuses a recipe as a prediction does; None where it is traced as given."""
    filled = with_defaults(settings, model, GPU)
    impossible = incompatibility(filled, model, GPU)
    if impossible is not None:
        return impossible
    try:
        Tracing().trace(TraceRequest(cell=cell_of(model, filled), model=model))
    except KernelError as error:
        if settings.attention is None and "attention" in str(error):
            return refusal_of(model, settings.model_copy(update={"attention": "eager"}))
        return refusal(model, error)
    except REFUSALS as error:
        return refusal(model, error)
    return None


def cell_of(model: Model, settings: Recipe, gpu: str = GPU.key) -> Cell:
    """A cell of 16 tokens."""
    return Cell(
        gpu=gpu,
        model=model.name,
        recipe=settings,
        experts=model.experts,
        active_experts=model.active_experts,
        seq_len=16,
    )


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with small sizes, its parts included, without lists of layers."""
    layers = {config[key] for key in LAYER_COUNTS if isinstance(config.get(key), int)}
    small = {}
    has_latent_heads = "qk_rope_head_dim" in config
    for key, value in config.items():
        by_layer = isinstance(value, (list, dict)) and len(value) in layers and len(value) > LAYERS
        if by_layer or key == "per_layer_config":
            continue  # the configuration's class makes another
        if isinstance(value, dict):
            small[key] = _shrunk(value)
        else:
            small[key] = SIZES.get(key, value) if value is not None or key in PUBLISHED else None
    if has_latent_heads:
        small["num_key_value_heads"] = HEADS
    return small
