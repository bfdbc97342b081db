"""Made-up trainings: a recipe of TRL's trainer on four offers."""

from dataclasses import replace
from typing import Any

from orchestrator.exporting.training import ChosenOffer, TrainingJob
from orchestrator.spec.trainer_defaults import with_trl_defaults
from trials.recipes.recipe import Recipe
from trials.records.compatibility import adds_router_loss
from trials.records.model import Model, find_model
from trials.records.observation import Basis

LORA = {"method": "lora", "lora_rank": 8, "lora_targets": ("all-linear",)}
SPOT = ChosenOffer(
    gpu="A10G",
    provider="aws",
    region="us-east-1",
    instance="g5.xlarge",
    market="spot",
    gpus_per_instance=1,
    usd_per_hour=0.3,
    hours=10.0,
    hours_high=15.0,
    usd=3.0,
    checkpoint_minutes=30.0,
)
NOWHERE = replace(SPOT, provider="hyperstack", region="CANADA-1", instance="n3", usd=3.5)
SECURE = replace(
    SPOT,
    gpu="A40",
    provider="runpod",
    region="all listed regions",
    instance="1x_A40_SECURE",
    market="on-demand",
    usd=4.0,
    checkpoint_minutes=60.0,
)
OF_HUGGING_FACE = replace(
    SPOT,
    provider="hf-jobs",
    region="not stated",
    instance="a10g-large",
    market="on-demand",
    usd_per_hour=1.5,
    usd=15.0,
)
OF_EIGHT = replace(
    SPOT,
    gpu="A100-80GB-SXM",
    provider="lambda",
    region="all listed regions",
    instance="gpu_8x_a100_80gb_sxm4",
    market="on-demand",
    gpus_per_instance=8,
    usd_per_hour=14.0,
    usd=140.0,
    checkpoint_minutes=60.0,
)


def recipe_of(model: Model, **fields: Any) -> Recipe:
    """Recipe with TRL's defaults, its attention and its router's loss filled in."""
    attention = {} if model.family == "blackmamba" else {"attention": "sdpa"}
    recipe = Recipe.model_validate(with_trl_defaults(attention | LORA | fields))
    return recipe.model_copy(update={"router_loss": adds_router_loss(recipe, model)})


def training_of(recipe: dict[str, Any] | None = None, **changed: Any) -> TrainingJob:
    """A training of 1,000 examples, 3 epochs, of a small model in micro-batches of 2."""
    model = changed.pop("model", None) or find_model("qwen2.5-0.5b")
    values: dict[str, Any] = {
        "model": model,
        "recipe": recipe_of(model, **(recipe or {"gradient_accumulation": 4})),
        "active_experts": model.active_experts,
        "seq_len": 256,
        "examples": 1000,
        "epochs": 3,
        "micro_batch": 2,
        "groups_by_length": False,
        "steps": 375,
        "placements": (SPOT, NOWHERE, SECURE, OF_EIGHT),
        "basis": Basis.SIMULATED,
    }
    return TrainingJob(**values | changed)
