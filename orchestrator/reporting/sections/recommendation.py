"""What to rent, in sentences: the cheapest, how sure that is, and what the alternatives cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from orchestrator.estimating.estimate_records import Price
from orchestrator.pricing.catalog_file import OWN
from orchestrator.ranking.ranked_offer import RankedOffer, Ranking, comparable
from trials.records.cell import Cell
from trials.records.observation import Basis

NEARLY_SURE = 0.995
SOONER = 0.9  # part of the time that is worth a word


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The choice for one model, recipe, sparsity and length.

    Attributes:
        best: the cheapest.
        rows: every offer, the cheapest first.
    """

    best: RankedOffer
    rows: Sequence[RankedOffer]

    def sentences(self) -> list[str]:
        """Markdown: what to rent and how sure that is, then a sentence for each alternative.

        An alternative is told where it is another offer than the ones before.
        """
        told = [self.best]
        said = [self._rent()]
        for name, other in self._alternatives():
            if other not in told:
                told.append(other)
                said.append(
                    f"{name}: {other.cell.gpu} {provider_text(other)}: {price_text(other)}."
                )
        return said

    def _rent(self) -> str:
        row = self.best
        simulated = ", simulated" if row.basis is Basis.SIMULATED else ""
        sure = odds_text(row.probability_cheapest)
        return (
            f"{rent_text(row.cell.gpu, row)}: "
            f"**${row.usd:.3g}** ({row.usd_low:.3g} to {row.usd_high:.3g}) in "
            f"**{row.hours:.3g} h** ({row.hours_low:.3g} to {row.hours_high:.3g}{simulated}), at "
            f"batches of {row.batch_size}. **{sure}** sure that it is the cheapest"
            f"{' for examples of the full length' if row.as_if_full else ''}."
        )

    def _alternatives(self) -> Iterator[tuple[str, RankedOffer]]:
        best = self.best
        if best.market == "spot":
            yield from self._first("Never taken away", [r for r in self.rows if r.market != "spot"])
        yield from self._first(
            "The next GPU", [r for r in self.rows if r.cell.gpu != best.cell.gpu]
        )
        quicker = [r for r in self.rows if r.pareto and r.hours < SOONER * best.hours]
        yield from self._first("Sooner, for more", sorted(quicker, key=lambda r: r.hours))

    @staticmethod
    def _first(name: str, rows: Sequence[RankedOffer]) -> Iterator[tuple[str, RankedOffer]]:
        if rows:
            yield name, rows[0]


def recommendations(ranking: Ranking) -> list[Recommendation]:
    """One for each model, recipe, sparsity and length that has offers, in the ranking's order."""
    groups = groupby(ranking.offers, key=lambda row: comparable(row.cell))
    return [Recommendation(rows[0], rows) for rows in (tuple(group) for _, group in groups)]


def job_title(cell: Cell) -> str:
    """Of which model, sparsity and length, in words."""
    model = cell.model if cell.weights == "random" else f"{cell.model}, {cell.weights}"
    routed = "" if cell.experts is None else f", {cell.active_experts} of {cell.experts} experts"
    return f"{model}{routed}, {cell.seq_len} tokens"


def offer_text(row: RankedOffer) -> str:
    """What is rented, where."""
    several = f" ({row.gpus_per_instance} GPUs)" if row.gpus_per_instance > 1 else ""
    return f"{row.provider} {row.instance}{several} {row.market}"


def rent_text(gpu: str, row: RankedOffer | Price) -> str:
    """What to rent, or to use, for how much an hour."""
    do = "Use" if row.provider == OWN else "Rent"
    return f"{do} **{gpu}** {provider_text(row)} at ${row.usd_per_hour:.3g} an hour"


def provider_text(row: RankedOffer | Price) -> str:
    """From whom."""
    several = f", {row.gpus_per_instance} GPUs" if row.gpus_per_instance > 1 else ""
    if row.provider == OWN:
        return f"of your own ({row.instance}{several})"
    return f"from {row.provider} ({row.instance}{several}, {row.market})"


def odds_text(odds: float) -> str:
    """A probability that was drawn: never quite certain."""
    return f"{odds:.0%}" if odds < NEARLY_SURE else "more than 99%"


def price_text(row: RankedOffer) -> str:
    """What a job comes to there."""
    return f"${row.usd:.3g} in {row.hours:.3g} h"
