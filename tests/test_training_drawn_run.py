"""A probe of drawn lengths takes the memory of the simulated run, to the byte, at every step."""

import numpy as np
import pytest
from builders.long_cases import long_cases
from builders.observations import cpu, recipe, tiny_cell
from test_simulation_run_of_steps import traces_at

from trials.devices.device import DeviceOutOfMemoryError
from trials.drawn_lengths import DrawnBatch
from trials.recipes.recipe import Recipe
from trials.records.messages import ProbeRequest, Setup, StepsRun
from trials.records.model import find_model
from trials.records.observation import Outcome
from trials.simulation.run_of_steps import RunOfSteps
from trials.training.worker import Worker

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
MODEL, BATCH, LONGEST = "llama-tiny", 2, 64
TOKENS = (*np.random.default_rng(1).integers(9, LONGEST, 13).tolist(), LONGEST)
PADDED = tuple(number % 3 > 0 for number in range(len(TOKENS)))
LOSS_BYTES = 4  # of an earlier micro-batch, until the next one is added to it


def worker(settings: Recipe, budget_bytes: int = 2**28) -> Worker:
    """A child's worker in this process."""
    cell = tiny_cell(MODEL, settings, seq_len=LONGEST)
    gpu = cpu(budget_bytes)
    return Worker(Setup(cell=cell, model=find_model(MODEL), gpu=gpu, seed=0, threads=1))


@pytest.mark.parametrize(
    ("settings", "per_step"),
    [
        (recipe("full", precision="bf16"), 1),
        *long_cases(
            (
                (recipe("lora", precision="bf16", task="dpo"), 1),
                (recipe("lora", precision="bf16", loss="chunked", effective_batch=8), 2),
            )
        ),
    ],
    ids=["full", "dpo", "accumulating"],
)
def test_each_step_takes_the_simulated_bytes(settings: Recipe, per_step: int) -> None:
    """Of one micro-batch or, where more accumulate, of two, with a mask where one is padded."""
    request = ProbeRequest(batch_size=BATCH, timing=None, lengths=TOKENS, padded=PADDED)
    reports: list[StepsRun] = []
    reply = worker(settings).probe(request, reports.append)
    plain, padded = traces_at(settings, (64, 32, 16))
    run = RunOfSteps(plain, settings.micro_batches(BATCH), padded)
    batches = [DrawnBatch(*batch) for batch in zip(TOKENS, PADDED, strict=True)]
    ends = range(per_step, len(TOKENS), per_step)
    in_use = run.held.sizes.sum() + np.cumsum(run.moves(BATCH, batches).sizes)
    steps = np.split(in_use, [len(run.moves(BATCH, batches[:end]).sizes) for end in ends])
    simulated = [int(step.max()) for step in steps]
    assert reply.outcome is Outcome.FITS
    assert reply.measurement is not None
    measured = reply.measurement.step_peak_bytes
    near = LOSS_BYTES * (per_step - 1)
    assert measured == pytest.approx(simulated, abs=near)
    assert reply.measurement.memory.peak_allocated_bytes == max(measured)
    assert reply.measurement.memory_steps == len(measured) == len(TOKENS) // per_step
    assert reports[-1].measured == reply.measurement


def test_steps_before_a_miss_are_reported() -> None:
    """The longest example comes last and runs out of memory; the peaks of the others are kept."""
    settings = recipe("full", precision="bf16")
    request = ProbeRequest(batch_size=BATCH, timing=None, lengths=(16, 24, 16, LONGEST))
    whole = worker(settings).probe(request).measurement
    assert whole is not None
    reports: list[StepsRun] = []
    with pytest.raises(DeviceOutOfMemoryError):
        worker(settings, whole.memory.peak_allocated_bytes - 1).probe(request, reports.append)
    assert reports[-1].measured.step_peak_bytes == whole.step_peak_bytes[:3]
