"""Sentences on the intervals of a ranking: their sources, and how well they held. Pure."""

from collections import Counter
from collections.abc import Iterator

from orchestrator.markdown_table import span
from orchestrator.pricing.price_drift import MARKETPLACE_FACTOR, YOUNG, YOUNG_FACTOR
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.run_folder.run_results import RunResults
from trials.records.observation import Basis

BASES = {
    Basis.MEASURED: "measured on a real device",
    Basis.SIMULATED: "simulated, without a device",
    Basis.CAPPED: "measured on a larger GPU under a memory cap",
}


SHARED_ERRORS = (
    "Simulation errors are mostly shared by all GPUs: trust the order more than the hours, except "
    "for GPUs with much wider intervals."
)


def certainty_notes(results: RunResults) -> Iterator[str]:
    """Yield the bases, the sources of the intervals, and the laws' errors in cross-validation."""
    counts = Counter(o.basis for o in results.observed)
    if counts:
        of_each = (f"{count:,} {BASES[basis]}" for basis, count in sorted(counts.items()))
        yield f"Observations: {', '.join(of_each)}."
    yield (
        "Intervals contain the true value in 90 % of cases, if their assumptions hold. They "
        f"include {interval_sources(results.ranking)}."
    )
    families = results.fits.families
    errors = [c.error for f in families for c in f.candidates if c.form is f.form]
    if errors:
        yield f"The chosen laws miss an excluded point by {span(errors, '.1%')} in the mean."
    covered = [
        f.intervals.coverage for f in families if f.intervals and f.intervals.coverage is not None
    ]
    if covered:
        yield f"In cross-validation their 90 % intervals contain {span(covered, '.0%')} of points."
    if any(row.basis is Basis.SIMULATED for row in results.ranking.offers):
        yield SHARED_ERRORS


def interval_sources(ranking: Ranking) -> str:
    """Sources of uncertainty that the intervals of hours and dollars include."""
    job = ranking.workload.overheads
    if ranking.priced_on is None or not (job.price_drift or job.spot_price_drift):
        return "errors of the step times only"
    return (
        "errors of the step times and, for dollars, price changes of "
        f"{100 * job.price_drift:.2g}% a month (spot: {100 * job.spot_price_drift:.2g}%; "
        f"{' and '.join(sorted(YOUNG))}: {100 * YOUNG_FACTOR * job.price_drift:.2g}%; "
        f"marketplaces: {100 * MARKETPLACE_FACTOR * job.price_drift:.2g}%)"
    )
