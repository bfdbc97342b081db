"""Changes under which a larger micro-batch survives varying lengths, named where they help."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.estimating.varying_memory import LengthRemedy, length_remedies
from orchestrator.reporting.estimate_recommendation import varying_text, verdict
from orchestrator.reporting.estimate_tables import as_table
from trials.records.observation import Outcome
from trials.simulation.simulated_cell import GIB
from trials.simulation.simulated_prober import usable_bytes

SPREAD = range(16, 1473, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the lengths, the same one for all tests, which share their estimates."""
    return tmp_path_factory.mktemp("lengths")


@cache
def estimated(folder: Path, lengths: range, **options: Any) -> Estimated:
    """Full fine-tuning of a tiny model on examples of these lengths, as many of each."""
    path = folder / "lengths.csv"
    path.write_text("tokens,examples\n" + "".join(f"{n},10\n" for n in lengths), encoding="utf-8")
    tiny = {"model": "llama-tiny", "length_histogram": path, "gpu": "A40", "method": "full"}
    some = {"defaults": "plain", "memory_gib": 1.5, "batch_size": 8}
    (row,) = orchestrator.estimate(**(tiny | some | options))
    return row


def remedies(row: Estimated) -> dict[str, LengthRemedy]:
    """Changes that help, by their names."""
    assert row.varying is not None
    survives = row.estimate.surviving_batch_size or 0
    question = row.question
    found = length_remedies(question.workload, row.varying, row.gpu, survives, question.batch_limit)
    assert all(remedy.batch_size > 1.05 * survives for remedy in found)
    return {remedy.change: remedy for remedy in found}


@pytest.mark.long
def test_what_lets_a_larger_micro_batch_survive_is_named(folder: Path) -> None:
    """Followed, a change gives the micro-batch that was named."""
    row = estimated(folder, SPREAD)
    found = remedies(row)
    named = {"--expandable-segments", "--group-by-length", "the longest batch first"}
    assert named <= found.keys()
    expandable = estimated(folder, SPREAD, expandable_segments=True)
    grouped = estimated(folder, SPREAD, group_by_length=True)
    assert expandable.varying is not None
    assert grouped.varying is not None
    limit = usable_bytes(row.gpu, row.cell.recipe)
    for name, other in (("--expandable-segments", expandable), ("--group-by-length", grouped)):
        assert other.varying is not None
        assert other.varying.survives(found[name].batch_size, row.gpu, limit)
        assert found[name].batch_size >= (other.estimate.surviving_batch_size or 0)
    text = varying_text([row], row.question) or ""
    assert f"{found['the longest batch first'].batch_size} with the longest batch first" in text


@pytest.mark.long
def test_the_memory_that_is_missing_is_that_of_varying_lengths(folder: Path) -> None:
    """A batch that fits at a constant length lacks what the lengths of an epoch fragment."""
    fitting = estimated(folder, SPREAD).estimate
    row = estimated(folder, SPREAD, batch_size=fitting.max_batch_size)
    estimate, varying = row.estimate, row.estimate.varying_reserved_gib
    assert estimate.reserved_gib < estimate.usable_gib
    assert varying is not None
    missing = f"{varying.high - estimate.usable_gib:.1f} GiB more"
    survives = estimate.surviving_batch_size
    assert 0 < (survives or 0) < estimate.max_batch_size
    text = as_table([row], row.question)
    assert f"up to {missing}. The largest batch size that fits is {survives}," in text
    assert f": out of memory; largest {survives} |" in text
    assert "GiB fewer than 19 of these survive." in text


@pytest.mark.long
def test_runs_that_need_more_than_the_gpu_has_say_how_they_end(folder: Path) -> None:
    """In unlimited memory they reserve more than they get, and survive on what they get."""
    survives = estimated(folder, SPREAD).estimate.surviving_batch_size
    row = estimated(folder, SPREAD, batch_size=survives)
    estimate, varying = row.estimate, row.estimate.varying_reserved_gib
    assert varying is not None
    assert varying.high > estimate.usable_gib
    text = varying_text([row], row.question) or ""
    assert f"Within its {estimate.usable_gib:.1f} GiB at least 19 of these survive" in text
    roomy = estimated(folder, SPREAD, memory_gib=8)
    assert "Within its" not in (varying_text([roomy], roomy.question) or "")


@pytest.mark.long
def test_what_helps_little_is_not_named(folder: Path) -> None:
    """Grouping does not where FlashAttention drops the padding, nor twice what is on already."""
    row = estimated(folder, SPREAD, attention="flash_attention_2")
    assert remedies(row).keys() == {"--expandable-segments"}
    settled = estimated(folder, SPREAD, expandable_segments=True)
    assert not remedies(settled)
    assert "rises" not in (varying_text([settled], settled.question) or "")


@pytest.mark.long
def test_padding_to_a_multiple_is_named_with_the_tokens_that_it_adds(folder: Path) -> None:
    """Few lengths fragment less: a second example survives, for some padding."""
    row = estimated(folder, range(64, 4097, 16), memory_gib=0.9, batch_size=2)
    assert row.estimate.surviving_batch_size == 1
    padded = remedies(row)["--pad-to-multiple 512"]
    assert padded.batch_size == 2
    assert 0 < padded.more_tokens < 0.5
    assert "more tokens)" in (varying_text([row], row.question) or "")


def test_a_batch_that_just_survives_is_doubted(folder: Path) -> None:
    """It fits at a constant length even by the error of the memory, but then does not survive."""
    lora: dict[str, Any] = {"method": "lora", "memory_gib": 1.3}
    survives = estimated(folder, SPREAD, **lora).estimate.surviving_batch_size
    assert survives is not None
    just, half = (
        estimated(folder, SPREAD, **lora, batch_size=n) for n in (survives, survives // 2)
    )
    estimate = just.estimate
    assert estimate.max_batch_size_interval.low >= survives
    assert just.varying is not None
    upper_end = round(estimate.usable_gib * GIB / estimate.memory_error.high)
    assert not just.varying.survives(survives, just.gpu, upper_end)
    doubt = "may not survive the data's lengths"
    for row, is_sure in ((just, False), (half, True)):
        assert row.estimate.outcome is Outcome.FITS
        assert (row.estimate.survives_surely, row.estimate.surely_fits) == (is_sure, is_sure)
        assert (doubt not in verdict([row], row.question.constraints)) == is_sure
