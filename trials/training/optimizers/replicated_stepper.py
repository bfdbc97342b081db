"""Optimizer steps on a copy of the model on each rank, by torch's DistributedDataParallel."""

import gc
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trials.training.optimizers.stepper import DeviceStepper, LossOf


class ReplicatedStepper(DeviceStepper):
    """Runs steps whose last micro-batch sums the gradients of all ranks, as transformers' Trainer.

    The buckets of gradients are made in the first step, whose memory they are part of.
    """

    def step(self, *losses_of: LossOf) -> float:
        """Run one whole step."""
        if not isinstance(self._model, DistributedDataParallel):
            # Experts that are layers of their own get no gradient where no token reaches them.
            unused = self._recipe.experts == "looped"
            self._model = DistributedDataParallel(self._model, find_unused_parameters=unused)
        self._left = len(losses_of)
        return super().step(*losses_of)

    def backward(self, loss_of: LossOf) -> torch.Tensor:
        """Run forward and backward pass, and return the loss on the device."""
        self._left -= 1
        model: Any = self._model
        model.require_backward_grad_sync = self._left == 0
        return super().backward(loss_of)

    def close(self) -> None:
        """Free the optimizer's state and the buckets."""
        super().close()
        if isinstance(self._model, DistributedDataParallel):
            self._model = self._model.module
            gc.collect()  # the wrapper is in reference cycles, and its hooks would run on
