"""Updates of one step, put into another with the same parameters, are those that it would have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.long_cases import long_cases
from builders.observations import recipe
from builders.whole_steps import deep, numbered_in_order, simulated_cell

from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.model import Model
from trials.simulation.layer_expansion import whole_steps
from trials.simulation.recording import UPDATES, Column, Recording, StructureError
from trials.simulation.trace_cache import StepTrace, Traces, write_trace
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing.tracing_worker import Tracing
from trials.simulation.tracing.updates.shared_updates import with_shared_updates
from trials.simulation.whole_step import Steps

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
LLAMA, MIXTRAL = deep("llama-tiny", 6), deep("mixtral-tiny", 6)
MARK = 2.0**40
SHARDS = Parallel(gpus=4, strategy="fsdp2")


def request(
    model: Model, settings: Recipe, batch: int | None, layout: Parallel | None
) -> TraceRequest:
    """Trace of steps of this batch size, or of all, with few layers for all."""
    return TraceRequest(
        cell=simulated_cell(model, settings, parallel=layout), model=model, batch_size=batch
    )


def assert_alike(ours: StepTrace, theirs: StepTrace, layout: Parallel | None) -> None:
    """Two traces give the same events, peaks and operators."""
    for micro_batches in (1, 2):
        pairs = [
            numbered_in_order(whole_steps(trace.recordings, trace.copies, micro_batches)[0])
            for trace in (ours, theirs)
        ]
        for column, expected in zip(*pairs, strict=True):
            assert np.array_equal(column, expected)
        both = [Steps(trace, micro_batches, layout) for trace in (ours, theirs)]
        size = ours.batch_sizes[0]
        assert both[0].peak_bytes(size) == both[1].peak_bytes(size)
        assert both[0].at_peak(size) == both[1].at_peak(size)
        seconds = [steps.operators(size).in_full.numbers for steps in both]
        assert np.array_equal(*seconds)


FULL = recipe("full", precision="bf16-mixed", max_grad_norm=1.0)
LORA = recipe("lora", precision="bf16-mixed", max_grad_norm=1.0)
QUICK = [(LLAMA, FULL, None), (LLAMA, LORA, None)]
STEPS = [
    *QUICK,
    (LLAMA, recipe("full", precision="fp16", optimizer="adamw_8bit"), None),
    (LLAMA, recipe("full", precision="bf16", optimizer="adafactor"), None),
    (MIXTRAL, recipe("qlora", precision="bf16", max_grad_norm=1.0), None),
    (LLAMA, FULL, SHARDS),
    (LLAMA, LORA, SHARDS),
]
OTHER_PASSES: list[tuple[dict[str, Any], int]] = [
    ({"gradient_checkpointing": True}, 4),
    ({"loss": "chunked"}, 2),
    ({}, 1),
    ({"attention": "eager"}, 2),
]


@pytest.mark.parametrize(
    ("model", "settings", "layout", "others"),
    [
        *((*step, OTHER_PASSES[n : n + 1]) for n, step in enumerate(QUICK)),
        *long_cases((*step, OTHER_PASSES) for step in STEPS),
    ],
    ids=lambda each: getattr(each, "key", getattr(each, "name", "")),
)
def test_shared_updates_are_those_of_the_step_itself(
    model: Model,
    settings: Recipe,
    layout: Parallel | None,
    others: Sequence[tuple[dict[str, Any], int]],
    tmp_path: Path,
) -> None:
    """With checkpointing, of one example, by another loss or attention; also of a trace on disk."""
    tracing, asked = Tracing(), request(model, settings, 4, layout)
    first = tracing.trace(asked)
    write_trace(tmp_path / f"{asked.key}.npz", first)
    for change, batch in others:
        asked = request(model, settings.model_copy(update=change), batch, layout)
        assert_alike(tracing.trace(asked), Tracing().trace(asked), layout)
        assert tracing._updates[asked.digests_of_updates[0]] is first.recordings[0]
    later = Tracing(earlier=tmp_path)
    assert_alike(later.trace(asked), tracing.trace(asked), layout)
    (stored,) = {*later._updates} - {asked.digests_of_updates[1]}
    assert np.array_equal(later._updates[stored].numbers, first.recordings[0].numbers)


def test_a_trace_takes_the_updates_of_one_that_another_process_made(tmp_path: Path) -> None:
    """Each of several processes; they are marked here by their bytes."""
    checkpointed = LORA.model_copy(update={"gradient_checkpointing": True})
    pairs = [(settings, size) for settings in (LORA, checkpointed) for size in (None, 1)]
    few = [request(LLAMA, settings, size, None) for settings, size in pairs]
    traces = Traces(tmp_path, workers=2)
    traces.prepare(few)
    assert {path.stem for path in tmp_path.iterdir()} == {asked.key for asked in few}
    for asked in few:
        marked = traces.get(asked).recordings[0]
        marked.numbers[np.isin(marked.segments, [*UPDATES]), Column.BYTES] += MARK
        write_trace(tmp_path / f"{asked.key}.npz", traces.get(asked))
    chunked = LORA.model_copy(update={"loss": "chunked"})
    longer = few[0].cell.model_copy(update={"seq_len": 2 * few[0].cell.seq_len})
    others = [few[0].model_copy(update={"cell": longer, "batch_size": size}) for size in (None, 1)]
    later = Traces(tmp_path, workers=2)
    later.prepare([*others, request(LLAMA, chunked, None, None)])
    others += [request(LLAMA, chunked, size, None) for size in (None, 1)]  # the last one alone
    for asked in others:
        assert later.get(asked).recordings[0].numbers[:, Column.BYTES].max() > MARK


def test_updates_of_other_parameters_are_not_shared() -> None:
    """Adapters of another rank have gradients of another size."""
    recordings: list[Recording] = []
    for rank in (4, 8):
        settings = recipe("lora", precision="bf16", lora_rank=rank)
        recordings += Tracing().trace(request(LLAMA, settings, 4, None)).recordings
    with pytest.raises(StructureError, match="other gradients"):
        with_shared_updates(*recordings)


@pytest.mark.parametrize(("settings", "layout"), [(FULL, None), (LORA, SHARDS)])
def test_a_model_built_with_checkpointing_can_do_without_it(
    settings: Recipe, layout: Parallel | None
) -> None:
    """Its next trace is that of a model built without; one with checkpointing is built anew."""
    checkpointed = settings.model_copy(update={"gradient_checkpointing": True})
    first, asked = (
        request(LLAMA, one, 2, layout).model_copy(update={"with_updates": False})
        for one in (checkpointed, settings)
    )
    tracing = Tracing()
    tracing.trace(first)
    assert tracing.trace(asked).digest == Tracing().trace(asked).digest
    assert tracing.cell(asked) is not tracing.cell(first)
