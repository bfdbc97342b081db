"""Optimizer steps with state and update on the host, by DeepSpeed."""

import contextlib
import gc
import importlib
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trials.recipes.recipe import Recipe
from trials.training.optimizers.stepper import LEARNING_RATE, LossOf, qualified_name

DEEPSPEED_BUCKET_ELEMENTS = 500_000_000  # its default reduce_bucket_size


class OffloadedStepper:
    """Runs steps with the optimizer's state and update on the host: ZeRO-Offload (2101.06840).

    ZeRO's stages 1 to 3 shard optimizer state, gradients and weights over GPUs. On one GPU there is
    nothing to shard, so all stages equal this one. At any precision, the host holds optimizer state
    and a copy of the trained weights in fp32.
    """

    def __init__(self, model: nn.Module, trainable: list[nn.Parameter], recipe: Recipe) -> None:
        try:
            deepspeed = importlib.import_module("deepspeed")
        except ImportError as error:
            raise ImportError(
                f"offload_optimizer needs the package deepspeed ({error}): install the extra "
                "'deepspeed', or leave offload_optimizer out"
            ) from None
        _group_of_one(deepspeed)
        self._remove_additions = _removal_of_additions(model)
        config = offload_config(recipe, sum(p.numel() for p in trainable))
        self._engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=trainable, config=config
        )
        # DeepSpeed wraps the optimizer that does the update on the host in its own.
        self.name = qualified_name(self.optimizer.optimizer)

    def step(self, *losses_of: LossOf) -> float:
        """Run one whole step."""
        total = 0.0
        for count, loss_of in enumerate(losses_of, start=1):
            # Else the configured number decides, which depends on the batch size under an effective
            # batch.
            self._engine.set_gradient_accumulation_boundary(count == len(losses_of))
            # The engine's own forward pass prepares the transfer of gradients to the host.
            loss = loss_of(self._engine)
            self._engine.backward(loss, scale_wrt_gas=False)  # the losses are scaled already
            total += float(loss.detach())
        self._engine.step()
        return total

    def state_dict(self) -> dict[str, Any]:
        """Raise NotImplementedError: the state is on the host, in DeepSpeed's own format."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise NotImplementedError, as ``state_dict`` does."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the engine with its state on device and host."""
        self._engine.destroy()
        # DeepSpeed leaves hooks on the model that would keep the engine alive, and with it copies
        # of the trained weights on device and host: one more set at each restart of the training.
        self._remove_additions()
        self._engine = self.optimizer = None
        gc.collect()  # the engine is in reference cycles


def offload_config(recipe: Recipe, trained_parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe with the optimizer on the host."""
    return {
        # DeepSpeed only counts examples with it; batches may have any size.
        "train_micro_batch_size_per_gpu": 1,
        # Above 1, gradients accumulate on the host; the step marks its own last micro-batch.
        "gradient_accumulation_steps": recipe.micro_batches(1),
        "gradient_clipping": recipe.max_grad_norm or 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": 0.0, "torch_adam": False},
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            # Gradients pass through a buffer of this size on the device, always allocated whole:
            # the default would take a GB in bf16 for a few adapters.
            "reduce_bucket_size": min(DEEPSPEED_BUCKET_ELEMENTS, trained_parameters),
        },
        "bf16": {"enabled": recipe.precision == "bf16"},
        "wall_clock_breakdown": False,
        "steps_per_print": 2**31,
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
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed reads it even without a launcher
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    deepspeed.init_distributed(
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
        auto_mpi_discovery=False,
        verbose=False,
    )
