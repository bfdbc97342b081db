"""The recommended offer in sentences: its cost, its odds and the price of the alternatives."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpu_catalog.number_text import dollars, ends, short
from orchestrator.clouds.node_types import named_region
from orchestrator.estimating.estimate_records import Price
from orchestrator.pricing.catalog_file import OWN
from orchestrator.pricing.offer_constraints import Constraints
from orchestrator.pricing.own_cards import electricity_text
from orchestrator.ranking.ranked_offer import RankedOffer, Ranking, comparable
from orchestrator.spec.job import MINUTES_PER_HOUR, Job
from orchestrator.spec.job_tokens import job_of, steps
from trials.records.cell import Cell
from trials.records.observation import Basis

# Draws can support neither a higher probability nor a lower one.
NEARLY_CERTAIN, NEARLY_IMPOSSIBLE = 0.995, 0.005
MOSTLY = 0.5  # part of a job's hours
FEW_STEPS = 100  # optimizer steps per epoch below which a batch size is questionable
WORTHWHILE_SPEEDUP = 0.9  # a faster offer is named if it takes at most this part of the time

EQUAL_STEPS = "`effective_batch: N` in the specification's recipe makes them equal."


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended offer for one model, recipe, sparsity and length."""

    best: RankedOffer
    rows: Sequence[RankedOffer]
    job: Job
    wanted: Constraints

    def sentences(self) -> list[str]:
        """Markdown: the offer to rent, then a sentence for each alternative not yet named."""
        named = [self.best]
        sentences = [self._best_sentence()]
        for label, offer in self._alternatives():
            if offer not in named:
                named.append(offer)
                price = f"{price_text(offer)}{self._not_apart(offer)}"
                sentences.append(f"{label}: {offer.cell.gpus} {provider_text(offer)}: {price}.")
        return sentences

    def _not_apart(self, offer: RankedOffer) -> str:
        """Words on an offer whose cost the data do not separate from the best one's."""
        if not offer.tied or self.wanted.objective == "time":
            return ""
        return f", may still be the cheapest ({odds_text(offer.probability_cheapest)})"

    def _best_sentence(self) -> str:
        row = self.best
        simulated = " simulated," if row.basis is Basis.SIMULATED else ""
        if self.wanted.objective == "time":
            advantage = f"It is the {self.wanted.aim('fastest')}"
        else:
            advantage = self._odds_of_best()
        return (
            f"{rent_text(row.cell.gpus, row)}: the job costs "
            f"**${dollars(row.usd)}** ({ends(row.usd_low, row.usd_high, dollars)}) and takes "
            f"**{short(row.hours)} h** ({ends(row.hours_low, row.hours_high)}),{simulated} at "
            f"batch size {batch_text(row)}{each_gpu_text(row)}{self._few_steps()}"
            f"{'; generation comes on top' if row.cell.recipe.left_out else ''}. "
            f"{advantage}"
            f"{', if all examples have the full length' if row.as_if_full else ''}."
        )

    def _odds_of_best(self) -> str:
        """Its probability to be the cheapest, and an offer that is likelier to be, if any."""
        own, of_gpu = odds_text(self.best.probability_cheapest), odds_text(self._odds_of_gpu())
        odds = f"with a probability of **{own}**"
        likely = max(self.rows, key=lambda row: row.probability_cheapest)
        if likely.probability_cheapest <= self.best.probability_cheapest:
            some_offer = f" (some offer of {self.best.cell.gpus}: {of_gpu})" * (of_gpu != own)
            return f"It is the cheapest {odds}{some_offer}"
        other = f"{likely.cell.gpus} {provider_text(likely)}"
        return (
            f"It has the lowest expected cost, and is the cheapest {odds}; {other} is likelier "
            f"to be the cheapest ({odds_text(likely.probability_cheapest)})"
        )

    def _odds_of_gpu(self) -> float:
        """Probability that some offer of the best one's GPU is the cheapest.

        Offers at the same cost are the cheapest together, others one at a time.
        """
        by_cost: dict[float, float] = {}
        for row in self.rows:
            if row.cell.gpus == self.best.cell.gpus:
                by_cost[row.usd] = max(by_cost.get(row.usd, 0.0), row.probability_cheapest)
        return min(sum(by_cost.values()), 1.0)

    def _few_steps(self) -> str:
        """Optimizer steps of an epoch where they are too few to train well, else nothing."""
        per_epoch = steps_per_epoch(self.job, self.best)
        return f" ({per_epoch:.0f} optimizer steps an epoch)" if per_epoch < FEW_STEPS else ""

    @property
    def doubts(self) -> list[str]:
        """Reasons to doubt the recommended offer."""
        return doubts(self.job, self.best)

    @property
    def unequal_steps(self) -> str:
        """Sentence on offers whose optimizer steps have other numbers of examples, else nothing."""
        sizes = {row.examples_per_step for row in self.rows}
        if len(sizes) == 1 or self.best.cell.recipe.effective_batch is not None:
            return ""
        return (
            "The compared offers do not train alike: an optimizer step has "
            f"{min(sizes):,} to {max(sizes):,} {rows_word(self.best.cell)}. {EQUAL_STEPS}"
        )

    def _alternatives(self) -> Iterator[tuple[str, RankedOffer]]:
        best = self.best
        if self.wanted.objective == "time":
            yield "Cheaper, but slower", min(self.rows, key=lambda row: row.usd)
            return
        on_demand = [row for row in self.rows if row.market != "spot"]
        other_gpus = [row for row in self.rows if row.cell.gpus != best.cell.gpus]
        faster = [r for r in self.rows if r.pareto and r.hours < WORTHWHILE_SPEEDUP * best.hours]
        if best.market == "spot" and on_demand:
            yield "Cheapest without interruptions", on_demand[0]
        if other_gpus:
            yield "Cheapest other GPU", other_gpus[0]
        if self.wanted.objective == "both":
            fastest = min(self.rows, key=lambda row: (row.hours, row.usd))
            yield f"The {self.wanted.aim('fastest')}", fastest
        elif faster:
            yield "Faster, but more expensive", min(faster, key=lambda row: row.hours)


def recommendations(ranking: Ranking) -> list[Recommendation]:
    """Recommendations for each model, recipe, sparsity and length with offers, as ranked."""
    groups = groupby(ranking.offers, key=lambda row: comparable(row.cell))
    job, wanted = ranking.workload, ranking.constraints
    return [
        Recommendation(rows[0], rows, job, wanted) for rows in (tuple(group) for _, group in groups)
    ]


def steps_per_epoch(job: Job, row: RankedOffer) -> int:
    """Optimizer steps of an epoch of the job on an offer, rounded down."""
    of_cell = job_of(job, row.cell.recipe, row.cell.seq_len)
    return steps(of_cell, row.examples_per_step) // of_cell.epochs


def is_mostly_startup(row: RankedOffer) -> bool:
    """Whether the assumed start-up takes most of an offer's hours."""
    return (row.startup_minutes or 0.0) / MINUTES_PER_HOUR > MOSTLY * row.hours


def doubts(job: Job, row: RankedOffer) -> list[str]:
    """Reasons to doubt an offer, a sentence each."""
    reasons = []
    if row.basis is Basis.SIMULATED:
        reasons.append("Nothing was measured on this GPU: its times are simulated.")
    if row.elsewhere:
        reasons.append(
            "Nothing was measured on this instance: it is taken to be as fast as the machine that "
            "ran the sweep."
        )
    if steps_per_epoch(job, row) < FEW_STEPS:
        reasons.append(
            f"An epoch has fewer than {FEW_STEPS} optimizer steps: a smaller batch size may train "
            "better."
        )
    if is_mostly_startup(row):
        minutes = row.startup_minutes or 0.0
        reasons.append(f"Most of the time is the assumed start-up of {short(minutes)} min.")
    return reasons


def batch_text(row: RankedOffer) -> str:
    """Micro-batch, and the number of them that accumulate."""
    micro_batches = row.cell.rank_recipe.micro_batches(row.batch_size)
    return f"{row.batch_size} x {micro_batches}" if micro_batches > 1 else str(row.batch_size)


def rows_word(cell: Cell) -> str:
    """Noun for what the throughput of a cell counts: packed rows, or examples."""
    return "rows" if cell.recipe.packing else "examples"


def each_gpu_text(row: RankedOffer) -> str:
    """Words after the batch size of a cell on several GPUs, each of which has as many."""
    return " on each GPU" if row.cell.ranks > 1 else ""


def model_name(cell: Cell) -> str:
    """Name of the model, with its weights unless they are random."""
    return cell.model if cell.weights == "random" else f"{cell.model}, {cell.weights}"


def job_title(cell: Cell) -> str:
    """Model, active experts and length of a cell, in words."""
    experts = "" if cell.experts is None else f", {cell.active_experts} of {cell.experts} experts"
    return f"{model_name(cell)}{experts}, {cell.seq_len} tokens"


def offer_text(row: RankedOffer | Price, idle: int = 0, gpu: str | None = None) -> str:
    """Provider, instance, market and region of an offer, for a table.

    Args:
        row: the offer.
        idle: GPUs of an instance that the job does not use, where they are to be named.
        gpu: the GPU, where one of the user's own is to be called so.
    """
    several = f" ({row.gpus_per_instance} GPUs{f', {idle} idle' if idle else ''})"
    gpus = several if row.gpus_per_instance > 1 else ""
    if _is_own(gpu, row):
        return f"your own{gpus}"
    return f"{_number(row)}{row.provider} {row.instance}{gpus} {row.market}{_place(row)}"


def _is_own(gpu: str | None, row: RankedOffer | Price) -> bool:
    """Whether an offer is of the user's own GPU, and of no machine with a name."""
    return row.provider == OWN and row.instance == gpu


def _number(row: RankedOffer | Price) -> str:
    """Number of instances that are rented, before their name; empty for one."""
    return f"{row.instances} x " if row.instances > 1 else ""


def _place(row: RankedOffer | Price) -> str:
    """Region of an offer, where it has a single one: the price may be of that region alone."""
    region = named_region(row.region)
    return f" in {region}" if region is not None else ""


def rent_text(gpu: str, row: RankedOffer | Price, *, is_electricity: bool = False) -> str:
    """Advice to rent or use a GPU, with its provider and price per hour."""
    rate = f"at ${dollars(row.usd_per_hour)} an hour"
    if is_electricity:
        rate += f" ({electricity_text(row.gpus_per_instance)})"
    if _is_own(gpu, row) and (is_electricity or row.gpus_per_instance == 1):
        return f"Use your **{gpu}** {rate}"
    verb = "Use" if row.provider == OWN else "Rent"
    return f"{verb} **{gpu}** {provider_text(row)} {rate}"


def provider_text(row: RankedOffer | Price) -> str:
    """Provider, region, instance and market of an offer, for a sentence."""
    gpus = f", {row.gpus_per_instance} GPUs" if row.gpus_per_instance > 1 else ""
    if row.provider == OWN:
        return f"on your own machine ({row.instance}{gpus})"
    return f"from {row.provider}{_place(row)} ({_number(row)}{row.instance}{gpus}, {row.market})"


def odds_text(odds: float) -> str:
    """A probability estimated by random draws, never shown as certain or impossible.

    Half a percent is rounded up, as on the page.
    """
    if odds < NEARLY_IMPOSSIBLE:
        return "less than 1%"
    return f"{math.floor(100 * odds + 0.5)}%" if odds < NEARLY_CERTAIN else "more than 99%"


def price_text(row: RankedOffer) -> str:
    """Cost and duration of the job on an offer."""
    without = " without generation" if row.cell.recipe.left_out else ""
    return f"${dollars(row.usd)} in {short(row.hours)} h{without}"
