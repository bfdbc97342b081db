"""Random recipes of every kind, for property tests."""

from hypothesis import strategies as st
from pydantic import ValidationError

from trials.records.recipe import Recipe

TARGETS = ("attention", "experts", "router", "all-linear", "q_proj", "mlp.up_proj")


@st.composite
def _recipes(draw: st.DrawFn) -> Recipe:
    """Compatible fields, each with few values, so that two recipes often differ in one."""
    maybe = {
        "lora_rank": st.sampled_from([4, 8]),
        "lora_alpha": st.sampled_from([8, 16]),
        "lora_dropout": st.sampled_from([0.0, 0.1]),
        "lora_targets": st.lists(st.sampled_from(TARGETS), min_size=1, max_size=2, unique=True),
        "double_quantisation": st.booleans(),
        "attention": st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
        "experts": st.sampled_from(["looped", "grouped"]),
        "mamba": st.sampled_from(["mamba-ssm", "reference"]),
    }
    fields: dict[str, object] = {
        "method": draw(st.sampled_from(["full", "lora", "qlora"])),
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        "gradient_checkpointing": draw(st.booleans()),
        "optimizer": draw(st.sampled_from(["adamw", "adamw_8bit", "sgd"])),
        "offload_optimizer": draw(st.booleans()),
    }
    fields |= {name: draw(st.none() | values) for name, values in maybe.items()}
    if fields["method"] == "full":
        fields |= dict.fromkeys(("lora_rank", "lora_alpha", "lora_dropout", "lora_targets"))
    try:
        return Recipe.model_validate(fields)
    except ValidationError:
        # Fields that do not go together; what is left of them does.
        rank = None if fields["method"] == "full" else 4
        return Recipe.model_validate({"method": fields["method"], "lora_rank": rank})


RECIPES = _recipes()
