"""Runs of steps on examples of varying length equal real ones, and fragment memory."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from builders.observations import recipe, tiny_cell

from trials.devices.live_tensors import LiveTensorCounter
from trials.recipes.recipe import Recipe
from trials.records.model import find_model
from trials.simulation.memory.allocator import replay
from trials.simulation.run_of_steps import RunOfSteps
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.trace import TraceableCell
from trials.training.finetune import FineTuning

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
MODEL, BATCH, LONGEST = "llama-tiny", 2, 64
TOKENS = [
    *np.random.default_rng(0).integers(9, LONGEST, 39).tolist(),
    LONGEST,
]
"""Forty lengths, the longest at the end."""
FIRST_STEP_BYTES = 4  # a number that PyTorch makes once

CELLS = [
    (recipe("full", precision="bf16"), (64, 32)),
    (recipe("full", precision="bf16", attention="eager"), (64, 32, 16)),
    (recipe("full", precision="fp32"), (64, 32, 16)),
    (recipe("lora", precision="bf16-mixed", gradient_checkpointing=True), (64, 32)),
    (recipe("qlora", precision="bf16", loss="chunked"), (64, 32)),
]


def simulated(settings: Recipe, lengths: Sequence[int], micro_batches: int = 1) -> RunOfSteps:
    """Run of steps by traces at these lengths."""
    traces = {}
    for tokens in lengths:
        cell = tiny_cell(MODEL, settings, seq_len=tokens)
        trace = TraceableCell(cell, find_model(MODEL), target="cpu", whole=True).trace(
            BATCH, lambda _: 0
        )
        traces[tokens] = StepTrace((BATCH,), (trace.recording,), trace.held, trace.copies)
    return RunOfSteps(traces, micro_batches)


def simulated_peaks(run: RunOfSteps, tokens: Sequence[int]) -> list[int]:
    """Most bytes in use in each step."""
    ends = [len(run.moves(BATCH, tokens[:end]).sizes) for end in range(1, len(tokens))]
    in_use = run.held.sizes.sum() + np.cumsum(run.moves(BATCH, tokens).sizes)
    return [int(part.max()) for part in np.split(in_use, ends)]


def counted_peaks(settings: Recipe, tokens: Sequence[int]) -> list[int]:
    """Most bytes of live tensors in each real step."""
    cell = tiny_cell(MODEL, settings, seq_len=LONGEST)
    tuning = FineTuning(cell, find_model(MODEL), device=torch.device("cpu"), seed=0)
    steps = [tuning.tokens(BATCH, draw)[:, :length].clone() for draw, length in enumerate(tokens)]
    peaks = []
    with LiveTensorCounter(tuning.tensors(), 2**62) as counter:
        for batch in steps:
            counter.note_all([batch])
            counter.peak_bytes = counter.current_bytes
            tuning.step(batch)
            peaks.append(counter.peak_bytes)
            counter.current_bytes -= batch.untyped_storage().nbytes()
    return peaks


@pytest.mark.parametrize(
    ("settings", "lengths"), CELLS, ids=lambda each: getattr(each, "key", each)
)
def test_memory_of_forty_drawn_lengths_is_the_counted_one_to_the_byte(
    settings: Recipe, lengths: tuple[int, ...]
) -> None:
    """Traces at two or three lengths give the peak of every step of a real run."""
    first, *later = simulated_peaks(simulated(settings, lengths), TOKENS)
    counted = counted_peaks(settings, TOKENS)
    assert later == counted[1:]
    assert first == pytest.approx(counted[0], abs=FIRST_STEP_BYTES)


def test_drawn_lengths_leave_no_storage_behind() -> None:
    """After each step the same bytes are in use, however long its examples were."""
    run = simulated(recipe("full", precision="bf16"), (64, 32))
    after = [int(run.moves(BATCH, TOKENS[:n]).sizes.sum()) for n in (1, 2, 10, 40)]
    assert len(set(after)) == 1


def test_drawn_lengths_reserve_more_than_the_longest_alone() -> None:
    """Blocks of one length rarely fit the next one: the allocator's cache grows."""
    run = simulated(recipe("full", precision="bf16"), (64, 32))
    reserved = []
    for tokens in ([LONGEST] * 40, TOKENS):
        moves = run.moves(BATCH, tokens)
        # As of a model with layers a thousand times as large: beyond the small pool.
        peaks = replay(moves.names, 1000 * moves.sizes, capacity_bytes=None)
        reserved.append(peaks.peak_reserved_bytes)
    assert reserved[1] > 1.05 * reserved[0]
