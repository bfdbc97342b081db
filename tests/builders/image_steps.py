"""Steps of tiny vision-language models: counted on the CPU, and traced."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from builders.observations import cpu
from builders.vision import TOKENS_PER_IMAGE, tiny_vision
from trials.devices.live_tensors import LiveTensorCounter
from trials.models.fused_head import base_of
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.whole_step import Steps
from trials.training.finetune import FineTuning
from trials.training.tasks.image_sizes import takes_any_size
from trials.training.tasks.images import image_inputs, images_for

BATCH, LENGTH, IMAGES = 3, 40, 2
IMAGE_TOKEN = 90


def cell_of(config: dict[str, Any], settings: Recipe) -> Cell:
    """A cell with two images in each example, or with one of as many tokens; or with text alone."""
    model = tiny_vision(config)
    tokens = IMAGES * TOKENS_PER_IMAGE[model.name] if model.has_vision else None
    return Cell(
        gpu="cpu",
        model=model.name,
        recipe=with_defaults(settings, model, cpu()),
        seq_len=LENGTH,
        image_tokens=tokens,
    )


def counted_peak(config: dict[str, Any], cell: Cell) -> int:
    """Peak bytes of two real steps of transformers' own class."""
    tuning = FineTuning(cell, tiny_vision(config), device=torch.device("cpu"), seed=0)
    tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % IMAGE_TOKEN
    images = {} if cell.image_tokens is None else images_of(tuning, tokens, cell.image_tokens)
    batch = replace(tuning.batch(tokens), images=images or None)
    tuning.step(batch)
    tuning.start_over()
    with LiveTensorCounter([*tuning.tensors(), tokens, *images.values()], 2**62) as counter:
        for _ in range(2):
            tuning.step(batch)
    return counter.peak_bytes


def images_of(
    tuning: FineTuning, tokens: torch.Tensor, image_tokens: int
) -> dict[str, torch.Tensor]:
    """Arguments for the images of a batch, whose tokens are changed in place."""
    images_of_each = images_for(tuning.model, image_tokens)
    assert images_of_each == IMAGES or takes_any_size(tuning.model)
    facts: Any = base_of(tuning.model).config
    assert facts.image_token_id == IMAGE_TOKEN
    tokens[:, :image_tokens] = IMAGE_TOKEN
    return image_inputs(tuning.model, tokens, image_tokens, images_of_each)


def peak_of(trace: StepTrace) -> int:
    """Most bytes of a trace's steps, with the model."""
    steps = Steps(trace)
    _, sizes = steps.storages(BATCH)
    return int(steps.held.sizes.sum() + np.cumsum(sizes).max())


def traced_peak(config: dict[str, Any], cell: Cell) -> int:
    """Peak bytes of the same two steps, traced with all layers."""
    step = TraceableCell(cell, tiny_vision(config), target="cpu", whole=True)
    traced = step.trace(BATCH, lambda mask: mask.numel())
    return peak_of(StepTrace((BATCH,), (traced.recording,), traced.held, traced.copies))
