"""Random recipes of every kind, for property tests."""

from hypothesis import strategies as st
from pydantic import ValidationError

from trials.recipes.mistakes import ADAPTER_FIELDS
from trials.recipes.recipe import Recipe

PRECISIONS = ("fp32", "bf16", "bf16-mixed", "fp32-mixed-load", "fp16")
TARGETS = ("attention", "experts", "router", "all-linear", "q_proj", "mlp.up_proj")


@st.composite
def _recipes(draw: st.DrawFn) -> Recipe:
    """Compatible fields, each with few values, so that two recipes often differ in one."""
    maybe = {
        "lora_rank": st.sampled_from([4, 8]),
        "lora_alpha": st.sampled_from([8, 16]),
        "lora_dropout": st.sampled_from([0.0, 0.1]),
        "lora_targets": st.lists(st.sampled_from(TARGETS), min_size=1, max_size=2, unique=True),
        "modules_to_save": st.sampled_from([("lm_head",), ("embed_tokens", "lm_head")]),
        "quantisation": st.sampled_from(["nf4", "fp4", "int8"]),
        "double_quantisation": st.booleans(),
        "adapter_dtype": st.sampled_from(["bf16", "fp32"]),
        "examples_per_row": st.sampled_from([2, 3]),
        "max_grad_norm": st.sampled_from([0.5, 1.0]),
        "effective_batch": st.sampled_from([16, 32]),
        "compile": st.sampled_from(["model", "layers"]),
        "attention": st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
        "experts": st.sampled_from(["looped", "grouped"]),
        "mamba": st.sampled_from(["mamba-ssm", "reference"]),
    }
    fields: dict[str, object] = {
        "method": draw(st.sampled_from(["full", "lora", "qlora"])),
        "precision": draw(st.sampled_from(PRECISIONS)),
        "gradient_checkpointing": draw(st.sampled_from([False, True, "reentrant"])),
        "optimizer": draw(st.sampled_from(["adamw", "adamw_foreach", "adamw_8bit", "sgd"])),
        "kbit_preparation": draw(st.booleans()),
        "quantised_experts": draw(st.booleans()),
        "packing": draw(st.booleans()),
        "gradient_accumulation": draw(st.sampled_from([1, 4])),
        "offload_optimizer": draw(st.booleans()),
        "activation_offloading": draw(st.booleans()),
        "liger_kernels": draw(st.booleans()),
        "dora": draw(st.booleans()),
        "router_loss": draw(st.booleans()),
        "loss": draw(st.sampled_from(["full-logits", "chunked", "liger", "cce"])),
    }
    fields |= {name: draw(st.none() | values) for name, values in maybe.items()}
    if fields["method"] == "full":
        fields |= dict.fromkeys(ADAPTER_FIELDS) | {"dora": False}
    try:
        return Recipe.model_validate(fields)
    except ValidationError:
        # Fields that do not go together; what is left of them does.
        rank = None if fields["method"] == "full" else 4
        return Recipe.model_validate({"method": fields["method"], "lora_rank": rank})


RECIPES = _recipes()
