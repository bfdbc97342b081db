"""Sentences of an estimate's recommendation: what it must not leave unsaid."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orchestrator
from fitting.laws.fit_result import Interval
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.reporting.estimate_recommendation import padding_text, verdict
from orchestrator.reporting.estimate_tables import as_table
from orchestrator.reporting.sections.alternative_recipes import chosen_recipe
from orchestrator.spec.recipe_options import OpenCell
from trials.records.observation import Outcome

OPTIONS: dict[str, Any] = {
    "model": "llama-tiny",
    "seq_len": 512,
    "method": "full",
    "effective_batch": 16,
}
OPEN = OpenCell(gpu="A40", model="llama-tiny", stated={}, active_experts=None, seq_len=512)
DOUBT = "A batch of 16 may not fit"


def text_of(rows: Sequence[Estimated], low: int) -> str:
    """Recommendation of the first row where its memory may hold a batch of ``low`` alone."""
    best, *others = rows
    changes = {"max_batch_size_interval": Interval(low=low, high=16)}
    best = replace(best, estimate=best.estimate.model_copy(update=changes))
    return verdict([best, *others], best.question.constraints)


def test_a_recommended_batch_that_may_not_fit_is_doubted() -> None:
    """Where not even one example may fit, the cheapest GPU that surely holds its batch is named."""
    rows = orchestrator.estimate(**OPTIONS, gpu=("A40", "H100-SXM")).estimated
    best, other = (row.estimate for row in rows)
    assert best.batch_size == best.max_batch_size_interval.low == 16
    assert other.price is not None
    assert DOUBT not in text_of(rows, 16)
    doubted = text_of(rows, 1)
    assert f"{DOUBT} (1 to 16)." in doubted
    assert other.gpu not in doubted
    unsure = text_of(rows, 0)
    assert f"{DOUBT} (0 to 16)." in unsure
    assert f"surely fits: {other.gpu} from {other.price.provider}" in unsure
    assert text_of(rows[:1], 0).endswith("(0 to 16).")


def test_a_recommendation_without_a_price_says_as_much_of_its_batch() -> None:
    """The options that were chosen, what comes on top, and whether the batch may not fit."""
    options: dict[str, Any] = {"model": "llama-tiny", "seq_len": 512, "gpu": "A40"}
    (row,) = orchestrator.estimate(**options, memory_gib=40).estimated
    estimate = row.estimate
    assert estimate.options is not None
    assert estimate.price is None
    assert f"at batch size 16 with {estimate.options}." in text_of([row], 16)
    assert DOUBT not in text_of([row], 16)
    assert f"{DOUBT} (1 to 16)." in text_of([row], 1)
    generates = estimate.model_copy(update={"left_out": "generating completions"})
    text = verdict([replace(row, estimate=generates)], row.question.constraints)
    assert f"with {estimate.options}; generation comes on top." in text


def test_the_batches_of_a_row_say_what_fits_and_what_may() -> None:
    """Lengths that vary have a smaller largest batch, and memory is that of the asked one."""
    (row,) = orchestrator.estimate(**OPTIONS, gpu="A40").estimated

    def shown(low: int, high: int, **changes: Any) -> str:
        changes |= {"batch_size": 2, "max_batch_size_interval": Interval(low=low, high=high)}
        estimate = row.estimate.model_copy(update=changes)
        return as_table([replace(row, estimate=estimate)], row.question)

    fits = {"max_batch_size": 9, "micro_batches": 8}
    assert "| 2 x 8 of 9 (7 to 10) |" in shown(7, 10, **fits)
    varying = shown(7, 10, **fits, surviving_batch_size=4)
    assert "| 2 x 8 of 4 |" in varying
    assert "the largest micro-batch that survives an epoch is 4." in varying
    lacks = {"max_batch_size": 0, "outcome": Outcome.OUT_OF_MEMORY}
    assert "| 2: out of memory; 1, too |" in shown(0, 0, **lacks)
    assert "| 2: out of memory; 1 may fit |" in shown(0, 1, **lacks)


def test_each_end_of_the_padding_has_its_batch_size(tmp_path: Path) -> None:
    """A range over GPUs of different sizes says nothing about any of them."""
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,examples\n64,900\n512,100\n", encoding="utf-8")
    options = {**OPTIONS, "seq_len": None, "length_histogram": path}
    rows = orchestrator.estimate(**options, gpu="A40").estimated
    small, large = (
        replace(row, estimate=row.estimate.model_copy(update={"batch_size": size}))
        for row, size in ((rows[0], 1), (rows[0], 8))
    )
    text = padding_text([small, large], rows[0].question) or ""
    mean = 0.9 * 64 + 0.1 * 512
    padded = 512 - 0.9**8 * (512 - 64)  # the longest of eight is the long one, or is not
    assert text.startswith(f"Padding is 0% (batch 1) to {1 - mean / padded:.0%} (batch 8) of the")


def test_a_small_saving_of_quantised_weights_is_passed_over_and_said() -> None:
    """They approximate the model; without data, LoRA and QLoRA of a tiny model cost about alike."""
    options: dict[str, Any] = {"model": "llama-tiny", "seq_len": 512, "gpu": "A40"}
    (row,) = orchestrator.estimate(**options)
    best = row.estimate
    (other,) = (
        one
        for one in best.alternatives
        if one.method == "qlora" and one.options.endswith(str(best.options).split()[-1])
    )
    assert best.method == "lora"
    assert best.price is not None
    for share, objective, said in (
        (0.99, "cost", "(1.0%), less than the 5% that quantised weights have to save."),
        (0.99, "time", "(1.0%), less than the 5% that quantised weights have to save."),
        (0.951, "cost", "(4.9%), less than the 5%"),
        (0.949, "cost", ""),
        (1.01, "cost", ""),
    ):
        changes = {"usd": share * best.price.usd, "hours": share * best.price.hours}
        cheaper = other.model_copy(update={**changes, "surely_fits": True})
        wanted = row.question.constraints.model_copy(update={"objective": objective})
        changed = replace(
            row,
            estimate=best.model_copy(update={"alternatives": (cheaper,)}),
            question=replace(row.question, constraints=wanted),
        )
        text = verdict([changed], wanted)
        assert (f" {other.options} would save " in text) == bool(said)
        assert said in text
        if objective == "cost":
            reason = chosen_recipe(OPEN, changed).reason
            assert reason.startswith("chosen: $" if said else "the cheapest that fits: $")
