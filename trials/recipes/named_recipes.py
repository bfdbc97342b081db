"""Recipes of papers, by name."""

from trials.recipes.recipe import Recipe

NAMED_RECIPES = {
    # 2408.04693, section III: rank 16 on the experts' three matrices and the router.
    "paper-mixtral": Recipe(
        method="qlora",
        lora_rank=16,
        lora_targets=("experts", "router"),
        precision="bf16",
        gradient_checkpointing=True,
        attention="flash_attention_2",
        experts="looped",
    ),
    # As above: BlackMamba is small enough to train whole.
    "paper-blackmamba": Recipe(
        method="full", precision="bf16", gradient_checkpointing=False, experts="looped"
    ),
}
"""Recipes that a specification may name instead of writing them out."""
