"""The part of docs/accuracy.md on other tools shows what is in the file of their answers."""

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from scoreboard import measured_gpu_keys, timed_runs  # noqa: E402 - its folder is no package
from scoreboard_further import (  # noqa: E402 - as above
    Scored,
    further_section,
    further_tables,
    scored_runs,
)
from scoreboard_tools import FOLDER, group_row, own_rows, published_tables  # noqa: E402 - as above

PAGE = BENCHMARKS.parents[1] / "docs" / "accuracy.md"
RECORD = json.loads((FOLDER / "errors.json").read_text(encoding="utf-8"))


def test_every_measured_run_was_asked_of_the_tools() -> None:
    """No run is left out where a tool is far off, or where we are."""
    measured = {run for key in measured_gpu_keys() for run in timed_runs(key)}
    assert {(one["run"], one["batch"]) for one in RECORD["own"]} == measured


def test_the_page_shows_the_groups_of_the_file() -> None:
    """All groups of published runs, with the numbers of this project and of the tools."""
    assert published_tables(RECORD) in PAGE.read_text(encoding="utf-8")


def test_the_versions_are_those_that_are_pinned() -> None:
    """What the page names is what the requirements install."""
    pinned = (FOLDER / "requirements.txt").read_text(encoding="utf-8").split()
    versions = {line.split("==")[1] for line in pinned}
    assert set(RECORD["versions"].values()) <= versions


def test_a_tool_that_answers_for_fewer_runs_shows_how_many() -> None:
    """An empty cell where it answers for none."""
    sizes = {"runs": 3, "median": 0.031, "largest": 0.115, "bias": 0.0}
    errors = {"this project": sizes, "other": sizes | {"runs": 2}}
    cells = group_row({"name": "L40S", "errors": errors}, ["this project", "other", "third"])
    assert cells == ("L40S", 3, "3.1%, 11.5%", "3.1%, 11.5% (of 2)", "")


def test_an_error_is_that_of_the_reserved_memory() -> None:
    """A tool that gives none has its reason in the cell."""
    record = {
        "own": [{"run": "a", "batch": 1, "answers": {"one": 15.0, "two": "no adapters"}}],
        "published": [{"errors": {"this project": {}, "one": {}, "two": {}}}],
        "versions": {"one": "1", "two": "2"},
    }
    shown = own_rows(record, [("a", 1, ("llama", "lora", "1 x 8"), 10.0, 0.02)])
    assert [c.strip() for c in shown.splitlines()[-1].split("|")][4:8] == [
        *("10.00", "+2.0%", "+50%", "no adapters"),
    ]


def test_every_further_run_has_a_prediction_and_a_figure() -> None:
    """No run is left out where it is predicted badly."""
    runs = scored_runs()
    assert all(one.predicted["gib"] for one in runs)
    assert len({one.recipe["run"] for one in runs}) == len(runs) > 0


def test_the_page_shows_the_further_runs() -> None:
    """With the figures of the files, the worst first."""
    assert further_section() in PAGE.read_text(encoding="utf-8")


def test_a_further_run_out_of_memory_has_no_error() -> None:
    """It counts as predicted or not, but in no median."""
    recipe = {"framework": "a", "run": "m", "method": "lora", "lora_rank": "8", "batch_size": "4"}
    recipe |= {"quantisation": "", "precision": "bf16", "seq_len": "16", "gpu": "T4", "stack": ""}
    predicted = {"gib": "20", "out_of_memory": "yes", "step_seconds": "2"}
    out = Scored(recipe, predicted, {"gib": "", "step_seconds": ""})
    fits = Scored(recipe, predicted | {"out_of_memory": ""}, {"gib": "16", "step_seconds": "4"})
    assert out.error("gib") is None
    assert fits.error("step_seconds") == -0.5
    summary, runs = further_tables([fits, out])
    assert [c.strip() for c in runs.splitlines()[-1].split("|")][5:8] == [
        *("out of memory", "out of memory", ""),
    ]
    lines = [[cell.strip() for cell in line.split("|")] for line in summary.splitlines()]
    assert ["", "memory", "a, LoRA", "1", "25.0%", "25.0%", "+25.0%", ""] in lines
