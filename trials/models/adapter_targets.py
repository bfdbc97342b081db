"""Layers that adapters go on, and modules trained in full, by the names in a recipe."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from trials.models.experts import RouterLinear, is_fused, is_router
from trials.models.weight_placement import language_modules, output_layer
from trials.recipes.fields import TARGET_GROUPS
from trials.recipes.recipe import Recipe

# Names of the attention module in transformers.
ATTENTION_MODULES = frozenset({"self_attn", "self_attention", "attention", "attn"})
EXPERT_LINEARS = frozenset({"gate_linear", "up_linear", "down_linear"})
ROUTER_LINEAR = "router_linear"


class TargetError(ValueError):
    """A recipe's target matches no linear layer."""


def adapts_router(recipe: Recipe) -> bool:
    """Whether a recipe adapts routers, which then must be linear layers."""
    targets = set(recipe.lora_targets or ())
    return "router" in targets or ("all-linear" in targets and not recipe.has_fused_experts)


def lora_targets(model: nn.Module, recipe: Recipe) -> list[str]:
    """Names of the layers that a recipe adapts, for PEFT.

    These are the last parts of the layers' names if they match no other layer, else full names:
    PEFT compares each layer with each name, and there can be tens of thousands of both.

    Raises:
        TargetError: a target matches no layer of the model.
    """
    layers = dict(_adaptable(model))
    linears = [name for name, is_outer in layers.items() if not is_outer]
    layers_of_target: dict[str, list[str]] = {
        target: [n for n, is_outer in layers.items() if is_meant(target, n, is_outer=is_outer)]
        for target in recipe.lora_targets or ()
        if not (target == "experts" and expert_parameters(model, recipe))
    }
    for target, names in layers_of_target.items():
        if not linears:
            raise TargetError(
                "the model has no linear layers that adapters can go on: use method full"
            )
        if not names:
            present = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise TargetError(
                f"lora_targets {target}: the model has no such layer; it has {present} "
                f"(or use {', '.join(TARGET_GROUPS)})"
            )
        if target == "all-linear":
            _check_routers(model)
        if "all-linear" in layers_of_target and set(names) < set(linears):
            raise TargetError(f"lora_targets {target}: all-linear includes it: leave it out")
    targets = {name for names in layers_of_target.values() for name in names}
    if recipe.oft_block_size is not None:
        _check_blocks(model, targets, recipe.oft_block_size)
    last_parts = {name.rpartition(".")[2] for name in targets}
    matches = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if matches == targets else targets)


def _check_routers(model: nn.Module) -> None:
    """Check that no router is itself a linear layer, whose further results PEFT cannot adapt.

    The linear layer of a router that was split returns a product alone.
    """
    for name, module in language_modules(model):
        is_split = isinstance(module, RouterLinear)
        if is_router(module) and isinstance(module, nn.Linear) and not is_split:
            raise TargetError(
                f"lora_targets all-linear: PEFT adapts {name.rpartition('.')[2]}, too, whose class "
                f"{type(module).__name__} returns more than a product, and the step fails: name "
                "the other layers (q_proj, …)"
            )


def _check_blocks(model: nn.Module, names: set[str], block: int) -> None:
    """Check that rotations of a size fit layers; for others PEFT takes a size of its own."""
    for name in sorted(names):
        layer: Any = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise TargetError(
                f"oft_block_size: {name} ({type(layer).__name__}) is no linear layer: adapt others"
            )
        if layer.in_features % block:
            raise TargetError(
                f"oft_block_size {block} does not divide the {layer.in_features} inputs of {name}: "
                "use a divisor"
            )


def expert_parameters(model: nn.Module, recipe: Recipe) -> list[str]:
    """Names of the fused parameters of experts that a recipe adapts; none for looped experts."""
    if "experts" not in (recipe.lora_targets or ()):
        return []
    return [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if is_fused(module)
        for parameter, values in module.named_parameters(recurse=False)
        if values.dim() == 3
    ]


def _adaptable(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """Names of all linear layers and embeddings, and whether each is the head or an embedding."""
    head = output_layer(model)
    for name, module in language_modules(model):
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
            yield name, module is head or isinstance(module, nn.Embedding)


def saved_modules(model: nn.Module, recipe: Recipe) -> list[str]:
    """Names of the modules that a recipe trains in full beside adapters, by PEFT's matching."""
    return [name for name, _ in language_modules(model) if name.endswith(recipe.copied_modules)]


def check_saved_modules(model: nn.Module, recipe: Recipe) -> None:
    """Check that the model has the modules that a recipe trains in full, and can train them.

    Raises:
        TargetError: it has not, or cannot.
    """
    saved = saved_modules(model, recipe)
    for end in recipe.modules_to_save or ():
        if not any(name.endswith(end) for name in saved):
            present = sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} - {""})
            named = ", ".join(name for name in present if not name.isdecimal())
            raise TargetError(
                f"modules_to_save {end}: the model has no such module; it has {named}"
            )
    for name in saved:
        if not all(p.is_floating_point() for p in model.get_submodule(name).parameters()):
            raise TargetError(
                f"modules_to_save: {name} is quantised, and cannot be trained: use method lora, or "
                "leave it out"
            )
        inner = next((other for other in saved if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise TargetError(f"modules_to_save: {inner} is part of {name}: leave one of them out")


def excludes(recipe: Recipe, name: str) -> bool:
    """Whether a layer gets no adapter because a recipe trains it, or its parent, in full."""
    return any(f".{end}." in f".{name}." for end in recipe.copied_modules)


def is_meant(target: str, name: str, *, is_outer: bool = False) -> bool:
    """Whether a name in ``lora_targets`` matches the layer with this full name.

    Args:
        target: group or name.
        name: full name of the layer.
        is_outer: whether it is the head or an embedding, which no group includes.
    """
    *path, last = name.split(".")
    if is_outer and target in TARGET_GROUPS:
        return False
    match target:
        case "all-linear":
            return True
        case "attention":
            return not ATTENTION_MODULES.isdisjoint(path)
        case "experts":
            return last in EXPERT_LINEARS
        case "router":
            return last == ROUTER_LINEAR
        case _:
            return name == target or name.endswith(f".{target}")
