"""Two runs side by side, in numbers."""

import re

from builders.runs import ONE_CELL, SIMULATED, results

from orchestrator.reporting.comparison import changes_table, compare, comparison_markdown
from orchestrator.reporting.markdown_report import cheapest_section
from trials.records.observation import Basis, Observation

BOTH = ONE_CELL.replace("workload:", f"{SIMULATED}workload:")
RECIPES = ONE_CELL.replace(
    "recipes: [{", "recipes: [{gradient_checkpointing: true, method: full, precision: fp32}, {"
)


def slower(seen: list[Observation], by: float) -> list[Observation]:
    """The same probes, each step so many times as long."""
    found = []
    for o in seen:
        measured = o.measurement
        if measured is not None:
            steps = tuple(by * seconds for seconds in measured.step_seconds)
            measured = measured.model_copy(update={"step_seconds": steps})
        found.append(o.model_copy(update={"measurement": measured}))
    return found


def test_two_simulations_have_no_interval() -> None:
    """They share their error; a measured one beside them has its own."""
    before = results(BOTH)
    found = compare(before, results(BOTH, slower(before.observed, 1 / 1.05)), ("a", "b"))
    told = {each.cell.gpu: each for each in found.speeds}
    for gpu in ("A40", "H100-SXM"):
        assert (told[gpu].low, told[gpu].high) == (None, None)
        assert (told[gpu].change, told[gpu].verdict) == ("+5.0%", "faster, both simulated")
    assert told["cpu"].low is not None
    assert told["cpu"].change.startswith("+5.0% (")
    row = dict(zip(changes_table(found).columns, changes_table(found).rows[1], strict=True))
    assert (row["gpu"], row["low"], row["high"]) == ("A40", None, None)
    same = compare(before, before, ("a", "b"))
    assert "-0.0%" not in comparison_markdown(found)
    assert "A machine that was busier" in comparison_markdown(found)
    assert {each.verdict for each in same.speeds} == {"not told apart", "the same, both simulated"}


def test_largest_batches_tell_what_they_are_by() -> None:
    """A measured one beside a simulated one; and how many of each have not changed."""
    before = results(BOTH)
    after = [
        o.model_copy(update={"batch_size": o.batch_size - 10, "basis": Basis.SIMULATED})
        for o in before.observed
        if not o.cell.simulated and o.batch_size > 10
    ]
    text = comparison_markdown(compare(before, results(ONE_CELL, after), ("a", "b")))
    assert re.search(r"\| 40 measured +\| 30 simulated +\| -10 +\|", text)
    assert "The same in 0 of 1 cells." in text
    assert "The same in 3 of 3 cells (1 measured, 2 simulated)." in comparison_markdown(
        compare(before, before, ("a", "b"))
    )


def test_recipes_of_one_job_are_told_apart() -> None:
    """Each has a line of its own in the chart, and its recipe in every table."""
    before = results(RECIPES)
    found = compare(before, before, ("a", "b"))
    names = [row[0] for row in changes_table(found).rows]
    assert names == ["llama-tiny, 16 tokens · full-checkpointed", "llama-tiny, 16 tokens · full"]
    cheapest = comparison_markdown(found).partition("## The cheapest")[2].partition("##")[0]
    told = cheapest_section(before.ranking)
    assert "- llama-tiny, 16 tokens, full-fp32: Use " in told or ", full-fp32: Rent " in told
    assert "- llama-tiny, 16 tokens, full-fp32-checkpointed: " in told
    assert "| full-fp32 " in cheapest
    assert "| full-fp32-checkpointed " in cheapest
