"""Optimizer steps by DeepSpeed: its update on the host, or ZeRO among several ranks."""

import contextlib
import gc
import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from trials.child_process.bootstrap import hide, reveal
from trials.models.fused_head import base_of
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.recipes.zero_settings import ON_HOST
from trials.training.optimizers.stepper import LEARNING_RATE, LossOf, qualified_name

LOCAL_RANK = ("LOCAL_RANK", "0")
"""Variable that DeepSpeed reads even without a launcher. A rank sees one GPU."""
DEEPSPEED_BUCKET_ELEMENTS = 500_000_000  # its default reduce_bucket_size


class DeepSpeedStepper:
    """Runs steps by an engine of DeepSpeed, which the first step makes as part of its memory.

    Args:
        model: model to train.
        library: the package (``deepspeed_library``).
        config: DeepSpeed's configuration.
        trainable: parameters for an optimizer of DeepSpeed's own; absent with ``optimizer``.
        optimizer: optimizer that DeepSpeed wraps.
    """

    def __init__(
        self,
        model: nn.Module,
        library: Any,
        config: dict[str, Any],
        *,
        trainable: list[nn.Parameter] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model, self._library = model, library
        settings = {"config": config, "model_parameters": trainable, "optimizer": optimizer}
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._remove_additions = _removal_of_additions(model)
        self._engine: Any = None
        self.optimizer: Any = optimizer

    @property
    def name(self) -> str:
        """Class of the optimizer that does the update; DeepSpeed wraps it in its own."""
        return qualified_name(getattr(self.optimizer, "optimizer", self.optimizer))

    def start(self) -> None:
        """Make the engine, if there is none yet."""
        if self._engine is None:
            os.environ.setdefault(*LOCAL_RANK)
            self._engine, self.optimizer, *_ = self._library.initialize(
                model=self._model, **self._settings
            )

    def step(self, *losses_of: LossOf) -> float:
        """Run one whole step."""
        total: torch.Tensor | None = None
        for count, loss_of in enumerate(losses_of, start=1):
            loss = self.backward(loss_of, is_last=count == len(losses_of))
            total = loss if total is None else total + loss
            del loss
        self.update()
        return 0.0 if total is None else float(total)

    def backward(self, loss_of: LossOf, *, is_last: bool) -> torch.Tensor:
        """Run forward and backward pass of a micro-batch, and return the loss on the device."""
        self.start()
        # Else the configured number decides, which depends on the batch size under an effective
        # batch.
        self._engine.set_gradient_accumulation_boundary(is_last)
        # The engine's own forward pass prepares the transfer of gradients.
        loss = loss_of(self._engine)
        self._engine.backward(loss, scale_wrt_gas=False)  # the losses are scaled already
        return loss.detach()

    def update(self) -> None:
        """Clip, update, and free the gradients."""
        self._engine.step()

    def state_dict(self) -> dict[str, Any]:
        """Raise NotImplementedError: the state is in DeepSpeed's own format."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise NotImplementedError, as ``state_dict`` does."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the engine with its state on device and host."""
        if self._engine is not None:
            self._engine.destroy()
        # DeepSpeed leaves hooks on the model that would keep the engine alive, and with it copies
        # of the trained weights on device and host: one more set at each restart of the training.
        self._remove_additions()
        self._engine = self.optimizer = None
        gc.collect()  # the engine is in reference cycles


def offloaded_stepper(
    model: nn.Module, trainable: list[nn.Parameter], recipe: Recipe, device: torch.device
) -> DeepSpeedStepper:
    """Stepper with state and update on the host: ZeRO-Offload (2101.06840).

    ZeRO's stages 1 to 3 shard optimizer state, gradients and weights over GPUs. On one GPU there is
    nothing to shard, so all stages equal this one. At any precision, the host holds optimizer state
    and a copy of the trained weights in fp32.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    library = deepspeed_library(device.type)
    _remember_cpu()
    _group_of_one(library)
    config = offload_config(recipe, sum(p.numel() for p in trainable))
    stepper = DeepSpeedStepper(model, library, config, trainable=trainable)
    stepper.start()  # its name is that of DeepSpeed's own optimizer
    return stepper


def zero_stepper(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    layout: Parallel,
    device: torch.device,
) -> DeepSpeedStepper:
    """Stepper of one of several ranks that train by ZeRO (1910.02054).

    Args:
        model: model under its recipe, with all weights on this rank.
        optimizer: optimizer of its trained parameters, without state.
        recipe: recipe of the model.
        layout: layout by a stage of ZeRO.
        device: device of the model.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    library = deepspeed_library(device.type)
    if layout.updates_on_host:
        optimizer = _on_host(optimizer)
    config = zero_config(model, recipe, layout)
    return DeepSpeedStepper(model, library, config, optimizer=optimizer)


def _on_host(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW on the CPU, which accelerate puts in the place of PyTorch's."""
    _remember_cpu()
    adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    same = {name: optimizer.defaults[name] for name in ("lr", "weight_decay")}
    return adam(optimizer.param_groups, adamw_mode=True, **same)  # type: ignore[no-any-return]


def deepspeed_library(device_type: str) -> Any:
    """Package deepspeed, for devices of a type.

    Raises:
        ImportError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    os.environ.setdefault("LOCAL_SIZE", "1")  # else it runs numactl each time it asks
    try:
        deepspeed = _without_mlflow()
    except ImportError as error:
        raise ImportError(
            f"DeepSpeed is not installed ({error}): install the extra 'deepspeed', or use "
            "another strategy, without offload_optimizer"
        ) from None
    # It tries what it could compile here, and would compile collectives of CPUs, which gloo has.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def _remember_cpu() -> None:
    """Ask what CPU this is once, 1.2 CPU s: DeepSpeed does three times, and for each AdamW."""
    cpuinfo: Any = importlib.import_module("cpuinfo")
    if not hasattr(cpuinfo.get_cpu_info, "cache_clear"):
        cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)


def _without_mlflow() -> Any:
    """Import DeepSpeed without mlflow, which its autotuner would import: most of the time."""
    is_here = "mlflow" in sys.modules
    if not is_here:
        hide("mlflow")
    try:
        return importlib.import_module("deepspeed")
    finally:
        if not is_here:
            reveal("mlflow")


def _common_config(recipe: Recipe) -> dict[str, Any]:
    return {
        # DeepSpeed only counts examples with it; batches may have any size.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": recipe.max_grad_norm or 0.0,
        "bf16": {"enabled": recipe.precision == "bf16"},
        "wall_clock_breakdown": False,
        "steps_per_print": 2**31,
    }


def offload_config(recipe: Recipe, trained_parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe with the optimizer on the host."""
    return {
        **_common_config(recipe),
        # Above 1, gradients accumulate on the host; the step marks its own last micro-batch.
        "gradient_accumulation_steps": recipe.micro_batches(1),
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": 0.0, "torch_adam": False},
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": ON_HOST,
            # Gradients pass through a buffer of this size on the device, always allocated whole:
            # the default would take a GB in bf16 for a few adapters.
            "reduce_bucket_size": min(DEEPSPEED_BUCKET_ELEMENTS, trained_parameters),
        },
    }


def zero_config(model: nn.Module, recipe: Recipe, layout: Parallel) -> dict[str, Any]:
    """DeepSpeed's configuration for a stage of ZeRO, as transformers' Trainer completes it.

    For "auto" it has sizes by the model's width (``HfTrainerDeepSpeedConfig``).
    """
    given: Any = base_of(model)
    hidden = given.config.get_text_config().hidden_size
    by_width = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    assert layout.zero_settings is not None
    settings = layout.zero_settings.given()
    sizes = {name: by_width[name] for name, value in settings.items() if value == "auto"}
    return {
        **_common_config(recipe),
        "zero_optimization": {"stage": layout.zero_stage, **settings, **sizes},
        # AdamW of PyTorch, as accelerate has it.
        "zero_allow_untested_optimizer": True,
    }


def _removal_of_additions(model: nn.Module) -> Callable[[], None]:
    """Make a function that removes all hooks and attributes added to a model from now on."""
    marked: list[dict[Any, Any]] = [vars(parameter) for parameter in model.parameters()]
    for module in model.modules():
        marked += [module._forward_pre_hooks, module._forward_hooks]  # noqa: SLF001 - no other name
    noted = [(marks, set(marks)) for marks in marked]

    def remove_additions() -> None:
        for marks, before in noted:
            for added in set(marks) - before:
                del marks[added]

    return remove_additions


def _group_of_one(deepspeed: Any) -> None:
    """Initialise the process group that DeepSpeed requires, with this process alone; once."""
    if torch.distributed.is_initialized():
        return
    os.environ.setdefault(*LOCAL_RANK)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    deepspeed.init_distributed(
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
        auto_mpi_discovery=False,
        verbose=False,
    )
