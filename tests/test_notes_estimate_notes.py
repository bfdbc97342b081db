"""Notes below an estimate in a terminal: short lists of GPUs, and first what decides."""

import json
from dataclasses import replace

import pytest

import orchestrator
from gpu_catalog.catalog import load_catalog
from orchestrator.cli.main import main
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.reporting.estimate_tables import as_table
from orchestrator.reporting.notes.estimate_notes import (
    SEEN_TOTALS,
    all_notes,
    brief_notes,
    shortened,
)
from orchestrator.reporting.sections.alternative_recipes import runners_up_text
from trials.records.observation import Outcome
from trials.simulation.clock.time_error import time_errors

TINY = ["estimate", "--model", "llama-tiny", "--seq-len", "16", "--method", "lora"]
GPUS = ["A40", "A100-40GB-SXM", "A100-80GB-SXM", "H100-SXM", "L4", "L40", "L40S"]


def test_a_long_list_of_gpus_ends_with_the_number_of_the_others() -> None:
    """Each may have more to say in parentheses; a short list and other commas stay."""
    note = f"No price for {', '.join(GPUS)}: the catalog, as it is, has none."
    assert shortened(note, GPUS) == (
        "No price for A40, A100-40GB-SXM, A100-80GB-SXM and 4 more: the catalog, as it is, has "
        "none."
    )
    costs = ", ".join(f"{gpu} ($1.5, batch 1 x 16)" for gpu in GPUS)
    assert shortened(costs, GPUS).endswith("A100-80GB-SXM ($1.5, batch 1 x 16) and 4 more")
    assert shortened("On A40, L4, L40, L40S it fits.", GPUS) == "On A40, L4, L40, L40S it fits."


def test_a_terminal_gets_the_rows_and_notes_that_decide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what it leaves out; --wide and a pipe have all of it."""
    assert main(TINY) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for name, value in {"TERM": "dumb", "COLUMNS": "200", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    assert main(TINY) == 0
    brief = capsys.readouterr().out
    assert len([line for line in brief.splitlines() if line.startswith("| ")]) == 7
    assert "Not shown: " in brief
    assert "notes on approximations and assumptions; --wide shows them." in brief
    assert "Constants of the step times" in brief
    assert "CUDA's context" not in brief
    assert len(brief.splitlines()) < 40
    assert main([*TINY, "--wide"]) == 0
    assert capsys.readouterr().out == whole.replace("**", "")


def test_rows_that_exceed_the_budget_do_not_count_as_unpriced() -> None:
    """Another note on the same screen names the dollars by which they exceed it."""
    over = {"gpu": "A40,L4,L40S,A100-80GB-SXM", "seq_len": 16, "method": "full"}
    found = orchestrator.estimate("llama-tiny", budget_usd=0.001, **over)
    rows = found.estimated
    assert "Rows are sorted by speed." in as_table(rows, found.question)
    *_, last = brief_notes([""], [rows], 2)
    assert "2 rows (2 exceed the deadline or budget)" in last


def test_usable_memory_is_as_far_from_the_marketed_size_as_the_note_says() -> None:
    """On the CUDA GPUs whose total was seen."""
    seen = [
        gpu.usable_memory_bytes / (gpu.marketed_memory_gb * 1e9)
        for gpu in load_catalog().gpus
        if gpu.kind == "cuda" and gpu.usable_memory_bytes and gpu.marketed_memory_gb
    ]
    assert (round(min(seen), 2), round(max(seen), 2)) == SEEN_TOTALS


def with_fields(row: Estimated, **fields: object) -> Estimated:
    """An estimate with other fields."""
    return replace(row, estimate=row.estimate.model_copy(update=fields))


def test_only_rows_that_fit_have_parts_that_no_run_was_compared_with() -> None:
    """A recipe of GPUs that the job does not fit is none that the user may choose."""
    estimates = orchestrator.estimate("llama-tiny", gpu="A40,T4", seq_len=16, method="full")
    of_gpu = {row.gpu.key: row for row in estimates}
    assert of_gpu["T4"].estimate.not_compared == ("precision fp16",)
    too_large = with_fields(of_gpu["T4"], outcome=Outcome.OUT_OF_MEMORY)
    for t4, is_named in ((of_gpu["T4"], True), (too_large, False)):
        text = as_table([of_gpu["A40"], t4], estimates.question)
        assert ("precision fp16" in text) == is_named
    nowhere = as_table([too_large], estimates.question)
    assert "precision fp16" in nowhere  # the memory that is missing may be wrong


def test_the_caveat_of_an_offer_is_said_once() -> None:
    """Also where it is the best offer of several rows."""
    estimates = orchestrator.estimate("llama-tiny", gpu="A40,L4", seq_len=16, method="full")
    first, second = estimates
    assert first.estimate.price is not None
    price = first.estimate.price.model_copy(update={"note": "without its disk"})
    other = price.model_copy(update={"instance": "another"})
    rows = [with_fields(first, price=price), with_fields(second, price=price)]
    said = f"{price.provider} {price.instance}: without its disk."
    assert as_table(rows, estimates.question).count("without its disk") == 1
    shown = as_table([*rows, with_fields(second, price=other)], estimates.question)
    assert said in shown
    assert f"\n{price.provider} another: without its disk." in shown


def test_a_runner_up_that_may_not_fit_says_whether_it_is_cheaper() -> None:
    """Below a dearer recommendation it would otherwise look like a mistake."""
    (row,) = orchestrator.estimate("llama-tiny", gpu="A40", seq_len=512)
    assert row.estimate.price is not None
    runner_up, usd = row.estimate.alternatives[0], row.estimate.price.usd
    for its_usd, said in (
        (usd / 2, " (cheaper, but may not fit)"),
        (usd * 2, " (may not fit)"),
    ):
        changes = {"usd": its_usd, "surely_fits": False, "learns_alike": True}
        other = runner_up.model_copy(update=changes)
        note, *_ = runners_up_text([with_fields(row, alternatives=(other,))])
        assert note.startswith(f"Runners-up on A40: {other.options}, $")
        assert f"x {other.micro_batches}{said}" in note


def test_only_gpus_with_batches_of_their_own_wait_for_the_longest() -> None:
    """One group of tensor parallelism trains on one batch, and waits for no other."""
    (row,) = orchestrator.estimate("llama-tiny", gpu="A40", seq_len=16, method="full")
    for degree, waits in ((None, True), (2, True), (4, False)):
        several = with_fields(row, gpus=4, degree=degree, tokens_per_example=12.0)
        text = "\n".join(all_notes([""], [[several]]))
        assert "times at 12" in text
        assert ("wait for the longest of their batches" in text) == waits


@pytest.mark.parametrize("gpus", [1, 2])
def test_step_times_on_several_gpus_come_with_what_published_ones_took(gpus: int) -> None:
    """The choice between one GPU and eight may be closer than the known error."""
    (row,) = orchestrator.estimate("llama-tiny", gpu="A40", seq_len=16, method="full")
    text = "\n".join(brief_notes([""], [[with_fields(row, gpus=gpus)]], 2))
    assert ("14 and 18 % too short" in text) == (gpus > 1)


@pytest.mark.parametrize(
    ("strategy", "speed", "is_explained"),
    [("fsdp2", 2.4, True), ("fsdp2", 2.0, False), ("ddp", 2.4, False)],
)
def test_more_speed_than_gpus_is_explained(
    strategy: str, speed: float, *, is_explained: bool
) -> None:
    """A reader would take it for a mistake; copies of the model have no such reason."""
    (row,) = orchestrator.estimate("llama-tiny", gpu="A40", seq_len=16, method="lora")
    assert row.estimate.examples_per_second is not None
    faster = speed * row.estimate.examples_per_second
    two = with_fields(row, gpu="2xA40", gpus=2, strategy=strategy, examples_per_second=faster)
    text = "\n".join(all_notes([""], [[row, two]]))
    assert ("2xA40, 2.4 times as fast" in text) == is_explained


@pytest.mark.parametrize(("step_seconds", "is_said"), [(3.5, True), (3.7, False)])
def test_hours_that_are_mostly_assumed_are_told_from_those_of_the_steps(
    step_seconds: float, *, is_said: bool
) -> None:
    """A short job's price is that of the start-up, which no GPU makes shorter."""
    asked = {"seq_len": 16, "method": "full", "examples": 1600, "epochs": 5}
    (row,) = orchestrator.estimate("llama-tiny", gpu="A40", effective_batch=16, **asked)
    row = with_fields(row, hours=1.0, step_seconds=step_seconds)  # of 500 steps
    text = "\n".join(all_notes([""], [[row]]))
    assert ("On A40, steps take 0.486 of the 1 h." in text) == is_said


def test_the_order_is_trusted_where_all_rows_have_one_interval_of_the_time() -> None:
    """Each interval has its ends and the number of the measured steps that it comes from."""
    errors = time_errors()
    estimates = orchestrator.estimate("llama-tiny", gpu="A40,L4", seq_len=16, method="full")
    first, second = estimates
    assert first.estimate.time_error == errors.of_host  # the host launches more than the GPU does
    one, two = (
        as_table([first, with_fields(second, time_error=error)], estimates.question)
        for error in (errors.of_host, errors.of_gpu)
    )
    assert "Step times of all rows are mostly off" in one
    assert "Step times of rows with equally wide intervals" in two
    for error, number in ((errors.of_host, 2), (errors.of_gpu, 1)):
        text = f"{1 - error.low:.0%} below to {error.high - 1:.0%} above the prediction"
        shown = [line for line in (one + two).splitlines() if text in line]
        assert len(shown) == number
        assert all(f"{error.steps} measured steps" in line for line in shown)


@pytest.mark.long
def test_the_share_of_an_effective_batch_is_no_limit_of_the_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A GPU that holds its whole share has no largest batch, but one that may not hold it does."""
    tiny = ("estimate", "--model", "llama-tiny", "--seq-len", "512", "--method", "full")
    share = (*tiny, "--effective-batch", "16", "--gpu", "8xA40")
    assert main([*share, "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["max_batch_size"] == estimate["batch_limit"] == 2
    assert main(share) == 0
    shown = capsys.readouterr().out
    assert "| 2  " in shown
    assert " of 2 " not in shown
    assert "accumulation): 2 x 1 on 8xA40, the whole effective batch of 16." in shown
    assert main([*share, "--batch-size", "1"]) == 0
    smaller = "1 x 2 on 8xA40; up to 2 x 1 would fit, the whole effective batch of 16."
    assert smaller in capsys.readouterr().out
    less = (*tiny, "--effective-batch", "64", "--gpu", "A40", "--memory-gib", "0.8")
    assert main([*less, "--json"]) == 0
    interval = json.loads(capsys.readouterr().out)["max_batch_size_interval"]
    assert interval["low"] < 64
    assert main(less) == 0
    bounds = f" ({interval['low']:.0f} to {interval['high']:.0f}) |"
    assert bounds in capsys.readouterr().out


@pytest.mark.parametrize(("batch_size", "effective_batch"), [(7, 14), (20, 20)])
def test_an_assumed_batch_says_that_it_is_a_multiple_of_the_micro_batch(
    batch_size: int, effective_batch: int
) -> None:
    """One GPU shares nothing, so the usual 16 is not rounded up for others."""
    options = {"gpu": "L4", "seq_len": 16, "method": "full", "batch_size": batch_size}
    answered = orchestrator.estimate("llama-tiny", **options)
    text = as_table(answered.estimated, answered.question)
    why = f"the multiple of --batch-size {batch_size} nearest to 16"
    assert f"{effective_batch} examples, which is assumed: {why} (--effective-batch)." in text
