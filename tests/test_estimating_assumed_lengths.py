"""Runs on assumed lengths, for a job whose lengths are unknown."""

from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.estimating.assumed_lengths import drawn, with_assumed_lengths
from orchestrator.estimating.estimate_records import Estimates
from orchestrator.reporting.notes.data_notes import data_notes

JOB: dict[str, Any] = {"model": "llama-tiny", "method": "full", "gpu": "A40", "memory_gib": 1.5}
JOB |= {"defaults": "plain", "batch_size": 8, "examples": 400}
LENGTH = 512


def estimated(**options: Any) -> Estimates:
    """Estimate of a tiny model with the runs that the command adds to it."""
    return with_assumed_lengths(orchestrator.estimate(**(JOB | options)))


def test_runs_are_those_of_the_data_set_scaled_to_the_length(tmp_path: Path) -> None:
    """With these lengths as its own the job has the same batch and the same memory."""
    alone = estimated(seq_len=LENGTH)
    assumed = alone.estimated[0].estimate.assumed_lengths
    assert assumed is not None
    histogram = drawn(LENGTH, 400).histogram
    assert histogram[-1][0] == LENGTH
    path = tmp_path / "lengths.csv"
    rows = "".join(f"{tokens},{number}\n" for tokens, number in histogram)
    path.write_text(f"tokens,examples\n{rows}", encoding="utf-8")
    given = estimated(length_histogram=path, cutoff=LENGTH, pad_to_multiple=8)
    row = given.estimated[0].estimate
    assert row.assumed_lengths is None
    assert row.seq_len == LENGTH
    assert row.surviving_batch_size == assumed.surviving_batch_size
    assert row.varying_reserved_gib is not None
    assert row.varying_reserved_gib.high == pytest.approx(assumed.reserved_gib.high, rel=0.01)
    (note,) = data_notes(alone.estimated[0], alone.question)
    assert f"{assumed.surviving_batch_size} of {alone.estimated[0].estimate.max_batch_size}" in note


@pytest.mark.parametrize(
    "options",
    [{"seq_len": 16}, {"seq_len": LENGTH, "memory_gib": 0.6}, {"seq_len": LENGTH, "task": "dpo"}],
    ids=["too short", "misfit", "pairs"],
)
def test_without_a_padded_batch_that_fits_there_are_none(options: dict[str, Any]) -> None:
    """The estimate stands as it is."""
    assert estimated(**options).estimated[0].estimate.assumed_lengths is None
