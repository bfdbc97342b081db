"""Writes the files derived from a run's observations: fits, ranking and reports."""

import datetime as dt
from urllib.parse import urljoin

from fitting.fit import Fits
from gpu_catalog.catalog import Catalog
from orchestrator.planning.plan import Plan
from orchestrator.ranking.ranked_offer import Ranking, ranking_csv, ranking_json
from orchestrator.reporting.html_report import html_report
from orchestrator.reporting.markdown_report import markdown
from orchestrator.reporting.page.screenshot import screenshot
from orchestrator.run_folder.file_names import IMAGE, PAGE, RANKING, REPORT
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.run_folder.run_results import RunResults, results_of
from orchestrator.spec.sweep_spec import SweepSpec


def write_derived_files(
    folder: RunFolder, spec: SweepSpec, catalog: Catalog, plan: Plan, now: dt.datetime
) -> Ranking:
    """Write fits, ranking and reports from the observations."""
    fits, ranking = write_report(folder, spec, catalog, plan, now)
    folder.write("fits.json", fits)
    write_ranking(folder, ranking)
    return ranking


def write_report(
    folder: RunFolder, spec: SweepSpec, catalog: Catalog, plan: Plan | None, now: dt.datetime
) -> tuple[Fits, Ranking]:
    """Write the reports of the specification's own job; return their fits and ranking.

    ``plan`` is as of ``results_of``.
    """
    results = results_of(folder, spec, catalog, now.date(), plan)
    write_pages(folder, results, now)
    return results.fits, results.ranking


def write_pages(
    folder: RunFolder,
    results: RunResults,
    now: dt.datetime,
    *,
    image: bool = False,
    url: str | None = None,
) -> None:
    """Write ``report.md`` and ``report.html``.

    Args:
        folder: the run.
        results: its results.
        now: the time of the report.
        image: whether to write a picture of the page, too, which the page then names as the preview
            of its link.
        url: address at which the page will be.

    Raises:
        BrowserError: no picture can be made; the reports are written.
    """
    folder.write(REPORT, markdown(results))
    page = html_report(results, now, image=urljoin(url or "", IMAGE) if image else None)
    folder.write(PAGE, page)
    if image:
        folder.storage.write(IMAGE, screenshot(page))


def write_ranking(folder: RunFolder, ranking: Ranking) -> None:
    """Write the ranking as CSV and as JSON."""
    folder.write("ranking.csv", ranking_csv(ranking))
    folder.write(RANKING, ranking_json(ranking))
