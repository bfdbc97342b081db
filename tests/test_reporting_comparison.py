"""Comparison of two runs."""

import re

import pytest
from builders.runs import ONE_CELL, SIMULATED, results

from orchestrator.reporting.comparison import (
    ANOTHER_HOUR,
    changes_table,
    compare,
    comparison_markdown,
)
from orchestrator.reporting.markdown_report import cheapest_section
from trials.records.observation import Basis, Observation

BOTH = ONE_CELL.replace("workload:", f"{SIMULATED}workload:")
RECIPES = ONE_CELL.replace(
    "recipes: [{", "recipes: [{gradient_checkpointing: true, method: full, precision: fp32}, {"
)


def slower(observations: list[Observation], by: float) -> list[Observation]:
    """The same probes with every step time multiplied by a factor."""
    changed = []
    for o in observations:
        measured = o.measurement
        if measured is not None:
            steps = tuple(by * seconds for seconds in measured.step_seconds)
            measured = measured.model_copy(update={"step_seconds": steps})
        changed.append(o.model_copy(update={"measurement": measured}))
    return changed


def test_two_simulations_have_no_interval() -> None:
    """They share their error; a measured cell beside them has an interval."""
    before = results(BOTH)
    comparison = compare(before, results(BOTH, slower(before.observed, 1 / 1.05)), ("a", "b"))
    speeds = {speed.cell.gpu: speed for speed in comparison.speeds}
    for gpu in ("A40", "H100-SXM"):
        assert (speeds[gpu].low, speeds[gpu].high) == (None, None)
        assert (speeds[gpu].change, speeds[gpu].verdict) == ("+5.0%", "faster, both simulated")
    assert speeds["cpu"].low is not None
    assert speeds["cpu"].change.startswith("+5.0% (")
    table = changes_table(comparison)
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert (row["gpu"], row["low"], row["high"]) == ("A40", None, None)
    same = compare(before, before, ("a", "b"))
    assert "-0.0%" not in comparison_markdown(comparison)
    assert ANOTHER_HOUR in comparison_markdown(comparison)
    verdicts = {speed.verdict for speed in same.speeds}
    assert verdicts == {"too close to call", "same, both simulated"}


def test_largest_batches_show_their_basis() -> None:
    """A measured one beside a simulated one, and the number of unchanged cells of each basis."""
    before = results(BOTH)
    after = [
        o.model_copy(update={"batch_size": o.batch_size - 10, "basis": Basis.SIMULATED})
        for o in before.observed
        if not o.cell.simulated and o.batch_size > 10
    ]
    text = comparison_markdown(compare(before, results(ONE_CELL, after), ("a", "b")))
    row = next(line for line in text.splitlines() if "| 40 measured" in line)
    assert "| 30 simulated | -10 |" in re.sub(" +", " ", row)
    assert "in 0 of 1 cells." in text
    same = comparison_markdown(compare(before, before, ("a", "b")))
    assert "3 of 3 cells" in same
    assert "1 measured, 2 simulated" in same


def test_recipes_of_one_job_have_different_names() -> None:
    """Each recipe has a line of its own in the chart, and its name in every table."""
    before = results(RECIPES)
    comparison = compare(before, before, ("a", "b"))
    names = [row[0] for row in changes_table(comparison).rows]
    assert [name.rpartition(" · ")[2] for name in names] == ["full-checkpointed", "full"]
    cheapest = comparison_markdown(comparison).partition("## Cheapest")[2].partition("##")[0]
    section = cheapest_section(before.ranking)
    assert ", full-fp32: " in section
    assert "-fp32-checkpointed: " in section
    assert "| full-fp32 " in cheapest
    assert "-fp32-checkpointed " in cheapest


FULL = "method: full, precision: fp32"
SIMULATED_ONLY = f"name: made\ncells:\n{SIMULATED}{ONE_CELL[ONE_CELL.index('workload') :]}"
CHECKPOINTED = ONE_CELL.replace("recipes: [{", "recipes: [{gradient_checkpointing: true, ")


def test_recipes_that_differ_in_a_field_stand_side_by_side_with_it() -> None:
    """The field is named with both values; neither cell is listed as one run's alone."""
    comparison = compare(results(ONE_CELL), results(CHECKPOINTED), ("a", "b"))
    (speed,) = comparison.speeds
    assert speed.recipe == "full-fp32 (gradient_checkpointing: False → True)"
    assert comparison.unmatched == ([], [])
    text = comparison_markdown(comparison)
    assert "gradient_checkpointing: False → True" in text
    assert "Only in" not in text


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        (
            "method: lora, lora_rank: 16, precision: bf16",
            "method: lora, lora_rank: 8, precision: bf16",
            "lora_rank: 16 → 8",
        ),
        (
            "method: lora, lora_rank: 16, precision: bf16, adapter_dtype: fp32",
            "method: qlora, lora_rank: 16, precision: bf16",
            "method: lora → qlora",
        ),
        (
            "method: lora, lora_rank: 16, precision: bf16",
            "method: full, precision: bf16",
            "method: lora → full",
        ),
    ],
)
def test_fields_that_follow_from_another_do_not_count(before: str, after: str, field: str) -> None:
    """A rank takes its alpha along, and a method what it alone has; offers are compared, too."""
    first, second = (ONE_CELL.replace(FULL, recipe) for recipe in (before, after))
    comparison = compare(results(first), results(second), ("a", "b"))
    assert [speed.recipe.partition("(")[2].rstrip(")") for speed in comparison.speeds] == [field]
    cheapest = comparison_markdown(comparison).partition("## Cheapest offers")[2].partition("##")[0]
    assert f"({field})" in cheapest


def test_a_rank_and_an_alpha_that_differ_are_two_fields() -> None:
    """The scale of the update differs, too, so neither cell has a partner."""
    first, second = (
        ONE_CELL.replace(
            FULL, f"method: lora, lora_rank: {rank}, lora_alpha: {alpha}, precision: bf16"
        )
        for rank, alpha in ((16, 32), (8, 64))
    )
    assert compare(results(first), results(second), ("a", "b")).speeds == []


def test_the_verdict_on_costs_counts_both_intervals() -> None:
    """A difference inside them is too close to call; simulations of a GPU share their errors."""
    before = results(ONE_CELL)
    simulated = results(SIMULATED_ONLY)
    for first, factor, verdict in (
        (before, 1.0, "too close to call"),
        (before, 1.001, "too close to call"),
        (before, 1000.0, "more"),
        (before, 0.001, "less"),
        (simulated, 1.0, "same, both simulated"),
        (simulated, 1000.0, "more, both simulated"),
    ):
        text = ONE_CELL if first is before else SIMULATED_ONLY
        second = results(text, slower(first.observed, factor))
        shown = comparison_markdown(compare(first, second, ("a", "b")))
        rows = shown.partition("## Cheapest offers")[2].partition("##")[0].strip().splitlines()[2:]
        assert {row.rstrip("| ").rpartition("|")[2].strip() for row in rows} == {verdict}


def test_costs_of_different_jobs_get_no_verdict() -> None:
    """Ten times the examples cost more on any GPU; the throughput is compared all the same."""
    longer = ONE_CELL.replace("examples: 1000", "examples: 10000")
    comparison = compare(results(ONE_CELL), results(longer), ("a", "b"))
    (row,) = (
        row
        for row in comparison_markdown(comparison).splitlines()
        if row.startswith("|") and "another job" in row
    )
    assert [field.strip() for field in row.split("|")][-3:-1] == ["", "another job"]
    assert comparison.speeds[0].ratio == 1.0


def test_a_cell_with_two_such_partners_has_none() -> None:
    """Which of the two it should stand beside is not known."""
    both = ONE_CELL.replace(
        "recipes: [{",
        "recipes: [{loss: chunked, method: full, precision: fp32}, {gradient_checkpointing: true, ",
    )
    comparison = compare(results(ONE_CELL), results(both), ("a", "b"))
    assert comparison.speeds == []
    assert [len(cells) for cells in comparison.unmatched] == [1, 2]


def test_at_most_ten_cells_of_one_run_are_listed() -> None:
    """The others are counted."""
    many = ONE_CELL.replace("[16]", str([*range(17, 29)]))
    text = comparison_markdown(compare(results(ONE_CELL), results(many), ("a", "b")))
    alone = text.split("## Only in b")[1]
    assert alone.count("\n- ") == 11
    assert alone.endswith("- and 2 more")
