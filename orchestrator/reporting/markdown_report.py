"""A run in words and tables: Markdown from what the run folder holds. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from fitting.laws.fit_result import Fit
from orchestrator.markdown_table import span, table
from orchestrator.pricing.catalog_file import OWN, THIS_MACHINE, stands_in
from orchestrator.pricing.offer_constraints import nothing_text
from orchestrator.ranking.ranked_offer import Excluded, RankedOffer, Ranking, comparable
from orchestrator.reporting.sections.cost_text import epochs_text, overheads_text
from orchestrator.reporting.sections.fault_section import faults_section
from orchestrator.reporting.sections.law_section import laws_section, parameters_text
from orchestrator.reporting.sections.learning_section import learning_section
from orchestrator.reporting.sections.memory_section import limits_section
from orchestrator.reporting.sections.profile_section import profiles_section
from orchestrator.reporting.sections.recipe_section import recipes_section
from orchestrator.reporting.sections.recommendation import (
    Recommendation,
    job_title,
    offer_text,
    recommendations,
)
from orchestrator.reporting.sections.slow_node_section import slow_nodes_section
from orchestrator.reporting.sections.stability_section import stability_section
from orchestrator.run_folder.run_results import RunResults
from orchestrator.spec.job import MINUTES_PER_HOUR
from orchestrator.spec.job_tokens import steps
from trials.records.cell import Cell
from trials.records.observation import Basis, Environment, Observation

MOST_ANSWERS = 6  # choices that are told in a sentence each
MOST_NAMED = 3  # cells that are left out for one reason
FEW_STEPS = 100  # of an epoch
MOSTLY = 0.5  # of a job's hours
MOST_OFFERS = 25  # of one job, in a report that is read
STEADY = 0.10  # an interval wider than this part of its value is called unsteady
OFFER_HEADERS = ("GPU", "offer", "$/h", "batch", "examples/s", "hours", "$", "cheapest", "basis")


def markdown(results: RunResults) -> str:
    """The whole report."""
    ranking = results.ranking
    parts = [
        f"# {results.spec.name}",
        headline(ranking),
        cheapest_section(ranking),
        _ranking_section(ranking),
        *detail_sections(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def detail_sections(results: RunResults) -> list[str]:
    """What stands below the ranking, each under its heading."""
    plan, observed = results.plan, results.observed
    parts = [
        recipes_section(observed),
        limits_section([*plan.complete, *plan.pending], observed),
        stability_section(observed, results.spec.timing),
        profiles_section(results.profiled),
        laws_section(results.fits.families),
        _fits_section(results.fits.fits),
        faults_section(results.faults),
        slow_nodes_section(observed),
        _stack_section(observed),
        learning_section(results.learned),
    ]
    return [part for part in parts if part]


def headline(ranking: Ranking) -> str:
    """What was priced, on what basis."""
    job = ranking.workload
    text = (
        f"The job: {job.examples:,} examples x {_epochs(ranking)}{overheads_text(job.overheads)}."
    )
    bases = sorted({row.basis for row in ranking.offers})
    if bases:
        text += f" Step times are {' and '.join(bases)}, {_lengths(ranking)}"
    if any(r.cell.gpu == THIS_MACHINE and r.provider != OWN for r in ranking.offers):
        text += (
            "\n`cpu` is the machine that ran the sweep; the offers beside it are CPU "
            "instances that stand in for it\nand were not measured."
        )
    if any(row.basis is Basis.SIMULATED for row in ranking.offers):
        text += (
            "\nSimulated: no such GPU ran anything here; the training code was traced and replayed "
            "on a model of the GPU."
        )
    return "\n".join(filter(None, (text, epochs_text(ranking.learned))))


def _epochs(ranking: Ranking) -> str:
    """Range of epochs over the cells, with a hint at their source if they were learned."""
    epochs = sorted({row.epochs for row in ranking.learned})
    if not epochs:
        return f"{ranking.workload.epochs} epochs"
    most = "" if len(epochs) == 1 else f" to {epochs[-1]}"
    return f"{epochs[0]}{most} epochs, as learned (below)"


def _lengths(ranking: Ranking) -> str:
    """At which lengths of examples, by which law, and what that leaves unsure."""
    data = ranking.workload.lengths
    if data is None:
        return "at full sequence length."
    at_lengths = [row for row in ranking.offers if not row.as_if_full]
    full = [row for row in ranking.offers if row.as_if_full]
    parts = []
    if at_lengths:
        padded = [row.tokens_per_example for row in at_lengths]
        parts.append(
            f"at the lengths of {data.source}, padded to {span(padded, '.0f')} tokens an example"
            f"{_scaled(at_lengths)}."
        )
    if full:
        parts.append(_as_if_full(full, data.source, among_others=bool(at_lengths)))
    return "\n".join(parts)


def _scaled(rows: Sequence[RankedOffer]) -> str:
    """By which laws from the full length, and how far off they are."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.law is not None and row.length_error is not None:
            errors[row.law].append(row.length_error)
    laws = [f"{law} (off by {span(off, '.1%')})" for law, off in errors.items()]
    told = f"; from the full length by the law {' and '.join(laws)} on lengths it has not seen"
    return told if laws else ""


def _as_if_full(rows: Sequence[RankedOffer], source: str, *, among_others: bool) -> str:
    """That these are priced at the full length, what that does to them, and what to do."""
    lengths = span([float(row.cell.seq_len) for row in rows], ".0f")
    subject = f"{len(rows)} offers are priced " if among_others else ""
    is_simulated = any(row.basis is Basis.SIMULATED for row in rows)
    return (
        f"{subject}as if every example had the full {lengths} tokens, not the lengths of {source}: "
        "nothing tells how long shorter ones take.\nSo their hours and dollars are upper bounds, "
        "and the odds of being the cheapest are those of full examples. To price the lengths, time "
        "several batch sizes at several `seq_lens`"
        + (", or simulate with this data set in `workload`." if is_simulated else ".")
    )


def cheapest_section(ranking: Ranking) -> str:
    """The cheapest offer of each model, recipe, sparsity and length, then what is left out."""
    parts = ["## Cheapest"]
    winners = [row for row in ranking.offers if row.rank == 1]
    if winners:
        if len(winners) <= MOST_ANSWERS:
            parts.append("\n".join(_verdicts(recommendations(ranking))))
        parts += [winners_tables(winners), ranking_notes(winners, ranking)]
    else:
        parts.append(_nothing(ranking))
    if ranking.excluded:
        parts += ["Left out:", _left_out(ranking.excluded)]
    return "\n\n".join(part for part in parts if part)


def _verdicts(told: Sequence[Recommendation]) -> Iterator[str]:
    """An item for each; with its recipe where there are several of one model and length."""
    jobs = Counter(job_title(each.best.cell) for each in told)
    for each in told:
        job = job_title(each.best.cell)
        recipe = f", {each.best.cell.recipe.key}" if jobs[job] > 1 else ""
        yield f"- {job}{recipe}: {' '.join(each.sentences())}"


def _nothing(ranking: Ranking) -> str:
    """Why there is no offer: what misses the deadline or the budget least, where that is why."""
    misses = [
        (f"{each.cell.gpu}{' (simulated)' if each.cell.simulated else ''}", each.missed)
        for each in ranking.excluded
        if each.missed is not None
    ]
    return nothing_text(ranking.constraints, misses) if misses else "Nothing can be ranked yet."


def winners_tables(winners: Sequence[RankedOffer]) -> str:
    """The cheapest offers: a table for each model and recipe."""
    parts = []
    for of, group in groupby(winners, key=lambda row: _workload_columns(row.cell)[:2]):
        parts.append(", ".join(("**" + str(of[0]) + "**", str(of[1]))))
        parts.append(
            table(
                ("experts", "tokens", *OFFER_HEADERS),
                [(*_workload_columns(row.cell)[2:], *_offer_row(row)) for row in group],
            )
        )
    return "\n\n".join(parts)


def _left_out(excluded: Sequence[Excluded]) -> str:
    """A line for each cell, or for many of one reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for each in excluded:
        reasons[each.reason].append(each.cell.key)
    return "\n".join(
        f"- {', '.join(keys) if len(keys) <= MOST_NAMED else f'{len(keys)} cells'}: {reason}"
        for reason, keys in reasons.items()
    )


def _ranking_section(ranking: Ranking) -> str:
    """Every offer: a table for each model, recipe, sparsity and length."""
    parts = []
    for _, group in groupby(ranking.offers, key=lambda row: comparable(row.cell)):
        rows = list(group)
        model, recipe, experts, tokens = _workload_columns(rows[0].cell)
        parts.append(f"**{model}**, {recipe}, experts: {experts}, {tokens} tokens an example")
        shown = [row for row in rows if row.rank <= MOST_OFFERS or row.pareto]
        numbered = [(_place(row), *_offer_row(row)) for row in shown]
        parts.append(table(("", *OFFER_HEADERS), numbered))
        if len(shown) < len(rows):
            parts.append(f"Dearer ones stand in ranking.csv: {len(rows) - len(shown)}.")
    signs = "= not told apart from the cheapest; * none is both faster and cheaper."
    return "\n\n".join(["## Every offer", signs, *parts]) if parts else ""


BATCHES = {
    "asked": "as asked",
    "largest": "the largest of those timed",
    "fastest": "the fastest of those timed",
}


def _workload_columns(cell: Cell) -> tuple[object, ...]:
    routing = "none" if cell.experts is None else f"{cell.active_experts} of {cell.experts}"
    model = cell.model if cell.weights == "random" else f"{cell.model}, {cell.weights}"
    return (model, cell.recipe.key, routing, cell.seq_len)


def _place(row: RankedOffer) -> str:
    tied = "=" if row.tied and row.rank > 1 else ""
    return f"{row.rank}{tied}{' *' if row.pareto else ''}"


def _offer_row(row: RankedOffer) -> tuple[object, ...]:
    law = f", law: {row.law}" if row.law is not None else ""
    elsewhere = ", elsewhere" if stands_in(row.cell.gpu, row.provider) else ""
    return (
        row.cell.gpu,
        offer_text(row),
        f"{row.usd_per_hour:.3g}",
        f"{row.batch_size} of {'?' if row.largest_batch is None else row.largest_batch}",
        f"{row.examples_per_second:.3g}",
        f"{row.hours:.3g} ({row.hours_low:.3g} to {row.hours_high:.3g})"
        + (" ~" if _unsteady(row) else ""),
        f"{row.usd:.3g} ({row.usd_low:.3g} to {row.usd_high:.3g})",
        f"{row.probability_cheapest:.0%}",
        f"{row.basis}{elsewhere}{law}{', extrapolated' if row.extrapolated else ''}",
    )


def ranking_notes(rows: Sequence[RankedOffer], ranking: Ranking) -> str:
    """What a reader must know beside the numbers, a line each."""
    undated = any(row.price_as_of is None for row in rows)
    dates = sorted(str(row.price_as_of or row.price_recorded) for row in rows)
    told = [
        f"Prices are of {dates[0]}"
        + (f" to {dates[-1]}" if dates[-1] != dates[0] else "")
        + (", the day they were written down where the source gives none." if undated else "."),
        f"batch: {BATCHES[rows[0].batch]}, of the largest that fits.",
        f"In brackets 90 % intervals, of step times{_drift_text(ranking)}.",
        "cheapest: how likely no other offer is.",
    ]
    job = ranking.workload
    few = [row for row in rows if steps(job, row.batch_size) < FEW_STEPS * job.epochs]
    if few:
        told.append(
            f"{len(few)} of these take fewer than {FEW_STEPS} optimizer steps an epoch: "
            "--batch-size N prices another batch."
        )
    startup = job.overheads.startup_minutes / MINUTES_PER_HOUR
    mostly = sum(startup > MOSTLY * row.hours for row in rows)
    if mostly:
        told.append(
            f"{mostly} of these are mostly the {job.overheads.startup_minutes:g} min of start-up "
            "that are assumed: a longer job, or --startup-minutes, tells GPUs apart."
        )
    if any(stands_in(row.cell.gpu, row.provider) for row in rows):
        told.append("elsewhere: measured on this machine, which the offer stands in for.")
    deadline = ranking.constraints.deadline_hours
    if deadline is not None and any(row.hours_high > deadline for row in rows):
        told.append(f"Some may miss the deadline of {deadline:g} h: it is in their brackets.")
    if any(row.source == "law" for row in rows):
        told.append("law: of a batch size nobody timed.")
    if any(_unsteady(row) for row in rows):
        told.append(
            f"~ the 90 % interval of the hours spans more than {STEADY:.0%} of them: measure "
            "longer (`timing` in the specification) or on a quieter machine."
        )
    if any(row.gpus_per_instance > 1 for row in rows):
        told.append("$/h is that of the whole instance; the job uses one of its GPUs.")
    return "\n".join(told)


def _drift_text(ranking: Ranking) -> str:
    """What of prices is in the intervals of dollars."""
    of = ranking.workload.overheads
    if ranking.priced_on is None or not (of.price_drift or of.spot_price_drift):
        return " alone"
    return (
        f" and, for dollars, of prices that move {100 * of.price_drift:.2g}% a month, "
        f"spot prices {100 * of.spot_price_drift:.2g}% (assumed)"
    )


def _unsteady(row: RankedOffer) -> bool:
    # Neither a simulated one nor a law's can be measured longer.
    return row.source == "measured steps" and row.hours_high - row.hours_low > STEADY * row.hours


def _fits_section(fits: Sequence[Fit]) -> str:
    if not fits:
        return ""
    rows = []
    for fit in fits:
        values = parameters_text(fit.parameters)
        error = "" if fit.rmse is None else f"{fit.rmse:.3g} {fit.rmse_unit}"
        status = fit.status if fit.remedy is None else f"{fit.status}: {fit.remedy}"
        rank = f"{fit.rank} of {fit.parameter_count}"
        source = (fit.group.key, fit.basis)
        rows.append((fit.law, *source, values or fit.note, rank, error, fit.points, status))
    headers = (
        "law",
        "group",
        "basis",
        "parameters ± standard error",
        "rank",
        "rmse",
        "points",
        "status",
    )
    notes = sorted({fit.note for fit in fits if fit.note is not None and fit.parameters})
    text = "## Fits\n\n" + table(headers, rows)
    return text + "".join(f"\n\n- {note}" for note in notes)


def _stack_section(observations: Sequence[Observation]) -> str:
    """What each fingerprint stands for, and the machines that ran it."""
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
    return f"; allocator {environment.allocator or 'as PyTorch has it'}"
