"""What the nodes of a cluster are rented as, and so what an hour of them costs. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap

from pydantic import Field

from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Market, Offer
from gpu_catalog.record import Record
from orchestrator.planning.cluster_resources import Node
from orchestrator.pricing.catalog_file import OWN, stands_in
from orchestrator.pricing.offer_constraints import OfferFilter

LABEL = "finetune-cost/"  # of what a cluster's file has a node say of itself, by its Ray labels


class NodeRental(Record):
    """What a node says that it is rented as; of what it does not say, anything.

    Attributes:
        provider: as prices name it.
        instance: the provider's name for it.
        region: in the provider's own words.
        market: on demand or spot.
    """

    provider: str | None = None
    instance: str
    region: str | None = None
    market: Market | None = None

    @classmethod
    def of(cls, node: Node) -> "NodeRental | None":
        """By the node's labels; None where it has none that tell."""
        said = {name: node.labels.get(LABEL + name) for name in cls.model_fields}
        if said["instance"] is None or said["market"] not in {None, "spot", "on-demand"}:
            return None
        return cls.model_validate(said)

    @property
    def labels(self) -> dict[str, str]:
        """The labels that say it."""
        return {LABEL + name: text for name, text in self.model_dump(exclude_none=True).items()}

    def names(self, offer: Offer) -> bool:
        """Whether the offer is of the instance that it says, wherever and however rented."""
        return self.instance == offer.instance and self.provider in {None, offer.provider}

    def nearest(self, offers: Sequence[Offer]) -> Offer | None:
        """The offer that it is, or what comes nearest; none of another provider.

        Where no price of it is known it is the one on demand there, which is more, then one of the
        same instance elsewhere, then another instance.
        """
        its = [o for o in offers if o.provider == self.provider or self.names(o)]
        return min(
            its,
            key=lambda o: (
                not self.names(o),
                self.market == "on-demand" != o.market,
                self.region not in {None, o.region},
                self.market not in {None, o.market},
            ),
            default=None,
        )


class NodeRentals(Record):
    """What the nodes of a run are rented as.

    Attributes:
        offers: one of these, the cheapest.
        nodes: of those that said themselves what they are, by Ray's id of the node.
    """

    offers: OfferFilter = OfferFilter()
    nodes: dict[str, NodeRental] = Field(default_factory=dict)

    def with_nodes(self, nodes: Iterable[Node]) -> "NodeRentals":
        """The same, knowing these as well; itself where none of them is new."""
        said = {
            node.node_id: rental
            for node in nodes
            if node.node_id is not None
            and node.node_id not in self.nodes
            and (rental := NodeRental.of(node)) is not None
        }
        return self.model_copy(update={"nodes": self.nodes | said}) if said else self


NOT_SAID = NodeRentals()


@dataclass(slots=True)
class NodePrices:
    """What an hour of each node costs.

    Attributes:
        catalog: all offers.
        rented: what nodes are rented as; it may come to know more of them.
    """

    catalog: Catalog
    rented: NodeRentals = NOT_SAID

    def offer(self, gpu: str, node_id: str | None = None) -> Offer | None:
        """What a GPU is taken to be rented as; None where nobody is paid, or no price is known.

        It is the offer that the node itself names, or the nearest of its provider's; of a node that
        is not there yet, as those with that GPU that were. Where none is named, or no price of that
        provider is known, it is the cheapest of those that the run's nodes are said to be.
        What the catalog has for ``cpu`` stands in for the machine that runs the sweep, which is
        there already; a price of one's own is one.

        Args:
            gpu: key of the GPU.
            node_id: of the node; absent for any.
        """
        offers = self.catalog.offers(gpu)  # the cheapest first
        alike = (r for r in self.rented.nodes.values() if any(map(r.names, offers)))
        said = next(alike, None) if node_id is None else self.rented.nodes.get(node_id)
        near = None if said is None else said.nearest(offers)
        if near is not None:
            return near
        meant = (
            offer
            for offer in offers
            if self.rented.offers.allows(offer) and not stands_in(gpu, offer.provider)
        )
        return next(meant, None)

    def text(self, priced: Iterable[tuple[str, Offer | None]]) -> str:
        """What GPUs are priced as, in a line; empty where none of them is rented."""
        listed = dict.fromkeys((gpu, offer) for gpu, offer in priced if self._is_for_rent(gpu))
        if not listed:
            return ""
        parts = [
            f"{gpu} not at all: no such price is known"
            if offer is None
            else f"{gpu} {offer_text(offer)}"
            for gpu, offer in listed
        ]
        is_rented = any(offer is not None and offer.provider != OWN for _, offer in listed)
        assumed = CHEAPEST if any(starmap(self._is_assumed, listed)) else ""
        return f"priced as: {', '.join(parts)}{assumed}{NOT_COUNTED if is_rented else ''}"

    def _is_assumed(self, _: str, offer: Offer | None) -> bool:
        """Whether nobody has said that it is this one, neither a user nor a node."""
        if offer is None or offer.provider == OWN or self.rented.offers != OfferFilter():
            return False
        return not any(rental.names(offer) for rental in self.rented.nodes.values())

    def _is_for_rent(self, gpu: str) -> bool:
        return any(not stands_in(gpu, offer.provider) for offer in self.catalog.offers(gpu))


NOT_COUNTED = "; idle nodes and the head are not counted"
CHEAPEST = (
    " (the cheapest there is: --providers, --regions, --spot or --no-spot say what your nodes are)"
)


def offer_text(offer: Offer) -> str:
    """What is rented, and for how much an hour."""
    return f"{offer_name(offer)} at ${offer.usd_per_hour:.3g}/h"


def offer_name(offer: Offer) -> str:
    """What is rented."""
    return f"{offer.provider} {offer.instance} {offer.market} in {offer.region}"
