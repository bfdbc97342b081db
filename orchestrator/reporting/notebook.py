"""A run for notebooks: what it observed, fitted and ranked, as pandas frames."""

import datetime as dt
import io
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath

import pandas as pd

from fitting.laws.fit_result import Fit
from fitting.tables.frames import candidates_frame, coefficients_frame, laws_frame
from orchestrator.pricing.prices_in_use import prices_in_use
from orchestrator.ranking.ranked_offer import ranking_csv
from orchestrator.reporting.page.run_tables import cells_table, page_jobs, probes_table
from orchestrator.run_folder.load_results import results_of
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.run_folder.run_results import RunResults
from orchestrator.storage.run_storage import run_path


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run as it stands.

    Attributes:
        observations: a row for each probe: its cell, batch, outcome, basis, seconds of a step (the
            median), examples a second, peak and limit (in 2**30 bytes), stack and host.
        steps: a row for each timed step: the row of ``observations``, its number, its seconds.
        ranking: a row for each offer, with the columns of ranking.csv.
        laws: a row for each family of step times: the law that was chosen, and how sure it is.
        coefficients: a row for each parameter of those laws, with its standard error.
        candidates: a row for each law that was tried, with its held-out errors.
        fits: a row for each parameter of Eq. 1, Eq. 2 and the law of the memory, by group.
        results: what the frames were made from.
    """

    observations: pd.DataFrame
    steps: pd.DataFrame
    ranking: pd.DataFrame
    laws: pd.DataFrame
    coefficients: pd.DataFrame
    candidates: pd.DataFrame
    fits: pd.DataFrame
    results: RunResults


def load_run(path: str | PathLike[str]) -> LoadedRun:
    """Reads a run, fits its laws and ranks its job by the prices in use. Nothing is written.

    Args:
        path: of the run folder, or s3://BUCKET/FOLDER.

    Raises:
        StoreError: there is no run, or a file of it cannot be read.
    """
    folder = RunFolder.existing(run_path(fspath(path)))
    prices = prices_in_use(run_rows=folder.catalog_rows())
    spec = folder.spec(prices.catalog)
    today = dt.datetime.now(dt.UTC).date()
    results = results_of(folder, spec, prices.over(spec.merged_catalog()), today)
    families = results.fits.families
    return LoadedRun(
        observations=_observations(results),
        steps=_steps(results),
        ranking=pd.read_csv(io.StringIO(ranking_csv(results.ranking))),
        laws=laws_frame(families),
        coefficients=coefficients_frame(families),
        candidates=candidates_frame(families),
        fits=_fits(results.fits.fits),
        results=results,
    )


def _observations(results: RunResults) -> pd.DataFrame:
    cells = cells_table(results, page_jobs(results))
    probes = probes_table(results)
    of_cells = pd.DataFrame(cells.rows, columns=list(cells.columns)).drop(columns="job")
    frame = pd.DataFrame(probes.rows, columns=list(probes.columns))
    joined = frame.join(of_cells, on="cell")
    first = [*of_cells.columns, *(name for name in frame.columns if name != "cell")]
    return joined[first]


def _steps(results: RunResults) -> pd.DataFrame:
    rows = [
        (place, number, seconds)
        for place, o in enumerate(results.observed)
        if o.measurement is not None
        for number, seconds in enumerate(o.measurement.step_seconds)
    ]
    return pd.DataFrame(rows, columns=["observation", "step", "seconds"])


def _fits(fits: Sequence[Fit]) -> pd.DataFrame:
    columns = ["law", "group", "basis", "stack", "status", "points", "rmse", "rmse_unit"]
    rows: list[tuple[object, ...]] = []
    for fit in fits:
        of = (fit.law.value, fit.group.key, fit.basis.value, fit.stack, fit.status.value)
        told = (*of, fit.points, fit.rmse, fit.rmse_unit)
        rows += [(*told, p.name, p.value, p.unit, p.standard_error) for p in fit.parameters]
        if not fit.parameters:
            rows.append((*told, None, None, None, None))
    return pd.DataFrame(rows, columns=[*columns, "parameter", "value", "unit", "standard_error"])
