"""Runs, fits and lengths of examples as pandas frames, for notebooks."""

import datetime as dt
import io
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

import pandas as pd

from fitting.laws.fit_result import Fit
from fitting.tables.csv_table import read_csv
from fitting.tables.frames import FamilyLaws, fit_frame, predict_frame
from fitting.tables.observations_table import read_lengths
from gpu_catalog.number_text import dollars, short
from orchestrator.pricing.prices_in_use import prices_in_use
from orchestrator.ranking.ranked_offer import ranking_csv
from orchestrator.reporting.page.run_tables import cells_table, page_jobs, probes_table
from orchestrator.run_folder.parallel_fit import fits_of
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.run_folder.run_results import RunResults, results_of
from orchestrator.spec.job import Job
from orchestrator.storage.run_storage import run_path


class FrameRecord:
    """A record that a notebook shows as a table."""

    __slots__ = ()

    def to_frame(self) -> pd.DataFrame:
        """The record as a frame."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """The frame as an HTML table."""
        return str(self.to_frame().to_html(index=False))


@dataclass(frozen=True, slots=True, repr=False)
class LoadedRun(FrameRecord):
    """Snapshot of a run's files.

    Attributes:
        observations: a row per probe: cell, batch size, outcome, basis, median step time in
            seconds, examples per second, peak and limit in GiB, stack and host.
        steps: a row per timed step: the row of its probe in ``observations``, its number and its
            seconds.
        ranking: a row per offer, with the columns of ranking.csv.
        laws: a row per family of step times: the chosen law, with its intervals and their coverage.
        coefficients: a row per parameter of those laws, with its standard error.
        candidates: a row per candidate law, with its held-out errors.
        fits: a row per parameter of Eq. 1, Eq. 2 and the memory law, by group.
        results: the records that the frames were made from.
    """

    path: str
    observations: pd.DataFrame
    steps: pd.DataFrame
    ranking: pd.DataFrame
    laws: pd.DataFrame
    coefficients: pd.DataFrame
    candidates: pd.DataFrame
    fits: pd.DataFrame
    results: RunResults

    def to_frame(self) -> pd.DataFrame:
        """The ranking."""
        return self.ranking

    def __repr__(self) -> str:
        """Three lines: the run, the observations and laws, and the cheapest offer."""
        plan, offers = self.results.plan, self.results.ranking.offers
        cells = len(plan.complete) + len(plan.pending) + len(plan.skipped)
        cheapest = "nothing is ranked"
        if offers:
            best = min(offers, key=lambda offer: offer.usd)
            cheapest = (
                f"cheapest: {best.cell.gpus} at {best.provider} ({best.market}), "
                f"${dollars(best.usd)} in {short(best.hours)} h"
            )
        return (
            f"{self.path}: {len(plan.complete)} of {cells} cells complete\n"
            f"{len(self.observations)} observations, {len(self.laws)} families of step times\n"
            f"{cheapest}"
        )


@dataclass(frozen=True, slots=True)
class FittedLaws(FamilyLaws, FrameRecord):
    """Laws fitted to observations.

    Attributes:
        families: the law of each family of step times, or the reason why there is none.
        fits: Eq. 1, Eq. 2 and the memory law; empty for a CSV or a frame.
        remarks: remarks on the rows, a line each.
    """

    fits: tuple[Fit, ...] = ()
    remarks: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """A row per family: its law, with its intervals and their coverage."""
        return self.laws

    def predict(self, steps: pd.DataFrame) -> pd.DataFrame:
        """Predict step times, with 90 % intervals; see ``fitting.tables.frames.predict_frame``.

        Raises:
            TableError: a row cannot be read or matches several families; a line for each.
        """
        return predict_frame(self.families, steps)


@dataclass(frozen=True, slots=True)
class ExampleLengths(FrameRecord):
    """Lengths of a data set's examples.

    Attributes:
        job: one epoch over the data; ``job.lengths`` is None where the lengths are unknown.
    """

    job: Job

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self.job.examples

    @property
    def tokens(self) -> int | None:
        """Total tokens; None where the lengths are unknown."""
        return None if self.job.lengths is None else self.job.lengths.tokens

    def to_frame(self) -> pd.DataFrame:
        """A row per length: ``tokens``, and the number of ``examples`` with so many."""
        histogram = () if self.job.lengths is None else self.job.lengths.histogram
        return pd.DataFrame(list(histogram), columns=["tokens", "examples"])


def fitted_laws(
    source: str | PathLike[str] | pd.DataFrame, lengths: str | PathLike[str] | None = None
) -> FittedLaws:
    """Fit the laws to the observations of a run, a CSV or a frame.

    Args:
        source: run folder, s3://BUCKET/FOLDER, CSV, or frame with the columns of such a CSV.
        lengths: CSV of the lengths of data sets' examples.

    Raises:
        StoreError: there is no run.
        TableError: a row cannot be read; a line for each mistake.
    """
    lengths_of_data = {} if lengths is None else read_lengths(Path(lengths))
    file = None
    if not isinstance(source, pd.DataFrame):
        path = run_path(fspath(source))
        if not isinstance(path, Path) or path.suffix.casefold() != ".csv" or path.is_dir():
            fits = fits_of(RunFolder.existing(path))
            return FittedLaws(fits.families, fits.fits)
        source, file = read_csv(path)
    frame_fits = fit_frame(source, lengths=lengths_of_data, file=file)
    return FittedLaws(frame_fits.families, remarks=frame_fits.observed.remarks)


def load_run(path: str | PathLike[str]) -> LoadedRun:
    """Read a run, fit its laws and rank its job by the prices in use. Nothing is written.

    Args:
        path: run folder, or s3://BUCKET/FOLDER.

    Raises:
        StoreError: there is no run, or a file of it cannot be read.
    """
    folder = RunFolder.existing(run_path(fspath(path)))
    prices = prices_in_use(run_rows=folder.catalog_rows())
    spec = folder.spec(prices.catalog)
    today = dt.datetime.now(dt.UTC).date()
    catalog = prices.over(spec.merged_catalog())
    results = results_of(folder, spec, catalog, today, in_full=True)
    laws = FamilyLaws(results.fits.families)
    return LoadedRun(
        path=str(folder.path),
        observations=_observations(results),
        steps=_steps(results),
        ranking=pd.read_csv(io.StringIO(ranking_csv(results.ranking))),
        laws=laws.laws,
        coefficients=laws.coefficients,
        candidates=laws.candidates,
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
    rows = [
        {**fit.model_dump(mode="json"), "group": fit.group.key, **parameter}
        for fit in fits
        for parameter in ([vars(p) for p in fit.parameters] or [{}])
    ]
    return pd.DataFrame(rows, columns=[*columns, "name", "value", "unit", "standard_error"]).rename(
        columns={"name": "parameter"}
    )
