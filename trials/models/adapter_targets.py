"""Which linear layers adapters go on: the recipe's words for them, as modules and as shapes."""

from collections.abc import Iterator

from torch import nn

from trials.records.recipe import TARGET_GROUPS, Recipe

# What transformers calls the module that attends.
ATTENTION_MODULES = frozenset({"self_attn", "self_attention", "attention", "attn"})
EXPERT_LINEARS = frozenset({"gate_linear", "up_linear", "down_linear"})
ROUTER_LINEAR = "router_linear"


class TargetError(ValueError):
    """An adapter has nowhere to go."""


def adapts_router(recipe: Recipe) -> bool:
    """Whether routers must be linear layers."""
    return not {"router", "all-linear"}.isdisjoint(recipe.lora_targets or ())


def lora_targets(model: nn.Module, recipe: Recipe) -> list[str]:
    """Names of the linear layers a recipe adapts, in a model without adapters, as PEFT takes them.

    The last parts of their names where these mean no other layer, else their full names: PEFT holds
    each layer of the model against each name, and there can be tens of thousands of either.

    Raises:
        TargetError: a target is nowhere in the model.
    """
    linears = list(_linears(model))
    found: dict[str, list[str]] = {
        target: [name for name in linears if is_meant(target, name)]
        for target in recipe.lora_targets or ()
    }
    for target, names in found.items():
        if not linears:
            raise TargetError(
                "the model has no linear layers that adapters can go on: use method full"
            )
        if not names:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise TargetError(
                f"lora_targets {target}: the model has no such linear layer; it has {known} "
                f"(or use {', '.join(TARGET_GROUPS)})"
            )
    wanted = {name for names in found.values() for name in names}
    last_parts = {name.rpartition(".")[2] for name in wanted}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if meant == wanted else wanted)


def _linears(model: nn.Module) -> Iterator[str]:
    """Every linear layer but the head. 4-bit ones are linear layers, too."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name


def is_meant(target: str, name: str) -> bool:
    """Whether a word of ``lora_targets`` means the linear layer of this full name."""
    *path, last = name.split(".")
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
