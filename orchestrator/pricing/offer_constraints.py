"""Requirements on offers, and the message where no offer meets them. Pure."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Protocol, Self

from pydantic import Field

from gpu_catalog.number_text import dollars, given, short
from gpu_catalog.offer import Market
from gpu_catalog.record import Record

Objective = Literal["cost", "time", "both"]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Terms(Protocol):
    """Terms of an offer, or of a ranked one, that a filter looks at."""

    @property
    def provider(self) -> str: ...  # noqa: D102 - as in Offer

    @property
    def region(self) -> str: ...  # noqa: D102

    @property
    def market(self) -> str: ...  # noqa: D102

    @property
    def gpus_per_instance(self) -> int: ...  # noqa: D102


class OfferFilter(Record):
    """Filter of offers.

    Attributes:
        providers: allowed providers; empty for any.
        regions: allowed regions, as their providers name them; empty for any.
        market: on demand or spot; None for either.
        single_gpu: whether to allow only instances with one GPU, so that no idle GPU is paid for.
    """

    providers: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    market: Market | None = None
    single_gpu: bool = False

    @property
    def options(self) -> list[str]:
        """Options of the command line that set the filter."""
        lists = {"--providers": self.providers, "--regions": self.regions}
        filters = [f"{option} {','.join(names)}" for option, names in lists.items() if names]
        if self.market is not None:
            filters.append("--spot" if self.market == "spot" else "--no-spot")
        return [*filters, *["--single-gpu-instances"] * self.single_gpu]

    def allows(self, offer: Terms) -> bool:
        """Whether an offer passes the filter."""
        return (
            (not self.providers or offer.provider in self.providers)
            and (not self.regions or offer.region in self.regions)
            and self.market in (None, offer.market)
            and not (self.single_gpu and offer.gpus_per_instance > 1)
        )


class Constraints(OfferFilter):
    """Requirements on a ranked offer, and what is best among those that meet them.

    Attributes:
        objective: the cheapest offer, the fastest, or the cheapest with the fastest beside it.
        deadline_hours: largest expected hours of the job.
        budget_usd: largest expected dollars of the job.
    """

    objective: Objective = "cost"
    deadline_hours: Above | None = None
    budget_usd: Above | None = None

    def preference(self, hours: float, usd: float) -> tuple[float, float]:
        """Sort key of offers, the best first by the objective."""
        return (hours, usd) if self.objective == "time" else (usd, hours)

    def aim(self, superlative: Literal["cheapest", "fastest"]) -> str:
        """Name of the best offer in words, with the limits that it keeps."""
        limits = []
        if self.deadline_hours is not None:
            limits.append(f"the deadline of {given(self.deadline_hours)} h")
        if self.budget_usd is not None:
            limits.append(f"the budget of ${given(self.budget_usd)}")
        return f"{superlative}{' within ' if limits else ''}{' and '.join(limits)}"

    def refuse(self, hours: float, usd: float) -> bool:
        """Whether a job exceeds the deadline or the budget."""
        return (self.deadline_hours is not None and hours > self.deadline_hours) or (
            self.budget_usd is not None and usd > self.budget_usd
        )


class MissedConstraints(Record):
    """Best hours and dollars of a GPU's offers, none of which meets the deadline and the budget."""

    quickest_hours: float
    cheapest_usd: float

    @classmethod
    def best_of(cls, offers: Iterable[tuple[float, float]]) -> Self | None:
        """Best of the (hours, dollars) of offers; None without offers."""
        listed = list(offers)
        if not listed:
            return None
        hours, usd = zip(*listed, strict=True)
        return cls(quickest_hours=min(hours), cheapest_usd=min(usd))

    def misses_deadline(self, wanted: Constraints) -> bool:
        """Whether even the fastest offer exceeds the deadline."""
        return wanted.deadline_hours is not None and self.quickest_hours > wanted.deadline_hours

    def exceeds_budget(self, wanted: Constraints) -> bool:
        """Whether even the cheapest offer exceeds the budget."""
        return wanted.budget_usd is not None and self.cheapest_usd > wanted.budget_usd

    def text(self, wanted: Constraints) -> str:
        """Missed limits, to follow the name of the job or GPU."""
        parts = []
        if self.misses_deadline(wanted):
            parts.append(
                f"is expected to take {short(self.quickest_hours)} h; the deadline is "
                f"{given(wanted.deadline_hours)}"
            )
        if self.exceeds_budget(wanted):
            parts.append(
                f"is expected to cost ${dollars(self.cheapest_usd)}; the budget is "
                f"${given(wanted.budget_usd)}"
            )
        return "; ".join(parts) or "is within both the deadline and the budget on no offer"


def nothing_text(
    wanted: Constraints, misses: Sequence[tuple[str, MissedConstraints]], faster: str = ""
) -> str:
    """One line on the options to relax where no offer meets the deadline and the budget.

    Args:
        wanted: constraints with a deadline, a budget or both.
        misses: GPUs and their best offers; at least one.
        faster: what else would meet the deadline; empty for nothing.
    """
    on_quickest, quickest = min(misses, key=lambda miss: miss[1].quickest_hours)
    on_cheapest, cheapest = min(misses, key=lambda miss: miss[1].cheapest_usd)
    takes = f"the fastest is expected to take {short(quickest.quickest_hours)} h, on {on_quickest}"
    costs = f"the cheapest is expected to cost ${dollars(cheapest.cheapest_usd)}, on {on_cheapest}"
    parts = []
    if quickest.misses_deadline(wanted):
        parts.append(f"No offer meets the deadline of {given(wanted.deadline_hours)} h: {takes}.")
        parts.append(f"Give a longer --deadline{faster and f' or {faster}'}.")
    if cheapest.exceeds_budget(wanted):
        parts.append(f"No offer is within the budget of ${given(wanted.budget_usd)}: {costs}.")
        parts.append("Give a higher --budget-usd.")
    both = f"No offer is within both the deadline and the budget: {takes}; {costs}."
    return " ".join(parts) or f"{both} Give a longer --deadline or a higher --budget-usd."
