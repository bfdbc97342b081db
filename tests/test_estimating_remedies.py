"""The search for a change that fits: recipes that are left out without a trace."""

import datetime as dt
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from gpu_catalog.catalog import load_catalog
from orchestrator.estimating.choosing.memory_bound import cannot_fit
from orchestrator.estimating.choosing.recipe_choice import fits
from orchestrator.estimating.choosing.remedies import ALL_CHANGES, some_settings
from orchestrator.estimating.estimate import estimates
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.estimating.estimate_request import (
    EstimateRequest,
    question_of,
    varied_question,
)
from orchestrator.estimating.question import EstimatedJob
from orchestrator.estimating.requested_gpus import requested_gpus
from orchestrator.reporting.estimate_tables import as_table
from orchestrator.request import request_of
from trials.recipes.parallel import Parallel
from trials.simulation.recording import Purpose
from trials.simulation.simulated_cell import GIB
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces

WITHOUT_CHECKPOINTING: dict[str, Any] = {
    "model": "qwen2.5-0.5b",
    "seq_len": 512,
    "method": "lora",
    "gradient_checkpointing": "off",
    "defaults": "plain",
    "effective_batch": 64,
    "batch_size": 16,
    "experts": "grouped",  # as configurations state it, whether or not the model has any
}
CONTEXT_GIB = 0.5
ONE_OR_TWO: dict[str, Any] = {
    "model": str(Path(__file__).parent / "data" / "half-a-billion.json"),
    "seq_len": 1024,
    "method": "full",
    "gradient_checkpointing": "on",
    "batch_size": 1,
    "gradient_accumulation": 1,
    "gpu": "A40",
    "gpus": (1, 2),
    "strategy": "fsdp2",
}


def estimated(jobs: list[EstimatedJob]) -> list[Estimated]:
    """Estimates of jobs, without a search for changes."""
    return estimates(jobs, load_catalog(), EfficiencyConstants(), Traces())


def test_what_is_left_out_without_a_trace_does_not_fit() -> None:
    """On a GPU that holds most of what one example keeps in the layers, only the loss differs.

    Recipes without checkpointing are left out, and misfit when they are traced after all; those
    with it never are, nor is anything on a GPU that holds one example.
    """
    request = request_of(EstimateRequest, WITHOUT_CHECKPOINTING)
    question = question_of(request, load_catalog(), dt.date(2026, 11, 23))
    (a40,) = requested_gpus(("A40",), None, load_catalog())
    (row,) = estimated([(question, a40)])
    kept = row.cell.at_peak(2, a40)[Purpose.CHECKPOINT] / 2 / GIB
    model = float(row.cell.held.sizes.sum()) / GIB
    (small,) = requested_gpus(("A40",), CONTEXT_GIB + model + 0.8 * kept, load_catalog())
    varied = partial(varied_question, request, question)
    questions = [
        q for changes in some_settings(question, "TRL") if (q := varied(changes)) is not None
    ]
    (misfit,) = estimated([(question, small)])
    left_out = [q for q in questions if cannot_fit(q, misfit)]
    assert {q.recipe.loss for q in left_out} == {"full-logits", "chunked"}
    assert not any(q.recipe.gradient_checkpointing for q in left_out)
    assert not any(map(fits, estimated([(q, small) for q in left_out])))
    assert not any(cannot_fit(q, row) for q in questions)


def test_a_number_of_gpus_that_only_fragments_exclude_fits_by_a_setting() -> None:
    """One GPU does with pages that grow; where it is too small for that, two may still fit.

    No text says then that no change helps: most changes were not tried.
    """
    alone, _ = sorted(orchestrator.estimate(**ONE_OR_TWO), key=lambda row: row.estimate.gpus)
    in_use, reserved = alone.estimate.peak_gib, alone.estimate.reserved_gib
    near, small = (CONTEXT_GIB + part * in_use + (1 - part) * reserved for part in (0.2, 1.1))
    for memory, options in ((near, ["--expandable-segments"]), (small, [])):
        found = orchestrator.estimate(**ONE_OR_TWO, memory_gib=memory)
        two, one = found.estimated
        assert fits(two)
        assert not fits(one)
        assert [change.options for change in one.estimate.alternatives] == options
        assert "No change" not in as_table(found.estimated, found.question)
        # Whoever asks for one GPU may not know that several would do.
        assert ("not tried: --gpus 2,4,8" in as_table([one], found.question)) == (not options)


@pytest.mark.long
def test_where_nothing_helps_on_one_gpu_the_host_may_hold_the_weights() -> None:
    """By DeepSpeed, which traces all layers."""
    found = orchestrator.estimate(**ONE_OR_TWO | {"gpus": (1,), "memory_gib": 0.9})
    text = as_table(found.estimated, found.question)
    assert "No change that was tried" in text
    assert "--strategy deepspeed-zero3 --offload all was not tried" in text


def test_a_given_degree_of_tensor_parallelism_is_no_change_to_make() -> None:
    """Layers that are divided already are divided among no more GPUs; of shards it is tried."""
    request = request_of(EstimateRequest, WITHOUT_CHECKPOINTING)
    question = question_of(request, load_catalog(), dt.date(2026, 11, 23))
    for layout in (
        Parallel(gpus=8, strategy="tp", degree=2),
        Parallel(gpus=8, strategy="tp"),
        Parallel(gpus=8, strategy="fsdp2"),
    ):
        placed = replace(question, parallel=layout)
        changes = [change for altered in ALL_CHANGES for change in altered(placed)]
        assert ({"strategy": "tp"} in changes) == (layout.strategy == "fsdp2")
        assert {"strategy": "fsdp2", "offload": "all"} in changes


def test_several_gpus_leave_shards_to_the_host_before_a_change_alters_training() -> None:
    """Two hold the layers that they gather, and not the optimizer's state; nothing else is tried.

    Of less memory than the weights are in parts, tensor parallelism is not traced.
    """
    asked = ONE_OR_TWO | {"gpus": (2,), "strategy": "auto"}
    found = orchestrator.estimate(**asked, memory_gib=4.0)
    (row,) = found.estimated
    (change,) = row.estimate.alternatives
    assert (change.options, change.learns_alike) == ("--strategy fsdp2 --offload all", True)
    assert f"With {change.options} the job fits" in as_table(found.estimated, found.question)
