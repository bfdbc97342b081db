"""Reference of preference tasks: a frozen second model in evaluation mode, without dropout."""

from torch import nn

from trials.models.weight_placement import format_of
from trials.recipes.fields import WITH_DROPOUT
from trials.recipes.recipe import Recipe


def reference_recipe(recipe: Recipe) -> Recipe:
    """Recipe of the separate reference: the model's, without adapters, as it is loaded."""
    without = {
        "lora_rank": None,
        "oft_block_size": None,
        "lora_targets": None,
        "modules_to_save": None,
        "adapter_dtype": None,
        "kbit_preparation": False,
        "gradient_checkpointing": False,
    }
    return recipe.model_copy(update=without)


def set_evaluating(model: nn.Module) -> None:
    """Set a model to evaluation mode, but for its quantised layers."""
    model.eval()
    for module in model.modules():
        # On a CPU bitsandbytes repacks 4-bit weights for layers in evaluation mode, in a format
        # that some of its kernels refuse, and multiplies 8-bit ones as on a GPU, slowly.
        weight = module._parameters.get("weight")  # noqa: SLF001 - getattr would ask wrappers
        if weight is not None and format_of(weight) is not None:
            module.training = True


def without_dropout(model: nn.Module, recipe: Recipe) -> None:
    """Disable a model's layers of dropout, in place, for the tasks whose trainers do so."""
    if recipe.task in WITH_DROPOUT:
        return
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
