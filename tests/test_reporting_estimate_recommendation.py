"""Sentences of an estimate's recommendation: what it must not leave unsaid."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orchestrator
from fitting.laws.fit_result import Interval
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.reporting.estimate_recommendation import verdict

OPTIONS: dict[str, Any] = {
    "model": "llama-tiny",
    "seq_len": 512,
    "method": "full",
    "effective_batch": 16,
}
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
