"""Offers and curves of a report in a browser: the same numbers and warnings as in its files."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from builders.observations import environment, observation
from builders.rankings import DESK, SPEC, limit_probes, timed
from builders.report_pages import report_page
from builders.runs import ONE_CELL, SIMULATED, results, spec_of, whole_trial
from fakes.browser import Opened
from playwright.sync_api import BrowserContext

from orchestrator.datasets.lengths import DataLengths
from orchestrator.planning.plan import Plan
from orchestrator.reporting.markdown_report import markdown
from orchestrator.run_folder.run_results import RunResults
from trials.records.observation import Observation, Outcome


@contextmanager
def opened(browser: BrowserContext, folder: Path, run: RunResults) -> Iterator[Opened]:
    """The page of a run; at the end, the console is empty."""
    page = Opened(browser, report_page(folder, run))
    yield page
    assert page.complaints == []
    page.page.close()


def run_of_desk(observations: list[Observation]) -> RunResults:
    """A run of the desk alone."""
    plan = Plan(complete=(DESK,), pending=(), skipped=())
    return RunResults(SPEC, SPEC.merged_catalog(), plan, observations)


def test_the_largest_batch_of_an_offer_survives_drawn_lengths(
    browser: BrowserContext, tmp_path: Path
) -> None:
    """It is that of ranking.json, not the size that fits examples of one length."""
    run = run_of_desk(
        [
            *limit_probes(8),
            *(timed(size, *6 * [0.1 * size]) for size in (4, 8)),
            observation(8, Outcome.OUT_OF_MEMORY, cell=DESK, purpose="drawn"),
            observation(4, cell=DESK, purpose="drawn"),
        ]
    )
    assert {row.largest_batch for row in run.ranking.offers} == {4}
    with opened(browser, tmp_path, run) as page:
        sizes = page.texts("#ranking tbody td[data-label='batch size'] small")
        assert set(sizes) == {"max 4"}


SEVERAL_JOBS = f"""\
{SIMULATED.replace("bf16", "bf16, task: grpo")}\
{SIMULATED.replace("[A40, H100-SXM]", "[H100-SXM]")}\
    parallel: [{{gpus: 16, nodes: 2, strategy: fsdp2}}]
workload:"""


def as_if_full() -> RunResults:
    """A run whose data are shorter than its cells, each timed at one length alone."""
    run = results(ONE_CELL.replace("llama-tiny", "llama-tiny, qwen3-moe-tiny"))
    lengths = DataLengths(source="made", histogram=((8, 500), (12, 500)))
    job = run.spec.workload.model_copy(update={"lengths": lengths})
    return replace(run, spec=run.spec.model_copy(update={"workload": job}))


@pytest.mark.parametrize(
    ("run", "caveats"),
    [
        (results(ONE_CELL.replace("workload:", SEVERAL_JOBS)), ["generation comes", "2 x"]),
        (as_if_full(), ["if all examples have the full length"]),
    ],
)
def test_a_filter_that_keeps_the_recommended_offer_keeps_its_caveats(
    browser: BrowserContext, tmp_path: Path, run: RunResults, caveats: list[str]
) -> None:
    """The answer is the same up to the number of offers that its odds compare."""
    lead, end = ".answer:not([hidden]) .lead", r"\. (It is|Of the \d+ offers that match, it is) "
    answers = []
    with opened(browser, tmp_path, run) as page:
        for job in range(page.page.locator("#job option").count()):
            page.page.select_option("#job", index=job)
            (whole,) = page.texts(lead)
            page.page.select_option("#market", "spot" if "spot)" in whole else "on-demand")
            (filtered,) = page.texts(lead)
            assert " that match, " in filtered
            assert re.split(end, filtered)[0] == re.split(end, whole)[0]
            assert (
                filtered.partition("probability of ")[2].partition(",")[2]
                == (whole.partition("probability of ")[2].partition(",")[2])
            )
            answers.append(whole)
            page.page.select_option("#market", "")
    assert all(any(caveat in answer for answer in answers) for caveat in caveats)


def test_the_throughput_of_packed_rows_counts_rows(browser: BrowserContext, tmp_path: Path) -> None:
    """In the offers, the charts and their captions; other jobs of the run count examples."""
    packed = SIMULATED.replace(
        "bf16", "bf16, packing: true, examples_per_row: 8, attention: flash_attention_2"
    ).replace("[64]", "[512]")
    run = results(ONE_CELL.replace("workload:", f"{packed}workload:"))
    text = markdown(run)
    assert re.findall(r"\| (\w+)/s", text) == ["examples", "rows"] * 2
    with opened(browser, tmp_path, run) as page:
        for job, rows, row in ((0, "examples", "example"), (1, "rows", "packed row")):
            page.page.select_option("#job", index=job)
            units = page.texts("#ranking tbody td[data-label=throughput] small")
            assert set(units) == {f"{rows}/s"}
            assert page.texts("#speed [data-of]")[0].endswith(f"tokens per {row}")
            labels = page.page.locator("#speed-charts figure").first.locator(
                "[aria-label$='axis label']"
            )
            assert labels.all_text_contents() == [
                f"↑ {rows}/s",
                f"micro-batch ({rows}), log scale →",
            ]


def test_charts_of_several_gpus_count_the_examples_of_each(
    browser: BrowserContext, tmp_path: Path
) -> None:
    """A step has those of all GPUs; the tip of a point says the same as the axis."""
    layout = SEVERAL_JOBS.partition("H100-SXM]\n    parallel")[2]
    simulated = SIMULATED.replace("[A40, H100-SXM]\n", f"[H100-SXM]\n    parallel{layout}")
    with opened(browser, tmp_path, results(ONE_CELL.replace("workload:", simulated))) as page:
        page.page.select_option("#job", index=1)
        for charts in ("#speed-charts", "#memory-charts"):
            labels = page.page.locator(f"{charts} [aria-label='x-axis label']").all_text_contents()
            assert labels == ["micro-batch per GPU (examples), log scale →"]
        tip = page.page.evaluate("microBatchOf(PROBES.find((row) => row.cell.ranks > 1))")
        assert re.fullmatch(r"micro-batch of \d+ examples on each GPU", tip)


def test_laws_of_two_stacks_are_curves_of_their_own(
    browser: BrowserContext, tmp_path: Path
) -> None:
    """One cell that ran on two versions has two, and the tips of its points name the stack."""
    newer = environment(versions=(("python", "3.11.1"), ("torch", "2.10.0")))
    spec = spec_of(ONE_CELL)
    (cell,) = spec.all_cells()
    recorded = [o for where in (environment(), newer) for o in whole_trial(cell, spec, where=where)]
    for run, count in ((results(ONE_CELL), 1), (results(ONE_CELL, recorded), 2)):
        with opened(browser, tmp_path, run) as page:
            for charts in ("#speed-charts", "#memory-charts"):
                curves = page.page.locator(f"{charts} [aria-label=line] path")
                assert curves.count() == count
            names = page.page.evaluate("PROBES.map(stackNames(PROBES))")
            assert len(set(names)) == count
            assert ("" in names) == (count == 1)
