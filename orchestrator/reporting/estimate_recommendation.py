"""What to rent by an estimate, and what to try, in sentences."""

from collections.abc import Iterator, Mapping, Sequence

from fitting.laws.fit_result import Interval
from orchestrator.estimating.estimate_records import Estimate, Estimated, Price
from orchestrator.estimating.question import Question
from orchestrator.markdown_table import span
from orchestrator.pricing.offer_constraints import Constraints, nothing_text
from orchestrator.reporting.sections.recommendation import provider_text, rent_text
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import padded_tokens
from trials.records.observation import Outcome

MUCH_PADDING = 0.2  # part of the tokens that is worth a word


def verdict(found: Sequence[Estimated], wanted: Constraints) -> str:
    """What to rent; or what must give. Empty where nothing is known of either.

    Args:
        found: the cheapest first.
        wanted: deadline and budget.
    """
    best = found[0].estimate
    if best.price is not None:
        price = best.price
        surer = next((e.estimate for e in found if is_sure(e.estimate.price, wanted)), best)
        return (
            f"{rent_text(best.gpu, price)}: "
            f"**${price.usd:.3g}** ({_ends(price.usd_interval)}) in **{price.hours:.3g} h** "
            f"({_ends(price.hours_interval)}, simulated), at batches of {best.batch_size}"
            f"{_kept(price, wanted)}.{_surer(surer) if surer is not best else ''}"
        )
    misses = [(each.estimate.gpu, each.missed) for each in found if each.missed is not None]
    if misses:
        return f"{nothing_text(wanted, misses)} (Simulated.)"
    return "" if any(each.step is not None for each in found) else _too_large(found)


def _ends(interval: Interval) -> str:
    return f"{interval.low:.3g} to {interval.high:.3g}"


def _kept(price: Price, wanted: Constraints) -> str:
    """Whether deadline and budget are kept surely, or only as expected."""
    limits = []
    if wanted.deadline_hours is not None:
        is_unsure = exceeds(price.hours_interval, wanted.deadline_hours)
        limits.append((f"the deadline of {wanted.deadline_hours:g} h", is_unsure))
    if wanted.budget_usd is not None:
        is_unsure = exceeds(price.usd_interval, wanted.budget_usd)
        limits.append((f"the budget of ${wanted.budget_usd:g}", is_unsure))
    if not limits:
        return ""
    said = f"; expected within {' and '.join(name for name, _ in limits)}"
    unsure = [name for name, is_unsure in limits if is_unsure]
    if not unsure:
        return f"{said}, and so is the 90 % interval"
    which = unsure[0] if len(unsure) < len(limits) else "it" if len(limits) == 1 else "both"
    return f"{said}, but the 90 % interval goes beyond {which}"


def is_sure(price: Price | None, wanted: Constraints) -> bool:
    """Whether deadline and budget are kept nine times in ten."""
    return price is not None and not (
        exceeds(price.hours_interval, wanted.deadline_hours)
        or exceeds(price.usd_interval, wanted.budget_usd)
    )


def _surer(told: Estimate) -> str:
    price = told.price
    assert price is not None
    return (
        f" Within by the 90 % interval, too: {told.gpu} {provider_text(price)}: "
        f"${price.usd:.3g} in {price.hours:.3g} h."
    )


def missed_text(found: Sequence[Estimated], wanted: Constraints) -> Iterator[str]:
    """What is left out by the deadline, by the budget, and by both together only."""
    missed = [(each.estimate.gpu, each.missed) for each in found if each.missed is not None]
    late = {gpu: f"{m.quickest_hours:.3g} h" for gpu, m in missed if m.is_late(wanted)}
    dear = {gpu: f"${m.cheapest_usd:.3g}" for gpu, m in missed if m.is_dear(wanted)}
    both = {
        gpu: f"{m.quickest_hours:.3g} h at best, or ${m.cheapest_usd:.3g}"
        for gpu, m in missed
        if gpu not in late and gpu not in dear
    }
    if late:
        yield f"Not within the deadline of {wanted.deadline_hours:g} h: {_listed(late)}."
    if dear:
        yield f"Not within the budget of ${wanted.budget_usd:g}: {_listed(dear)}."
    if both:
        yield f"On no offer within both the deadline and the budget: {_listed(both)}."


def _listed(best: Mapping[str, str]) -> str:
    return ", ".join(f"{gpu} ({what})" for gpu, what in best.items())


def exceeds(interval: Interval, limit: float | None) -> bool:
    """Whether it may well be more than a limit; never, where there is none."""
    return limit is not None and interval.high > limit


def _too_large(found: Sequence[Estimated]) -> str:
    """What is short where nothing fits."""
    told = [each.estimate for each in found]
    if any(each.outcome is Outcome.FITS for each in told):
        return ""  # it fits where no speed is known
    nearest = min(told, key=lambda each: each.reserved_gib - each.usable_gib)
    what = "Not even one example fits" if nearest.batch_size == 1 else "The batch does not fit"
    most = max(told, key=lambda each: each.max_batch_size)
    largest = (
        f"; the largest is {most.max_batch_size}, on {most.gpu}" if most.max_batch_size else ""
    )
    return (
        f"{what}: {nearest.gpu} is nearest, and lacks "
        f"{nearest.reserved_gib - nearest.usable_gib:.2g} GiB{largest}."
    )


def batch_text(found: Sequence[Estimated], question: Question) -> str | None:
    """Why those batch sizes; None where they were asked for."""
    tried = [each.hours for each in found if each.hours]
    if tried:
        sizes = sorted({size for hours in tried for size in hours if size < max(hours)})
        slower = sorted(hours[max(hours)] / min(hours.values()) - 1 for hours in tried)
        tries = (
            f"batch: on each GPU the fastest of {', '.join(map(str, sizes))} and the largest that "
            "fits"
        )
        if slower[-1] == 0:
            return f"{tries}, which is the largest."
        why = "Larger ones are padded to more: at" if question.workload.lengths else "At"
        return (
            f"{tries}. {why} the largest the job's steps would take {span(slower, '.0%')} longer "
            "(--batch-size max)."
        )
    if question.batch == "largest" and any(each.step is not None for each in found):
        return "batch: the largest that fits (--batch-size fastest tries smaller ones, too)."
    return None


def padding_text(found: Sequence[Estimated], question: Question) -> str | None:
    """How much of the tokens is padding, and what would make that less; None where it is little."""
    data = question.workload.lengths
    if data is None or question.workload.padding == "packed":
        return None
    cutoff = question.workload.cutoff
    mean = (data.lengths if cutoff is None else data.lengths.cut(cutoff)).mean
    fitting = [each.estimate for each in found if each.step is not None]
    taken = [each.batch_size for each in fitting]
    largest = [each.max_batch_size for each in fitting]
    if not fitting or _padding(question, largest, mean)[-1] <= MUCH_PADDING:
        return None
    said = f"Padding is {span(_padding(question, taken, mean), '.0%')} of the tokens"
    if taken != largest:
        said += f", at the largest batches {span(_padding(question, largest, mean), '.0%')}"
    return f"{said}: {', '.join(_remedies(question, largest, mean))}."


def _remedies(question: Question, sizes: Sequence[int], mean: float) -> Iterator[str]:
    if question.workload.padding != "grouped":
        grouped = question.workload.model_copy(update={"padding": "grouped"})
        parts = span(_padding(question, sizes, mean, grouped), ".0%")
        yield f"--group-by-length (batches of like lengths) makes that {parts}"
    cutoff = "" if question.workload.cutoff else " with --cutoff, the tokens of a row,"
    yield f"--packing{cutoff} none"


def _padding(
    question: Question, sizes: Sequence[int], mean: float, workload: Job | None = None
) -> list[float]:
    """Part of the tokens at each batch size, ascending."""
    job = workload or question.workload
    tokens = (padded_tokens(job, size, question.seq_len) for size in sizes)
    return sorted(1 - mean / each for each in tokens)
