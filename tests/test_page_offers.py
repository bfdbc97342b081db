"""The offers of a report in a browser: the same numbers and warnings as in the run's files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builders.observations import observation
from builders.rankings import DESK, SPEC, limit_probes, timed
from builders.report_pages import report_page
from fakes.browser import Opened
from playwright.sync_api import BrowserContext

from orchestrator.planning.plan import Plan
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
