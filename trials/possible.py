"""What a recipe comes to on a model and a device, and what cannot be had there. Pure, no torch."""

from gpu_catalog.gpu import Gpu
from trials.models.model import Model
from trials.recipe import Recipe


def resolved(recipe: Recipe, model: Model, gpu: Gpu) -> Recipe:
    """The recipe with every axis filled in that applies to this model on this device.

    Axes that the model has nothing for (attention of a pure Mamba model, experts of a dense one)
    come out absent, whatever was asked: one recipe can serve several models of a sweep.
    """
    targets = recipe.lora_targets
    if recipe.method != "full" and targets is None:
        targets = ("experts", "router") if model.experts is not None else ("all-linear",)
    looped = recipe.method == "qlora" or bool(targets and targets != ("attention",))
    experts = recipe.experts or ("looped" if looped else "grouped")
    mamba = recipe.mamba or ("mamba-ssm" if gpu.kind == "cuda" else "reference")
    return Recipe.model_validate(
        recipe.model_dump()
        | {
            "lora_targets": targets,
            "attention": (recipe.attention or "sdpa") if model.has_attention else None,
            "experts": experts if model.experts is not None else None,
            "mamba": mamba if model.has_mamba else None,
        }
    )
