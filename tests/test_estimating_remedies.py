"""The search for a change that fits: recipes that are left out without a trace."""

import datetime as dt
from functools import partial
from typing import Any

from gpu_catalog.catalog import load_catalog
from orchestrator.estimating.choosing.memory_bound import cannot_fit
from orchestrator.estimating.choosing.recipe_choice import fits
from orchestrator.estimating.choosing.remedies import some_settings
from orchestrator.estimating.estimate import estimates
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.estimating.estimate_request import (
    EstimateRequest,
    question_of,
    varied_question,
)
from orchestrator.estimating.question import EstimatedJob
from orchestrator.estimating.requested_gpus import requested_gpus
from orchestrator.request import request_of
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
