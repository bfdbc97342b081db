"""Runs of steps on examples of varying length equal real ones, and fragment memory."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders.long_cases import long_cases
from builders.observations import recipe, tiny_cell

from trials.devices.live_tensors import LiveTensorCounter
from trials.drawn_lengths import DrawnBatch
from trials.recipes.recipe import Recipe
from trials.records.model import find_model
from trials.simulation.memory.allocator import replay
from trials.simulation.run_of_steps import RunOfSteps
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.trace import TraceableCell
from trials.training.finetune import FineTuning
from trials.training.tasks.batch import TaskBatch

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
MODEL, BATCH, LONGEST = "llama-tiny", 2, 64
TOKENS = [*np.random.default_rng(0).integers(9, LONGEST, 39).tolist(), LONGEST]
BATCHES = [DrawnBatch(tokens, is_padded=n % 3 > 0) for n, tokens in enumerate(TOKENS)]
"""Forty lengths, the longest at the end; of two batches in three, an example is padded."""
STEPS = 12
"""Batches whose real steps are counted."""

CELLS = [
    (recipe("full", precision="bf16"), (64, 32, 16)),
    *long_cases(
        (
            (recipe("full", precision="bf16", attention="eager"), (64, 32, 16)),
            (recipe("full", precision="fp32"), (64, 32, 16)),
            (recipe("lora", precision="bf16-mixed", gradient_checkpointing=True), (64, 32, 16)),
            (recipe("qlora", precision="bf16", loss="chunked"), (64, 32, 16)),
        )
    ),
]


Traces = tuple[dict[int, StepTrace], dict[int, StepTrace]]


def traces_at(settings: Recipe, lengths: Sequence[int]) -> Traces:
    """Traces at these lengths: without padding, and with a mask."""
    plain, padded = (
        {tokens: traced(settings, tokens, padded=padded) for tokens in lengths}
        for padded in (False, True)
    )
    return plain, padded


@pytest.fixture(scope="module")
def traces() -> Traces:
    """Traces of full fine-tuning."""
    return traces_at(recipe("full", precision="bf16"), (64, 32, 16))


def traced(settings: Recipe, tokens: int, *, padded: bool) -> StepTrace:
    """Trace of all layers at one length."""
    cell = tiny_cell(MODEL, settings, seq_len=tokens)
    traceable = TraceableCell(cell, find_model(MODEL), target="cpu", whole=True)
    traceable.set_cell(cell, padded=padded)
    trace = traceable.trace(BATCH, lambda _: 0)
    return StepTrace((BATCH,), (trace.recording,), trace.held, trace.copies)


def simulated_peaks(run: RunOfSteps, batches: Sequence[DrawnBatch]) -> list[int]:
    """Most bytes in use in each step."""
    ends = [len(run.moves(BATCH, batches[:end]).sizes) for end in range(1, len(batches))]
    in_use = run.held.sizes.sum() + np.cumsum(run.moves(BATCH, batches).sizes)
    return [int(part.max()) for part in np.split(in_use, ends)]


def counted_peaks(settings: Recipe, batches: Sequence[DrawnBatch]) -> list[int]:
    """Most bytes of live tensors in each real step."""
    cell = tiny_cell(MODEL, settings, seq_len=LONGEST)
    tuning = FineTuning(cell, find_model(MODEL), device=torch.device("cpu"), seed=0)
    steps = [padded_batch(tuning, batch, draw) for draw, batch in enumerate(batches)]
    peaks = []
    with LiveTensorCounter(tuning.tensors(), 2**62) as counter:
        for batch in steps:
            given = [tensor for tensor in (batch.tokens, batch.mask) if tensor is not None]
            counter.note_all(given)
            counter.peak_bytes = counter.current_bytes
            tuning.step(batch)
            peaks.append(counter.peak_bytes)
            counter.current_bytes -= sum(t.untyped_storage().nbytes() for t in given)
    return peaks


def padded_batch(tuning: FineTuning, drawn: DrawnBatch, draw: int) -> TaskBatch:
    """Batch as a trainer's collator makes it; where one is padded, half the first example is."""
    tokens = tuning.tokens(BATCH, draw)[:, : drawn.tokens].clone()
    mask = torch.ones_like(tokens) if drawn.is_padded else None
    if mask is not None:
        mask[0, drawn.tokens // 2 :] = 0
    return replace(tuning.batch(tokens), mask=mask)


@pytest.mark.parametrize(
    ("settings", "lengths"), CELLS, ids=lambda each: getattr(each, "key", each)
)
def test_memory_of_drawn_lengths_is_the_counted_one_to_the_byte(
    settings: Recipe, lengths: tuple[int, ...]
) -> None:
    """Traces at three lengths give the peak of every step of a real run, padded or not."""
    plain, padded = traces_at(settings, lengths)
    last = BATCHES[-STEPS:]
    simulated = simulated_peaks(RunOfSteps(plain, padded=padded), last)
    assert simulated == counted_peaks(settings, last)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_drawn_lengths_leave_no_storage_behind(traces: Traces, micro_batches: int) -> None:
    """After each step the same bytes are in use, however long and padded its examples were."""
    plain, padded = traces
    run = RunOfSteps(plain, micro_batches, padded)
    after = [int(run.moves(BATCH, BATCHES[:n]).sizes.sum()) for n in (2, 4, 10, 40)]
    assert len(set(after)) == 1


def test_drawn_lengths_reserve_more_than_the_longest_alone(traces: Traces) -> None:
    """Blocks of one length rarely fit the next one: the allocator's cache grows."""
    plain, padded = traces
    run = RunOfSteps(plain, padded=padded)
    reserved = []
    for batches in ([DrawnBatch(LONGEST, is_padded=True)] * 40, BATCHES):
        moves = run.moves(BATCH, batches)
        # As of a model with layers a thousand times as large: beyond the small pool.
        peaks = replay(moves.names, 1000 * moves.sizes, capacity_bytes=None)
        reserved.append(peaks.peak_reserved_bytes)
    assert reserved[1] > 1.05 * reserved[0]
