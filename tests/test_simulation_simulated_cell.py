"""The largest batch size of a simulated cell."""

import pytest
from builders.observations import tiny_cell

import orchestrator
from gpu_catalog.catalog import load_catalog
from trials.recipes.fields import MOST_COUNTED, Optimizer
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.records.observation import Outcome
from trials.simulation import simulated_prober
from trials.simulation.memory.blocks import MOST_BYTES
from trials.simulation.memory.streams import Moves
from trials.simulation.simulated_cell import (
    CONTEXT_BYTES,
    GIB,
    SimulatedCell,
    model_parameters,
)
from trials.simulation.simulated_prober import paged_notes
from trials.simulation.timing_model import host_link_bytes_per_second
from trials.simulation.trace_cache import TraceError, Traces
from trials.simulation.whole_step import Steps


def test_the_largest_batch_size_is_exact_for_every_limit() -> None:
    """For several limits the largest batch size fits and one more does not."""
    gpu, model = load_catalog().gpu("A40"), find_model("mixtral-tiny")
    recipe = with_defaults(Recipe(method="full"), model, gpu)
    cell = Cell(
        gpu="A40",
        simulated=True,
        model=model.name,
        recipe=recipe,
        experts=8,
        active_experts=2,
        seq_len=32,
    )
    simulated = SimulatedCell(cell, model, Traces())
    for limit_mib in (60, 85, 110, 160):
        limit = limit_mib * 2**20
        largest = simulated.largest_batch(gpu, limit, 4096)
        fit, miss = (simulated.without_limit(b, gpu) for b in (largest, largest + 1))
        assert fit.peak_reserved_bytes <= limit < miss.peak_reserved_bytes


def test_the_effective_batch_fits_where_a_smaller_micro_batch_does_not() -> None:
    """It accumulates no gradients, and is the largest batch size wherever it fits."""
    gpu, model = load_catalog().gpu("A40"), find_model("llama-tiny")
    recipe = with_defaults(Recipe(method="full", effective_batch=4), model, gpu)
    cell = tiny_cell(recipe=recipe).model_copy(update={"gpu": "A40", "simulated": True})
    simulated = SimulatedCell(cell, model, Traces())
    held = {size: simulated.without_limit(size, gpu).peak_reserved_bytes for size in (1, 2, 3, 4)}
    assert held[1] == held[2] == held[4] < held[3]  # the allocator's segments are of 2 MiB
    assert simulated.largest_batch(gpu, held[4], 100) == 4
    assert simulated.memory(3, gpu, held[4]).outcome is not Outcome.FITS
    assert simulated.largest_batch(gpu, held[4], 3) == 2  # among those that accumulate
    assert simulated.largest_batch(gpu, held[4] - 1, 100) == 0
    for batch_size in ("max", "fastest"):
        (row,) = orchestrator.estimate(
            "llama-tiny",
            gpu="A40",
            memory_gib=(held[4] + CONTEXT_BYTES) / GIB,
            seq_len=16,
            batch_size=batch_size,
            method="full",
            effective_batch=4,
            defaults="plain",
        )
        assert row.estimate.max_batch_size == 4
        assert row.estimate.outcome is Outcome.FITS


def test_memory_in_use_is_computed_once_for_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs on which a batch of one size is tried share the peak of its step."""
    computed: list[int] = []
    own = Steps.moves

    def counted(steps: Steps, batch_size: int) -> Moves:
        computed.append(batch_size)
        return own(steps, batch_size)

    monkeypatch.setattr(Steps, "moves", counted)
    catalog, model = load_catalog(), find_model("llama-tiny")
    recipe = with_defaults(Recipe(method="full"), model, catalog.gpu("A40"))
    simulated = SimulatedCell(tiny_cell(recipe=recipe), model, Traces())
    peaks = [simulated.peak_bytes(4, catalog.gpu(key)) for key in ("A40", "L40S", "H100-SXM")]
    assert computed == [4]
    assert peaks[0] == peaks[1] < peaks[2]  # whose cuBLAS takes more


def test_batches_beyond_any_memory_neither_overflow_nor_hang() -> None:
    """The largest batch is searched for up to any limit; a batch that is asked for is refused."""
    gpu, model = load_catalog().gpu("A40"), find_model("llama-tiny")
    recipe = with_defaults(Recipe(method="full"), model, gpu)
    cell = tiny_cell(recipe=recipe).model_copy(update={"gpu": "A40", "simulated": True})
    simulated = SimulatedCell(cell, model, Traces())
    limit = 2**30
    assert simulated.peak_bytes(MOST_COUNTED, gpu) > MOST_BYTES
    assert simulated.memory(MOST_COUNTED, gpu, limit).outcome is Outcome.OUT_OF_MEMORY
    largest = simulated.largest_batch(gpu, limit, MOST_COUNTED)
    assert largest == simulated.largest_batch(gpu, limit, 10**6)
    with pytest.raises(TraceError, match="smaller model, batch size or length"):
        simulated.without_limit(MOST_COUNTED, gpu)


def test_paged_state_without_room_on_the_gpu_is_said_to_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both moments in fp32 take 8 bytes of each weight; what the link copies in 2 s is missing."""
    gpu, model = load_catalog().gpu("A40"), find_model("llama-tiny")

    def notes(optimizer: Optimizer, room: float) -> list[str]:
        recipe = with_defaults(Recipe(method="full", optimizer=optimizer), model, gpu)
        simulated = SimulatedCell(tiny_cell(recipe=recipe), model, Traces())
        counts = model_parameters(simulated)
        assert counts is not None
        state = 8 * counts.trainable
        for name, value in (
            ("LEAST_PAGED_BYTES", 1),
            ("GIB", state / 4),
            ("host_link_bytes_per_second", lambda _: state / 4),
        ):
            monkeypatch.setattr(simulated_prober, name, value)
        reserved = simulated.without_limit(8, gpu).peak_reserved_bytes + CONTEXT_BYTES
        usable = reserved + round(room * state)
        return paged_notes(simulated, gpu.model_copy(update={"usable_memory_bytes": usable}), 8)

    (note,) = notes("paged_adamw_32bit", 0.5)
    assert "2.0 of the 4.0 GiB of its state have no room" in note
    assert "at least 2.0 s a step" in note
    assert notes("paged_adamw_32bit", 1.0) == []
    assert notes("paged_adamw_32bit", -0.1) == []  # the batch itself has no room
    assert notes("adamw_8bit", 0.5) == []
    assert host_link_bytes_per_second(gpu) == pytest.approx(0.8 * 31.5e9)
