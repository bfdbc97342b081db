"""Trace of steps by DeepSpeed's engine."""

import gc
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from trials.recipes.recipe import Recipe
from trials.simulation.ranks.engine_steps import ENGINE_STEPS
from trials.simulation.recording import Held, Recording, Segment
from trials.simulation.tracing.ranks.zero_rank import EngineTracer, ZeroRank
from trials.simulation.tracing.tracer import UntraceableError
from trials.training.census import StepCensus
from trials.training.finetune import model_tensors
from trials.training.optimizers.construction import parameter_groups
from trials.training.optimizers.deepspeed_stepper import DeepSpeedStepper
from trials.training.tasks.batch import TaskBatch
from trials.training.tasks.losses import task_loss

WARM_UP = 2
"""Steps before those that are recorded: the first makes the optimizer's state, and stage 3 of ZeRO
notes in it which weights come next, which the second gathers ahead."""


class EngineCell(Protocol):
    """Part of a traceable cell that a trace of an engine needs."""

    recipe: Recipe
    zero: ZeroRank | None
    is_padded: bool

    @property
    def model(self) -> nn.Module:
        """Model that is traced."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU's kernels are traced."""

    def batch(self, batch_size: int) -> TaskBatch:
        """Batch of a micro-batch."""

    def optimizer(self, groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        """Optimizer of the recipe for groups of parameters."""


def trace_engine(
    cell: EngineCell,
    batch_size: int,
    shares: Callable[[torch.Tensor], int],
    census: StepCensus | None,
) -> tuple[Recording, Held, tuple[int, ...]]:
    """Trace a step of one micro-batch and a step of three, once the engine is steady.

    Args:
        cell: cell whose model no engine has had yet.
        batch_size: examples per micro-batch.
        shares: returns the number of set entries of a routing mask.
        census: takes note of the operators; absent for none.

    Returns:
        The recording, what the rank holds on its device, and the most bytes of its tensors on the
        host, by ``ENGINE_STEPS``; none where the host is the device.

    Raises:
        UntraceableError: the steps cannot be traced.
    """
    rank, model = cell.zero, cell.model
    assert rank is not None
    live = model_tensors(model)
    rank.cast()
    tracer = EngineTracer(
        shares,
        [*live, *model_tensors(model)],
        with_workspaces=cell.is_on_gpu,
        needs_mask=cell.recipe.packing or cell.is_padded,
        note=None if census is None else census.note,
        has_host=rank.has_host,
    )
    del live
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = cell.optimizer(parameter_groups(model, trainable, cell.recipe.optimizer))
    with rank.traced_by(tracer), tracer:
        stepper = rank.stepper(optimizer)
        for _ in range(WARM_UP):
            _step(cell, stepper, batch_size, tracer, (Segment.ALONE, Segment.ALONE_UPDATE))
        tracer.note_operator = None
        held, kept = rank.held()
        on_host: list[int] = []
        for before, *parts in ENGINE_STEPS.values():
            gc.collect()
            tracer.begin(before, kept)
            _step(cell, stepper, batch_size, tracer, parts)
            gc.collect()
            tracer.is_silent = True
            on_host += [] if tracer.host is None else [tracer.host.peak_bytes]
    if tracer.loses_weights:
        raise UntraceableError("DeepSpeed frees weights in a step, where it should keep them")
    return tracer.recording(np.array([], np.int64)), held, tuple(on_host)


def _step(
    cell: EngineCell,
    stepper: DeepSpeedStepper,
    batch_size: int,
    tracer: EngineTracer,
    parts: Sequence[Segment],
) -> None:
    """Run one step: a micro-batch for each part but the last, which is the update."""
    *passes, update = parts
    total: torch.Tensor | None = None
    for segment in passes:
        tracer.segment = segment
        batch = [cell.batch(batch_size)]

        def loss_of(model: nn.Module) -> torch.Tensor:
            return task_loss(model, batch[0], cell.recipe)  # noqa: B023 - used at once

        loss = stepper.backward(loss_of, is_last=segment == passes[-1])
        total = loss if total is None else total + loss
        del loss
        if segment != passes[-1]:
            batch.clear()
    tracer.segment, tracer.is_updating = update, True
    stepper.update()
    assert total is not None
    float(total)
    tracer.is_updating = False
