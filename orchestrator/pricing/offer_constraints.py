"""What an offer must be, and what is said where none is. Pure."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Self

from pydantic import Field

from gpu_catalog.offer import Market, Offer
from gpu_catalog.record import Record

Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class OfferFilter(Record):
    """Which offers are meant.

    Attributes:
        providers: one of these; empty for any.
        regions: alike, in the provider's own words.
        market: on demand, spot, or absent for either.
        single_gpu: of an instance with one GPU, so that nothing idle is paid for.
    """

    providers: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    market: Market | None = None
    single_gpu: bool = False

    def allows(self, offer: Offer) -> bool:
        """Whether an offer is one of them."""
        return (
            (not self.providers or offer.provider in self.providers)
            and (not self.regions or offer.region in self.regions)
            and self.market in (None, offer.market)
            and not (self.single_gpu and offer.gpus_per_instance > 1)
        )


class Constraints(OfferFilter):
    """What an offer must be to be ranked.

    Attributes:
        deadline_hours: the job is expected to take no longer.
        budget_usd: and to cost no more.
    """

    deadline_hours: Above | None = None
    budget_usd: Above | None = None

    def refuse(self, hours: float, usd: float) -> bool:
        """Whether a job on it takes too long, or costs too much."""
        return (self.deadline_hours is not None and hours > self.deadline_hours) or (
            self.budget_usd is not None and usd > self.budget_usd
        )


class MissedConstraints(Record):
    """The best that a GPU's offers come to, none of which keeps the deadline and the budget.

    Attributes:
        quickest_hours: of the one.
        cheapest_usd: of the other.
    """

    quickest_hours: float
    cheapest_usd: float

    @classmethod
    def best_of(cls, offers: Iterable[tuple[float, float]]) -> Self | None:
        """Of hours and dollars of each; None where there are none."""
        listed = list(offers)
        if not listed:
            return None
        hours, usd = zip(*listed, strict=True)
        return cls(quickest_hours=min(hours), cheapest_usd=min(usd))

    def is_late(self, wanted: Constraints) -> bool:
        """Whether even the quickest takes too long."""
        return wanted.deadline_hours is not None and self.quickest_hours > wanted.deadline_hours

    def is_dear(self, wanted: Constraints) -> bool:
        """Whether even the cheapest costs too much."""
        return wanted.budget_usd is not None and self.cheapest_usd > wanted.budget_usd

    def text(self, wanted: Constraints) -> str:
        """By how much, in words, to follow what they are of."""
        parts = []
        if self.is_late(wanted):
            parts.append(
                f"is expected to take {self.quickest_hours:.3g} h, the deadline is "
                f"{wanted.deadline_hours:g}"
            )
        if self.is_dear(wanted):
            parts.append(
                f"is expected to cost ${self.cheapest_usd:.3g}, the budget is "
                f"${wanted.budget_usd:g}"
            )
        return "; ".join(parts) or "keeps both the deadline and the budget on no offer"


def nothing_text(wanted: Constraints, misses: Sequence[tuple[str, MissedConstraints]]) -> str:
    """What must give where nothing keeps the deadline and the budget, in a line.

    Args:
        wanted: with either, or both.
        misses: what they are of, and the best of each; at least one.
    """
    on_quickest, quickest = min(misses, key=lambda each: each[1].quickest_hours)
    on_cheapest, cheapest = min(misses, key=lambda each: each[1].cheapest_usd)
    takes = f"the quickest is expected to take {quickest.quickest_hours:.3g} h, on {on_quickest}"
    costs = f"the cheapest is expected to cost ${cheapest.cheapest_usd:.3g}, on {on_cheapest}"
    parts = []
    if quickest.is_late(wanted):
        parts.append(f"Nothing is done within {wanted.deadline_hours:g} h: {takes}.")
    if cheapest.is_dear(wanted):
        parts.append(f"Nothing costs ${wanted.budget_usd:g} or less: {costs}.")
    return " ".join(parts) or f"Nothing keeps both the deadline and the budget: {takes}; {costs}."
