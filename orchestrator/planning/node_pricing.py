"""Offers that the nodes of a cluster are rented by, and their hourly prices. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import Field

from gpu_catalog.catalog import Catalog
from gpu_catalog.number_text import dollars
from gpu_catalog.offer import Market, Offer
from gpu_catalog.record import Record
from orchestrator.planning.cluster_resources import Node
from orchestrator.pricing.catalog_file import OWN, stands_in
from orchestrator.pricing.offer_constraints import OfferFilter

LABEL = "finetune-cost/"  # prefix of the Ray labels by which a cluster file describes its nodes


class NodeRental(Record):
    """Rental of a node by its own labels, in the words of price tables; None for any value."""

    provider: str | None = None
    instance: str
    region: str | None = None
    market: Market | None = None

    @classmethod
    def of(cls, node: Node) -> "NodeRental | None":
        """Rental of a node by its labels; None where they are missing or invalid."""
        fields = {name: node.labels.get(LABEL + name) for name in cls.model_fields}
        if fields["instance"] is None or fields["market"] not in {None, "spot", "on-demand"}:
            return None
        return cls.model_validate(fields)

    @property
    def labels(self) -> dict[str, str]:
        """Labels that describe this rental."""
        return {LABEL + name: text for name, text in self.model_dump(exclude_none=True).items()}

    def names(self, offer: Offer) -> bool:
        """Whether an offer is of the same instance type, in any region and market."""
        return self.instance == offer.instance and self.provider in {None, offer.provider}

    def nearest(self, offers: Sequence[Offer]) -> Offer | None:
        """The offer of this rental, or else the most similar one of the same provider.

        Without a price of its own, the on-demand offer comes first, which costs more than spot,
        then the same instance in another region, then another instance.
        """
        of_provider = [o for o in offers if o.provider == self.provider or self.names(o)]
        return min(
            of_provider,
            key=lambda o: (
                not self.names(o),
                self.market == "on-demand" != o.market,
                self.region not in {None, o.region},
                self.market not in {None, o.market},
            ),
            default=None,
        )


class NodeRentals(Record):
    """Rentals of the nodes of a run.

    Attributes:
        offers: filter of the offers that nodes without labels are rented by: the cheapest counts.
        nodes: rentals of nodes with labels, by Ray's node id.
    """

    offers: OfferFilter = OfferFilter()
    nodes: dict[str, NodeRental] = Field(default_factory=dict)

    def with_nodes(self, nodes: Iterable[Node]) -> "NodeRentals":
        """Copy with the labels of these nodes; itself where none of them is new."""
        rentals = {
            node.node_id: rental
            for node in nodes
            if node.node_id is not None
            and node.node_id not in self.nodes
            and (rental := NodeRental.of(node)) is not None
        }
        return self.model_copy(update={"nodes": self.nodes | rentals}) if rentals else self


NOT_SAID = NodeRentals()


@dataclass(slots=True)
class NodePrices:
    """Hourly prices of nodes; ``rented`` is updated while nodes join."""

    catalog: Catalog
    rented: NodeRentals = NOT_SAID

    def offer(self, devices: str, node_id: str | None = None) -> Offer | None:
        """Offer that a node with a trial's GPUs is priced by; None without a known price.

        The labels of the node decide, or the most similar offer of its provider. A node that has
        not started is priced by the labels of other nodes with that GPU. Without labels, or without
        a price of that provider, the cheapest offer that the run's filter allows counts.

        Offers for ``cpu`` describe a stand-in for the machine that runs the sweep, which costs
        nothing unless the user gives a price for it.

        Args:
            devices: ``Cell.devices`` of the trial. An instance with fewer GPUs does not count; of
                several nodes, the offer has the price of all.
            node_id: Ray's id of the node; None for one that has not started.
        """
        gpu, count, nodes = self.gpu_and_counts(devices)
        offers = [
            o.model_copy(update={"usd_per_hour": nodes * o.usd_per_hour}) if nodes > 1 else o
            for o in self.catalog.offers(gpu)
            if o.gpus_per_instance >= count
        ]
        with_gpu = (r for r in self.rented.nodes.values() if any(map(r.names, offers)))
        rental = next(with_gpu, None) if node_id is None else self.rented.nodes.get(node_id)
        nearest = None if rental is None else rental.nearest(offers)
        if nearest is not None:
            return nearest
        allowed = (
            offer
            for offer in offers
            if self.rented.offers.allows(offer) and not stands_in(gpu, offer.provider)
        )
        return next(allowed, None)

    def gpu_and_counts(self, devices: str) -> tuple[str, int, int]:
        """Key and number of the GPUs of each node, and number of nodes, of ``Cell.devices``."""
        counts = list[int]()
        gpu = devices
        while not any(row.key == gpu for row in self.catalog.gpus):
            count, _, rest = gpu.partition("x")
            if not count.isdigit():
                return devices, 1, 1
            counts, gpu = [*counts, int(count)], rest
        nodes, per_node = [1, 1, *counts][-2:]
        return gpu, per_node, nodes

    def text(self, priced: Iterable[tuple[str, Offer | None]]) -> str:
        """Offers that GPUs are priced by, in a line; empty where none of them is rented."""
        listed = dict.fromkeys((gpu, offer) for gpu, offer in priced if self._is_for_rent(gpu))
        if not listed:
            return ""
        parts = [
            f"{gpu} not at all: no price is known"
            if offer is None
            else f"{gpu} {offer_name(offer)} at ${dollars(offer.usd_per_hour)}/h"
            for gpu, offer in listed
        ]
        rented = [offer for _, offer in listed if offer is not None and offer.provider != OWN]
        assumed = CHEAPEST if any(map(self._is_assumed, rented)) else ""
        return f"priced as: {', '.join(parts)}{assumed}{NOT_COUNTED if rented else ''}"

    def _is_assumed(self, offer: Offer) -> bool:
        """Whether neither the user nor a node named this offer."""
        is_named = any(rental.names(offer) for rental in self.rented.nodes.values())
        return self.rented.offers == OfferFilter() and not is_named

    def _is_for_rent(self, devices: str) -> bool:
        gpu, _, _ = self.gpu_and_counts(devices)
        return any(not stands_in(gpu, offer.provider) for offer in self.catalog.offers(gpu))


NOT_COUNTED = "; idle nodes and the head are not counted"
CHEAPEST = (
    " (the cheapest offer: describe your nodes by --providers, --regions, --spot or --no-spot)"
)


def offer_name(offer: Offer) -> str:
    """Name of an offer."""
    return f"{offer.provider} {offer.instance} {offer.market} in {offer.region}"
