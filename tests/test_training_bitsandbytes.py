"""AdamW of bitsandbytes: which state it quantises, really and simulated."""

import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from builders.observations import recipe
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trials.recipes.fields import Optimizer
from trials.simulation.recording import Segment
from trials.simulation.tracing.tracer import Tracer
from trials.simulation.tracing.updates.fake_optimizers import simulated_optimizer
from trials.training.optimizers.construction import make_optimizer


class Embedded(nn.Module):
    """An embedding and a head of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.head = nn.Linear(128, 1000, bias=False)
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)


def of_model(model: nn.Module, optimizer: Optimizer, *, real: bool) -> torch.optim.Optimizer:
    """Optimizer of all parameters of a model, or the simulated one on a GPU."""
    settings = recipe("full", optimizer=optimizer)
    groups = [list(model.parameters())]
    if real:
        return make_optimizer(model, groups, settings, "cpu")
    return simulated_optimizer(model, groups, settings, "cuda")


@pytest.mark.parametrize("real", [True, False])
def test_8_bit_adamw_keeps_the_state_of_embeddings_in_32_bits(real: bool) -> None:  # noqa: FBT001 - a case
    """As transformers' Trainer does, for every model that one process trains."""
    for _ in range(2):
        with nullcontext() if real else FakeTensorMode():
            model = Embedded()
            made = of_model(model, "adamw_8bit", real=real)
            made.step()
        dtypes = [made.state[p]["state2"].dtype for p in model.parameters()]
        assert dtypes == [torch.float32, torch.uint8]


def test_a_model_trained_by_8_bit_adamw_is_freed() -> None:
    """What is kept in 32 bits is known to its optimizer alone, not to the process."""
    model = Embedded()
    of_model(model, "adamw_8bit", real=True).step()
    remembered = weakref.ref(model)
    del model
    gc.collect()
    assert remembered() is None


@pytest.mark.parametrize(
    ("optimizer", "widths"), [("paged_adamw_8bit", (4, 1)), ("paged_adamw_32bit", (4, 4))]
)
def test_a_simulated_update_moves_the_paged_state_of_embeddings_in_32_bits(
    optimizer: Optimizer, widths: tuple[int, int]
) -> None:
    """Both moments are read and written beside the gradient, read, and the weight, both."""
    with FakeTensorMode(), Tracer(lambda _: 0, [], with_workspaces=True) as traced:
        made = of_model(Embedded(), optimizer, real=False)
        traced.segment = Segment.UPDATE
        made.step()
    recording = traced.recording(np.zeros(0, np.int64))
    moved = recording.numbers[recording.segments == Segment.UPDATE, 0]
    of_kernels = moved[moved > 0].tolist()
    assert of_kernels == [128_000 * (3 * 4 + 4 * width) for width in widths]
