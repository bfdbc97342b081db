"""Recipes of papers, by name."""

from trials.recipes.recipe import Recipe

# 2408.04693, section III: rank 16 on the experts' three matrices and the router.
_PAPER_MIXTRAL = Recipe(
    method="qlora",
    lora_rank=16,
    lora_targets=("experts", "router"),
    precision="bf16",
    gradient_checkpointing=True,
    attention="flash_attention_2",
    experts="looped",
)

NAMED_RECIPES = {
    "paper-mixtral": _PAPER_MIXTRAL,
    # Of the simulated recipes the closest to the paper's largest batches, against its text.
    "paper-mixtral-uncheckpointed": _PAPER_MIXTRAL.model_copy(
        update={"gradient_checkpointing": False}
    ),
    # Section III as well: BlackMamba is small enough to train whole.
    "paper-blackmamba": Recipe(
        method="full", precision="bf16", gradient_checkpointing=False, experts="looped"
    ),
}
"""Recipes that a specification may name instead of writing them out."""
