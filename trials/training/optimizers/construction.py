"""Construction of steppers and optimizers of recipes."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from trials.recipes.fields import Optimizer
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.training.optimizers.deepspeed_stepper import offloaded_stepper, zero_stepper
from trials.training.optimizers.muon import Muon, muon_groups
from trials.training.optimizers.replicated_stepper import ReplicatedStepper
from trials.training.optimizers.stepper import (
    LEARNING_RATE,
    NOT_OFFLOADED,
    DeviceStepper,
    Offloading,
    Stepper,
    by_mesh,
)
from trials.training.optimizers.torchao_optimizers import torchao_adamw
from trials.training.recipe_check import RecipeError

# Names of parameters without weight decay (get_decay_parameter_names of transformers' Trainer).
WITHOUT_DECAY = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def make_stepper(  # noqa: PLR0913 - inputs of a step
    model: nn.Module,
    trainable: list[nn.Parameter],
    recipe: Recipe,
    device: torch.device,
    offloading: Offloading = NOT_OFFLOADED,
    *,
    parallel: Parallel | None = None,
) -> Stepper:
    """Make the stepper of a recipe, with an optimizer without state.

    Args:
        model: model to train.
        trainable: its trained parameters.
        recipe: recipe of the steps.
        device: device of the model.
        offloading: context of the passes (``trials.models.activation_offloading``).
        parallel: layout of the ranks that train the model; absent where this process is alone.

    Raises:
        ImportError: a package that the recipe needs is not installed.
        RecipeError: the device does not support the optimizer.
    """
    if recipe.offload_optimizer:
        return offloaded_stepper(model, trainable, recipe, device)
    if recipe.optimizer.startswith("paged") and device.type != "cuda":
        # bitsandbytes only warns and continues unpaged, under the same class name.
        raise RecipeError(
            f"optimizer {recipe.optimizer} needs a CUDA GPU, bitsandbytes pages nothing on a "
            f"{device.type}: use {recipe.optimizer.removeprefix('paged_').removesuffix('_32bit')}"
        )
    groups = parameter_groups(model, trainable, recipe.optimizer)
    updated_by = "cpu" if parallel is not None and parallel.shards_on_host else device.type
    optimizer = make_optimizer(model, groups, recipe, updated_by)
    if parallel is not None and parallel.zero_stage is not None:
        return zero_stepper(model, optimizer, recipe, parallel, device)
    is_copy = parallel is not None and not parallel.is_sharded
    kind = ReplicatedStepper if is_copy else DeviceStepper
    stepper = kind(model, optimizer, recipe, device, updated_by)
    stepper.offloading = offloading
    return stepper


def parameter_groups(
    model: nn.Module, trainable: list[nn.Parameter], optimizer: Optimizer
) -> list[list[nn.Parameter]]:
    """Groups that transformers' Trainer updates one by one: with weight decay, and without.

    The decay is 0 in both by default. Foreach AdamW takes its temporaries for one group. Muon has
    groups of its own.
    """
    if optimizer == "muon":
        return muon_groups(model, trainable)
    names = set(get_parameter_names(model, [nn.LayerNorm], WITHOUT_DECAY))
    decayed = {id(p) for name, p in model.named_parameters() if name in names}
    groups = (
        [p for p in trainable if id(p) in decayed],
        [p for p in trainable if id(p) not in decayed],
    )
    return [of_mesh for group in groups for of_mesh in by_mesh(group)]


def embedding_weights(model: nn.Module) -> list[torch.Tensor]:
    """Weights whose state the Trainer keeps in 32 bits under bitsandbytes' 8-bit AdamW."""
    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


def make_optimizer(
    model: nn.Module, groups: list[list[nn.Parameter]], recipe: Recipe, device_type: str
) -> torch.optim.Optimizer:
    """Make the optimizer of a recipe, without state.

    Args:
        model: model to train.
        groups: parameters to update (``parameter_groups``).
        recipe: recipe that names the optimizer.
        device_type: PyTorch updates many tensors at once on a GPU, one by one on a CPU.
    """
    # PyTorch's own default for each device, explicit because a simulated GPU's tensors are on the
    # CPU.
    together = device_type == "cuda"
    # transformers' Trainer takes the fused one, without weight decay.
    adamw = partial(torch.optim.AdamW, weight_decay=0.0)
    makers: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
        "adamw": partial(adamw, fused=True),
        # Holds another copy of all trained weights during the update.
        "adamw_foreach": partial(adamw, foreach=True),
        "adamw_loop": partial(adamw, foreach=False),
        "adafactor": _adafactor,
        "sgd": partial(torch.optim.SGD, foreach=together),
        "muon": Muon,
        "adamw_8bit": partial(_bitsandbytes, "AdamW8bit", model),
        "paged_adamw_8bit": partial(_bitsandbytes, "PagedAdamW8bit", model),
        "paged_adamw_32bit": partial(_bitsandbytes, "PagedAdamW32bit", model),
        "torchao_adamw_8bit": partial(torchao_adamw, "AdamW8bit"),
        "torchao_adamw_4bit": partial(torchao_adamw, "AdamW4bit"),
    }
    return makers[recipe.optimizer]([{"params": group} for group in groups], lr=LEARNING_RATE)


def _adafactor(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The Trainer's Adafactor: its update takes several times the temporaries of PyTorch's."""
    from transformers.optimization import Adafactor  # noqa: PLC0415 - slow, for this recipe alone

    made: torch.optim.Optimizer = Adafactor(
        groups, lr=lr, scale_parameter=False, relative_step=False
    )
    return made


def _bitsandbytes(
    name: str, model: nn.Module, groups: list[dict[str, Any]], lr: float
) -> torch.optim.Optimizer:
    optimizers = importlib.import_module("bitsandbytes.optim")
    made: Any = getattr(optimizers, name)(groups, lr=lr, weight_decay=0.0)
    # A manager for this optimizer alone: that of the process remembers weights of earlier ones.
    made.mng = object.__new__(optimizers.GlobalOptimManager)
    made.mng.initialize()
    made.mng.override_config(embedding_weights(model), "optim_bits", 32)
    if name.startswith("Paged"):
        _page_again(made, importlib.import_module("bitsandbytes.functional").fill)
    optimizer: torch.optim.Optimizer = made
    return optimizer


def _page_again(optimizer: Any, fill: Callable[[torch.Tensor, float], object]) -> None:
    """Let a paged optimizer reuse the managed memory of closed ones.

    bitsandbytes never frees managed memory and keeps a list of all of it, so that each restart of
    the training would lose two bytes per trained weight. Only state of 100,000 elements or more is
    paged; that of most adapters is not.
    """
    take_new = optimizer.get_state_buffer

    def state_buffer(p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        for buffer in optimizer.page_mng.paged_tensors:
            if getattr(buffer, "is_spare", False) and (buffer.shape, buffer.dtype) == (
                p.shape,
                dtype,
            ):
                buffer.is_spare = False
                fill(buffer, 0)
                spare: torch.Tensor = buffer
                return spare
        new: torch.Tensor = take_new(p, dtype=dtype)
        return new

    optimizer.get_state_buffer = state_buffer
