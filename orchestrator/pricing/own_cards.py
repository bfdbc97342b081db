"""Cards that the user owns: no rent, but electricity."""

import datetime as dt
from collections.abc import Sequence

from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from orchestrator.pricing.catalog_file import OWN
from orchestrator.request import OptionError

PREFIX = f"{OWN}:"
WATTS_PER_KILOWATT = 1000.0
MOST_USD_PER_KWH = 5.0  # several times what electricity costs anywhere: more are cents
ELECTRICITY = "electricity: "
"""Beginning of the source of a price that is a card's electricity."""


def is_own(name: str) -> bool:
    """Whether a name given to ``--gpu`` is that of a card that the user owns."""
    return name.casefold().startswith(PREFIX)


def without_prefix(name: str) -> str:
    """The name of the GPU itself."""
    return name[len(PREFIX) :].strip() if is_own(name) else name


def with_own_cards(
    catalog: Catalog, own: Sequence[Gpu], usd_per_kwh: float | None, today: dt.date
) -> Catalog:
    """Catalog with the electricity of cards that the user owns beside the rented offers.

    Args:
        catalog: GPUs and rented offers.
        own: cards that the user owns.
        usd_per_kwh: price of electricity.
        today: date of the electricity's price.

    Raises:
        OptionError: the price of electricity or the power of a card is missing, or a price is that
            of no card or in cents; a line for each.
    """
    if not own:
        if usd_per_kwh is not None:
            raise OptionError(
                f"--usd-per-kwh {usd_per_kwh:g}: is for cards of your own: add --gpu {PREFIX}GPU"
            )
        return catalog
    if usd_per_kwh is None:
        raise OptionError(
            f"--gpu {PREFIX}{own[0].key}: your card costs electricity: add --usd-per-kwh"
        )
    if usd_per_kwh > MOST_USD_PER_KWH:
        raise OptionError(
            f"--usd-per-kwh {usd_per_kwh:g}: more than ${MOST_USD_PER_KWH:g}: give dollars, not "
            "cents"
        )
    unknown = [gpu.key for gpu in own if gpu.tdp_watts is None]
    if unknown:
        raise OptionError(
            "\n".join(
                f"--gpu {PREFIX}{key}: its power is unknown: give the card with tdp_watts in a "
                "file for --catalog"
                for key in unknown
            )
        )
    # A card with other memory than the catalog's: device names are unique in a catalog.
    added = [
        gpu.model_copy(update={"device_names": (gpu.key,)})
        for gpu in own
        if gpu not in catalog.gpus
    ]
    electricity = [_electricity(gpu, usd_per_kwh, today) for gpu in own]
    return Catalog([*catalog.gpus, *added], [*catalog.all_offers, *electricity])


def _electricity(gpu: Gpu, usd_per_kwh: float, today: dt.date) -> Offer:
    """An hour of the card at its board power; the rest of the machine is left out."""
    assert gpu.tdp_watts is not None  # the caller checks it
    return Offer(
        gpu=gpu.key,
        provider=OWN,
        region=OWN,
        instance=gpu.key,
        usd_per_hour=gpu.tdp_watts / WATTS_PER_KILOWATT * usd_per_kwh,
        recorded=today,
        source=f"{ELECTRICITY}{gpu.tdp_watts:g} W at ${usd_per_kwh:g} per kWh",
        note=electricity_text(1),
    )


def is_electricity(offer: Offer) -> bool:
    """Whether an offer is the electricity of a card that the user owns."""
    return offer.provider == OWN and offer.source.startswith(ELECTRICITY)


def of_several_cards(offer: Offer, count: int) -> Offer:
    """Offer of so many cards that the user owns, which take as much electricity; others as is."""
    if not is_electricity(offer):
        return offer
    machine = {"instance": f"{count}x{offer.instance}", "gpus_per_instance": count}
    price = {"usd_per_hour": count * offer.usd_per_hour, "note": electricity_text(count)}
    return offer.model_copy(update=machine | price)


def electricity_text(count: int) -> str:
    """Caveat beside the price of so many cards that the user owns."""
    return f"electricity of the {'cards' if count > 1 else 'card'} alone"
