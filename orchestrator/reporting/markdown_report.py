"""Markdown report of a run: recommendation, ranking and the details behind them. Pure."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from fitting.laws.fit_result import Fit
from gpu_catalog.number_text import dollars, ends, short
from orchestrator.markdown_table import records_table, span
from orchestrator.pricing.catalog_file import OWN, THIS_MACHINE
from orchestrator.ranking.ranked_offer import RankedOffer, Ranking, comparable
from orchestrator.reporting.notes.certainty_notes import SHARED_ERRORS
from orchestrator.reporting.notes.data_notes import approximate_text
from orchestrator.reporting.notes.excluded_cells import excluded_list, no_offer_text
from orchestrator.reporting.notes.ranking_notes import is_unstable, prices_text, ranking_notes
from orchestrator.reporting.sections.alternative_recipes import chosen_section
from orchestrator.reporting.sections.cost_text import epochs_text, ranked_overheads_text
from orchestrator.reporting.sections.law_section import LAW_NAMES, laws_section, parameters_text
from orchestrator.reporting.sections.learning_section import learning_section
from orchestrator.reporting.sections.memory_section import limits_section
from orchestrator.reporting.sections.profile_section import profiles_section
from orchestrator.reporting.sections.recipe_section import recipes_section
from orchestrator.reporting.sections.recommendation import (
    Recommendation,
    batch_text,
    job_title,
    model_name,
    odds_text,
    offer_text,
    recommendations,
    rows_word,
)
from orchestrator.reporting.sections.stability_section import (
    communication_section,
    stability_section,
)
from orchestrator.reporting.sections.trouble_section import (
    faults_section,
    slow_links_section,
    slow_nodes_section,
)
from orchestrator.run_folder.run_results import RunResults
from trials.records.cell import Cell
from trials.records.observation import Basis, Environment, Observation

MOST_RECOMMENDATIONS = 6  # written as sentences; more would bury the tables
MOST_OFFERS = 25  # offers listed for one job
MOST_TITLED = 3  # models in the title of a report
HEADING = re.compile(r"^(#{1,4} )", re.MULTILINE)


def markdown(results: RunResults) -> str:
    """The whole report: the cheapest offers of all cells, and details of those shown."""
    ranking, shown = results.ranking, {*results.shown.cells}
    parts = [
        f"# {report_title(results)}",
        headline(ranking, of_report=True),
        cheapest_section(ranking),
        f"## Notes\n\n{notes_text(results.notes)}" if results.notes else "",
        shown_text(results, "The rest of this report"),
        _ranking_section([row for row in ranking.offers if row.cell in shown]),
        *detail_sections(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def report_title(results: RunResults) -> str:
    """Name of the specification, its models and its job: a name alone says too little elsewhere."""
    models = [*dict.fromkeys(cell.model for cell in results.spec.all_cells())]
    more = len(models) - MOST_TITLED
    listed = ", ".join(models[:MOST_TITLED]) + (f" and {more} more" if more > 0 else "")
    job = results.ranking.workload
    return f"{results.spec.name}: {listed}, {job.examples:,} examples x {_epochs(results.ranking)}"


def shown_text(results: RunResults, where: str) -> str:
    """Sentences on the cells that a report shows, and on where the others are; empty for all.

    Args:
        results: results of the run.
        where: subject of the first sentence: the page, or the part of the report.
    """
    shown, cells = len(results.shown.cells), results.whole.cells
    if shown == cells:
        return ""
    return (
        f"{where} shows {shown:,} of {cells:,} cells: those of the first models and recipes. "
        "ranking.csv (by rank) has the offers of all cells, fits.json (by fit) their laws, and "
        "observations.jsonl every probe."
    )


def notes_text(notes: str) -> str:
    """The user's notes, with their headings below those of the report."""
    return HEADING.sub(r"##\1", notes)


def detail_sections(results: RunResults) -> list[str]:
    """Sections below the ranking, each with its heading. Troubles are those of all cells."""
    results = results.shown
    plan, observed = results.plan, results.observed
    chosen = chosen_section(results.spec.chosen)
    parts = [
        f"## Recipes by choice\n\n{chosen}" if chosen else "",
        recipes_section(observed),
        limits_section([*plan.complete, *plan.pending], observed),
        stability_section(observed, results.spec.timing),
        communication_section(observed),
        profiles_section(results.profiled),
        laws_section(results.fits.families),
        _fits_section(results.fits.fits),
        faults_section(results.faults),
        slow_nodes_section(results.whole.slow_nodes),
        slow_links_section(results.whole.slow_links),
        _stack_section(observed),
        learning_section(results.learned),
    ]
    return [part for part in parts if part]


def headline(ranking: Ranking, *, of_report: bool = False) -> str:
    """The priced job, in a report the specification's, the basis of step times, and the prices."""
    job = ranking.workload
    text = "Job of the specification: " if of_report else "Job: "
    text += f"{job.examples:,} examples x {_epochs(ranking)}"
    text += f"{', as learned (see below)' * bool(ranking.learned)}{ranked_overheads_text(ranking)}."
    bases = sorted({row.basis for row in ranking.offers})
    if bases:
        text += f" Step times are {' and '.join(bases)}, {_lengths(ranking)}"
    if any(r.cell.gpu == THIS_MACHINE and r.provider != OWN for r in ranking.offers):
        text += (
            "\n`cpu` is the machine that ran the sweep. Its offers are CPU instances assumed to be "
            "as fast: none was measured."
        )
    if any(row.basis is Basis.SIMULATED for row in ranking.offers):
        text += (
            "\nSimulated: the training code was traced and replayed on a model of the GPU. No such "
            f"GPU was used.\n{SHARED_ERRORS}"
        )
    return "\n".join(filter(None, (text, prices_text(ranking), epochs_text(ranking.learned))))


def _epochs(ranking: Ranking) -> str:
    """Number of epochs, or its range over the cells."""
    epochs = [row.epochs for row in ranking.learned] or [ranking.workload.epochs]
    return f"{span(epochs, 'd')} epoch{'s' * (max(epochs) != 1)}"


def _lengths(ranking: Ranking) -> str:
    """Lengths of the examples that were priced, and the error of scaling step times to them."""
    data = ranking.workload.lengths
    if data is None:
        return "at full sequence length."
    at_lengths = [row for row in ranking.offers if not row.as_if_full]
    full = [row for row in ranking.offers if row.as_if_full]
    parts = []
    if at_lengths:
        padded = [row.tokens_per_example for row in at_lengths]
        parts.append(
            f"at the lengths of {data.source}, padded to {span(padded, '.0f')} tokens per example"
            f"{_scaling(at_lengths)}."
        )
    approximate = approximate_text(data)
    if approximate is not None:
        parts.append(approximate)
    if full:
        parts.append(_as_if_full(full, data.source, among_others=bool(at_lengths)))
    return "\n".join(parts)


def _scaling(rows: Sequence[RankedOffer]) -> str:
    """Laws that scaled step times from the full length, with their errors; empty without any."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.law is not None and row.length_error is not None:
            errors[LAW_NAMES[row.law]].append(row.length_error)
    laws = [f"{law} (error {span(values, '.1%')})" for law, values in errors.items()]
    if not laws:
        return ""
    return (
        f"; scaled from the full length by the law {' and '.join(laws)}. Errors are on lengths "
        "excluded from the fit"
    )


def _as_if_full(rows: Sequence[RankedOffer], source: str, *, among_others: bool) -> str:
    """A warning that some offers are priced at the full length, with the remedy."""
    lengths = span([float(row.cell.seq_len) for row in rows], ".0f")
    subject = f"{len(rows)} offers are priced " if among_others else ""
    is_simulated = any(row.basis is Basis.SIMULATED for row in rows)
    return (
        f"{subject}as if every example had the full {lengths} tokens, not the lengths of {source}: "
        "the step time of shorter ones is unknown.\nTheir hours and dollars are upper bounds, and "
        "P(cheapest) holds for full-length examples. To price the actual lengths, time several "
        "batch sizes at several `seq_lens`"
        + (", or simulate with this data set in `workload`." if is_simulated else ".")
    )


def cheapest_section(ranking: Ranking) -> str:
    """The best offer of each model, recipe, sparsity and length, and the excluded cells."""
    parts = ["## Fastest" if ranking.constraints.objective == "time" else "## Cheapest"]
    winners = [row for row in ranking.offers if row.rank == 1]
    if winners:
        if len(winners) <= MOST_RECOMMENDATIONS:
            parts.append("\n".join(_recommendation_lines(recommendations(ranking))))
        parts += [winners_tables(winners), ranking_notes(winners, ranking)]
    else:
        parts.append(no_offer_text(ranking))
    if listed := excluded_list(ranking):
        parts += ["Excluded:", listed]
    return "\n\n".join(part for part in parts if part)


def _recommendation_lines(advice: Sequence[Recommendation]) -> Iterator[str]:
    """An item for each recommendation, with its recipe if others share its model and length."""
    jobs = Counter(job_title(item.best.cell) for item in advice)
    for item in advice:
        job = job_title(item.best.cell)
        recipe = f", {item.best.cell.recipe.key}" if jobs[job] > 1 else ""
        yield f"- {job}{recipe}: {' '.join(item.sentences())}"


def winners_tables(winners: Sequence[RankedOffer]) -> str:
    """The cheapest offers: a table for each model and recipe."""
    parts = []
    for (model, recipe), group in groupby(
        winners, key=lambda row: (model_name(row.cell), row.cell.recipe.key)
    ):
        parts.append(f"**{model}**, {recipe}")
        parts.append(
            records_table(
                {"experts": _routing(row.cell), "tokens": row.cell.seq_len, **_offer(row)}
                for row in group
            )
        )
    return "\n\n".join(parts)


def _ranking_section(offers: Sequence[RankedOffer]) -> str:
    """Offers: a table for each model, recipe, sparsity and length."""
    parts = []
    for _, group in groupby(offers, key=lambda row: comparable(row.cell)):
        rows = list(group)
        cell = rows[0].cell
        parts.append(
            f"**{model_name(cell)}**, {cell.recipe.key}, experts: {_routing(cell)}, "
            f"{cell.seq_len} tokens per {cell.recipe.row}"
        )
        shown = [row for row in rows if row.rank <= MOST_OFFERS or row.pareto]
        parts.append(records_table({"": _rank_text(row), **_offer(row)} for row in shown))
        if len(shown) < len(rows):
            parts.append(
                f"Further offers, all more expensive, in ranking.csv: {len(rows) - len(shown)}."
            )
    signs = "= may still be the cheapest; * no offer is both faster and cheaper."
    return "\n\n".join(["## Every offer", signs, *parts]) if parts else ""


def _routing(cell: Cell) -> str:
    return "none" if cell.experts is None else f"{cell.active_experts} of {cell.experts}"


def _rank_text(row: RankedOffer) -> str:
    tied = "=" if row.tied and row.rank > 1 else ""
    return f"{row.rank}{tied}{' *' if row.pareto else ''}"


def _offer(row: RankedOffer) -> dict[str, object]:
    law = f", law: {LAW_NAMES[row.law]}" if row.law is not None else ""
    elsewhere = " elsewhere" if row.elsewhere else ""
    return {
        "GPU": row.cell.gpus,
        "offer": offer_text(row, gpu=row.cell.gpus),
        "$/h": dollars(row.usd_per_hour),
        "batch size": f"{batch_text(row)} (max {row.largest_batch or 'unknown'})",
        f"{rows_word(row.cell)}/s": short(row.examples_per_second),
        "hours": f"{short(row.hours)} ({ends(row.hours_low, row.hours_high)})"
        + (" ~" if is_unstable(row) else ""),
        "$": f"{dollars(row.usd)} ({ends(row.usd_low, row.usd_high, dollars)})",
        "P(cheapest)": odds_text(row.probability_cheapest),
        "basis": f"{row.basis}{elsewhere}{law}{', extrapolated' if row.extrapolated else ''}",
    }


def _fits_section(fits: Sequence[Fit]) -> str:
    if not fits:
        return ""
    rows = records_table(
        {
            "law": LAW_NAMES[fit.law],
            "group": fit.group.key,
            "basis": fit.basis,
            "parameters ± standard error": parameters_text(fit.parameters) or fit.note,
            "rank": f"{fit.rank} of {fit.parameter_count}",
            "RMSE": "" if fit.rmse is None else f"{short(fit.rmse)} {fit.rmse_unit}",
            "points": fit.points,
            "status": ": ".join(filter(None, (fit.status.replace("_", " ").lower(), fit.remedy))),
        }
        for fit in fits
    )
    notes = sorted({fit.note for fit in fits if fit.note is not None and fit.parameters})
    return "\n\n".join(["## Fits", rows, *(f"- {note}" for note in notes)])


def _stack_section(observations: Sequence[Observation]) -> str:
    """Device, versions and hosts of each stack fingerprint."""
    stacks: defaultdict[str, list[Environment]] = defaultdict(list)
    for o in observations:
        if o.environment is not None:
            stacks[o.environment.stack].append(o.environment)
    if not stacks:
        return ""
    lines = []
    for name, (environment, *others) in sorted(stacks.items()):
        hosts = {environment.host, *(other.host for other in others)}
        versions = ", ".join(f"{package} {v}" for package, v in environment.versions)
        lines.append(
            f"- {name}: {environment.device_name}, CPU threads {environment.threads}, "
            f"{versions}{_allocator(environment)}; hosts {', '.join(sorted(hosts))}"
        )
    return "## Stacks\n\n" + "\n".join(lines)


def _allocator(environment: Environment) -> str:
    if environment.allocator is None:
        return ""
    return f"; allocator {environment.allocator or 'of PyTorch by default'}"
