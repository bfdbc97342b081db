"""Names of the rows in the report's charts, and the tables behind them."""

import dataclasses
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from builders.curves import DENSE, epochs
from builders.observations import MIB, measurement, observation, recipe, tiny_cell
from builders.profiles import profiled
from builders.rankings import DESK, limit_probes
from builders.rankings import SPEC as SWEEP
from builders.runs import ONE_CELL, results, spec_of

from fitting.learning_curves import curves
from gpu_catalog.number_text import dollars
from orchestrator.planning.plan import Plan
from orchestrator.reporting.comparison import compare
from orchestrator.reporting.html_report import html_report
from orchestrator.reporting.markdown_report import markdown
from orchestrator.reporting.page.law_tables import largest_table, speed_table
from orchestrator.reporting.page.run_tables import (
    Named,
    PageTable,
    cells_table,
    chart_names,
    page_jobs,
    probes_table,
    spending_table,
)
from orchestrator.reporting.page.study_tables import curve_names, loads_table, profiles_table
from orchestrator.run_folder.file_names import SPEC
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.run_folder.run_results import MOST_CELLS, RunResults, results_of
from orchestrator.storage.local_storage import OBSERVATIONS
from trials.records.observation import DeviceReading

FAMILIES = "llama-tiny, qwen3-moe-tiny"


def test_chart_names_hold_the_parts_in_which_rows_differ() -> None:
    """GPU and recipe appear only where several exist; equal short names get the whole key."""
    one = Named("cpu", "m", "lora-r8-experts-fp32-looped", "m, 16 tokens")
    other = Named("cpu", "m", "lora-r8-experts-fp32-checkpointed-looped", "m, 16 tokens")
    away = Named("A40", "n", "full-bf16", "n, 16 tokens")
    assert chart_names([one]) == ["m, 16 tokens"]
    assert chart_names([one, other]) == ["m, 16 tokens · lora", "m, 16 tokens · lora-checkpointed"]
    assert chart_names([one, away]) == ["cpu · m, 16 tokens", "A40 · n, 16 tokens"]
    assert chart_names([one, one]) == ["m, 16 tokens", "m, 16 tokens (2)"]


@pytest.mark.parametrize("usd", [12.44458, 99.99449, 0.71949, 4.335001])
def test_a_number_of_the_page_rounds_to_the_cents_of_the_number_itself(usd: float) -> None:
    """A row of the table and the sentence above it, which has the number, agree."""
    ((shown,),) = PageTable(("usd",), [(usd,)]).as_json()["rows"]
    assert dollars(shown) == dollars(usd)


def test_the_cost_of_a_sweep_has_the_date_of_its_price() -> None:
    """The sweep may have run months later."""
    plan = Plan(complete=(DESK,), pending=(), skipped=())
    run = RunResults(SWEEP, SWEEP.merged_catalog(), plan, limit_probes(8))
    table = spending_table(run)
    (row,) = table.rows
    assert dict(zip(table.columns, row, strict=True))["price_of"] == "2026-01-31"


def test_profiles_of_two_recipes_and_gpus_are_bars_of_their_own() -> None:
    """Each cell has one bar, and the shares of a bar add up to one."""
    saving = tiny_cell("mixtral-tiny", recipe("full", gradient_checkpointing=True), seq_len=16)
    away = saving.model_copy(update={"gpu": "A40"})
    profiles = [profiled(8), profiled(8, cell=saving), profiled(8, cell=away)]
    run = dataclasses.replace(results(ONE_CELL), profiled=profiles)
    table = profiles_table(run)
    shares: dict[str, float] = {}
    for values in table.rows:
        row = dict(zip(table.columns, values, strict=True))
        if row["chart"] == "stages":
            shares[row["name"]] = shares.get(row["name"], 0) + row["share"]
    text = "mixtral-tiny · 2 of 8 experts, 16 tokens, batch 8"
    assert set(shares) == {
        f"cpu · {text} · full",
        f"cpu · {text} · full-checkpointed",
        f"A40 · {text} · full-checkpointed",
    }
    assert {round(share, 9) for share in shares.values()} == {1.0}
    loads = loads_table(run)
    recipes = {row[loads.columns.index("recipe")] for row in loads.rows}
    assert recipes == {profile.cell.recipe.key for profile in run.profiled}
    assert {row[loads.columns.index("name")] for row in loads.rows} == set(shares)


def test_a_page_of_a_large_run_keeps_whole_models_and_recipes() -> None:
    """Its laws and largest batches are those of the whole run, which keeps its ranking."""
    whole = results(ONE_CELL.replace("[16]", "[16, 32]").replace("llama-tiny", FAMILIES))
    assert whole.abridged(4) is whole
    part = whole.abridged(1)
    assert [(cell.model, cell.seq_len) for cell in part.cells] == [
        ("llama-tiny", 16),
        ("llama-tiny", 32),
    ]
    assert {o.cell for o in part.observed} == set(part.cells)
    assert part.ranking is whole.ranking
    names = {family.name.model for family in part.fits.families}
    assert names == {"llama-tiny"} < {family.name.model for family in whole.fits.families}
    limits = {row[0]: row[2:] for row in largest_table(whole).rows}
    assert [row[2:] for row in largest_table(part).rows] == [
        limits[whole.place(c)] for c in part.cells
    ]
    assert part.shown is part
    assert part.whole.cells == 4
    made = datetime(2026, 11, 23, tzinfo=UTC)
    page, page_of_part = html_report(whole, made), html_report(part, made)
    assert "of 4 cells:" in page
    assert "of 4 cells:" in page_of_part
    assert "This page shows" not in page
    assert "This page shows 2 of 4 cells: those of the first models and recipes." in page_of_part


def test_the_text_of_a_large_run_lists_the_same_cells_below_the_cheapest_offers() -> None:
    """The cheapest offer of every model comes first, then where the rest is, then details."""
    whole = results(ONE_CELL.replace("[16]", "[16, 32]").replace("llama-tiny", FAMILIES))
    cheapest, _, details = markdown(whole.abridged(1)).partition("The rest of this report shows ")
    assert details.startswith("2 of 4 cells: those of the first models and recipes. ranking.csv")
    models = {cell.model for cell in whole.cells}
    assert {model for model in models if model in cheapest} == models
    assert {model for model in models if model in details} == {"llama-tiny"}


def test_results_leave_readings_out_of_cells_that_no_report_shows(tmp_path: Path) -> None:
    """A notebook, which asks for results in full, has them."""
    lengths = [*range(16, 16 + MOST_CELLS)]
    text = ONE_CELL.replace("[16]", str(lengths)).replace("llama-tiny", FAMILIES)
    spec, reading = spec_of(text), DeviceReading(sm_clock_mhz=1410)
    timed = measurement(MIB, (0.1, 0.2)).model_copy(update={"before": reading})
    ends = spec.all_cells()[0], spec.all_cells()[-1]
    lines = [observation(1, cell=cell, measurement=timed).model_dump_json() for cell in ends]
    (tmp_path / SPEC).write_text(text, encoding="utf-8")
    (tmp_path / OBSERVATIONS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = RunFolder(tmp_path), spec, spec.merged_catalog(), date(2026, 11, 23)

    def readings(run: RunResults) -> list[DeviceReading | None]:
        return [o.measurement.before for o in run.observed if o.measurement is not None]

    assert readings(results_of(*run)) == [reading, None]
    assert readings(results_of(*run, in_full=True)) == [reading, reading]
    assert [o.cell for o in results_of(*run).shown.observed] == [ends[0]]


def test_curve_names_hold_the_parts_in_which_curves_differ() -> None:
    """Data, learning rate or recipe is omitted where all curves share it."""
    few = [(0, 3.0), (90, 0.5)]
    sparse, dense = "mixtral-tiny, sparse, 2 of 8", "mixtral-tiny, dense, 8 of 8"
    assert curve_names(curves([*epochs(few), *epochs(few, DENSE)])) == [sparse, dense]
    slow = epochs(few, learning_rate=3e-4)
    assert curve_names(curves([*epochs(few), *slow])) == [
        f"{sparse}, learning rate 0.001",
        f"{sparse}, learning rate 0.0003",
    ]
    other = epochs(few, data="data/other.jsonl")
    assert curve_names(curves([*epochs(few), *other])) == [
        f"{sparse}, data.jsonl",
        f"{sparse}, other.jsonl",
    ]


TWO_RANKS = ONE_CELL.replace("[16]", "[16]\n    parallel: [{gpus: 2, strategy: ddp}]")


def test_throughput_of_two_gpus_is_that_of_both() -> None:
    """The law's curve runs through the points, and the cell is named by its layout."""
    run = results(TWO_RANKS)
    columns, rows = (table := speed_table(run)).columns, table.rows
    curve = {row[columns.index("batch")]: row[columns.index("examples_per_second")] for row in rows}
    points = probes_table(run)
    rate, batch = (points.columns.index(name) for name in ("examples_per_second", "batch"))
    timed = {row[batch]: row[rate] for row in points.rows if row[rate] is not None}
    assert timed[40] == pytest.approx(2 * 40 / 0.05)
    both = curve.keys() & timed.keys()
    assert {size: curve[size] for size in both} == pytest.approx({s: timed[s] for s in both})
    cells = cells_table(run, page_jobs(run))
    assert [row[cells.columns.index("gpu")] for row in cells.rows] == ["2xcpu ddp"]


def test_a_comparison_counts_the_examples_of_all_gpus() -> None:
    """Two ranks of 40 examples in 50 ms."""
    run = results(TWO_RANKS)
    (speed,) = compare(run, run, ("a", "b")).speeds
    assert (speed.before, speed.after) == pytest.approx((1600, 1600))
