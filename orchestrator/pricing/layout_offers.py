"""Offers of instances that hold a layout of several GPUs."""

from collections.abc import Iterable

from gpu_catalog.links.between_nodes import links_of
from gpu_catalog.offer import Offer
from orchestrator.pricing.own_cards import of_several_cards
from trials.recipes.parallel import Parallel


def layout_offers(
    offers: Iterable[Offer], layout: Parallel | None, *, is_simulated: bool = True
) -> list[Offer]:
    """Offers of instances with as many GPUs as a node of a layout has, at the price of all nodes.

    Instances are rented whole, so further GPUs are idle. Of several nodes, those with the layout's
    network count, and those whose GPUs have its link: its step time is that of no other. Nobody
    says which link measured steps took, unless the layout does. One node may have any number of the
    cards that the user owns.
    """
    if layout is None:
        return list(offers)
    if layout.nodes == 1:
        offers = (of_several_cards(offer, layout.gpus) for offer in offers)
    enough = (offer for offer in offers if offer.gpus_per_instance >= layout.gpus_per_node)
    if layout.gpus_per_node > 1 and (is_simulated or layout.interconnect is not None):
        enough = (o for o in enough if links_of(o).interconnect == layout.interconnect)
    if layout.nodes == 1:
        return list(enough)
    return [
        offer.model_copy(update={"usd_per_hour": layout.nodes * offer.usd_per_hour})
        for offer in enough
        if links_of(offer).network == layout.network
    ]
