"""Options that choose offers: providers, regions, markets, deadline and budget."""

from collections.abc import Collection
from dataclasses import dataclass

from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Market
from gpu_catalog.suggestions import did_you_mean
from orchestrator.pricing.offer_constraints import Above, Constraints, Objective, OfferFilter, Terms
from orchestrator.request import Names, OptionError

MARKETS: dict[bool | None, Market | None] = {True: "spot", False: "on-demand", None: None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalOptions:
    """Offers that nodes are rented from."""

    providers: Names = ()
    regions: Names = ()
    spot: bool | None = None

    def rented_as(self, catalog: Catalog) -> OfferFilter | None:
        """The filter of the options; None where none was given.

        Raises:
            OptionError: the catalog has no offer of a provider or in a region; a line for each.
        """
        offers = self.offer_filter(catalog)
        return None if offers == OfferFilter() else offers

    def offer_filter(self, catalog: Catalog) -> OfferFilter:
        """Check the options against a catalog and make a filter of them; raises as below."""
        return self.filter_among(catalog.all_offers)

    def filter_among(self, offers: Collection[Terms]) -> OfferFilter:
        """Check the options against offers and make a filter of them.

        Raises:
            OptionError: no offer is of a provider or in a region; a line for each.
        """
        choices = {
            "provider": (self.providers, sorted({offer.provider for offer in offers})),
            "region": (self.regions, sorted({offer.region for offer in offers})),
        }
        lists = {"provider": f"; providers: {', '.join(choices['provider'][1])}"}
        mistakes = [
            f"--{kind}s: no offer is of {kind} {name!r}"
            f"{did_you_mean(name, existing) or lists.get(kind, '')}"
            for kind, (names, existing) in choices.items()
            for name in names
            if name not in existing
        ]
        if mistakes:
            raise OptionError("\n".join(mistakes))
        return OfferFilter(
            providers=self.providers, regions=self.regions, market=MARKETS[self.spot]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferOptions(RentalOptions):
    """Constraints on the offers that a job is priced on."""

    objective: Objective | None = None
    deadline: Above | None = None
    budget_usd: Above | None = None
    single_gpu_instances: bool = False

    def constraints(self, catalog: Catalog) -> Constraints:
        """Check the options against a catalog and make constraints of them.

        Raises:
            OptionError: the catalog has no offer of a provider or in a region; a line for each.
        """
        return Constraints(
            **self.offer_filter(catalog).model_dump(exclude={"single_gpu"}),
            single_gpu=self.single_gpu_instances,
            objective=self.objective or "cost",
            deadline_hours=self.deadline,
            budget_usd=self.budget_usd,
        )
