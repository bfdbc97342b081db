"""Nodes that SkyPilot rents: its names of clouds and instances, and the offers that it tries."""

import re
from dataclasses import dataclass

from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Offer
from orchestrator.clouds.cuda_support import PINNED_CUDA, least_driver
from orchestrator.clouds.node_types import Devices, named_region
from orchestrator.pricing.host_memory import host_memory_gib

SKYPILOT_CLOUDS = {
    **{name: name for name in ("aws", "azure", "cudo", "do", "gcp", "lambda", "nebius", "oci")},
    **{name: name for name in ("paperspace", "runpod", "vast", "verda")},
    "datacrunch": "verda",
    "digitalocean": "do",
    "vastai": "vast",
}
"""Clouds of SkyPilot 0.14 by the catalog's names of providers."""

UNMOUNTED_CLOUDS = frozenset({"runpod", "vast", "verda"})
"""Clouds on which SkyPilot 0.14 mounts no bucket; nor does it start several nodes there."""

DRIVERS = {"cudo": 535}
"""Branch of the driver in SkyPilot's image of a cloud, where its name states one.

``sky/provision/cudo/cudo_wrapper.py`` of 0.14.1: ``ubuntu-2204-nvidia-535-docker-v20240214``.
"""

OWN_NAMES = {"runpod": re.compile(r"\d+x_\S+"), "vast": re.compile(r"\d+x-\S+")}
"""Names that SkyPilot itself gives to the instances of a cloud, which has none."""
MOST_PLACES = 8
"""Offers of a GPU in a file, of which the cheapest that is to be had is rented."""


def skypilot_instance(provider: str, instance: str) -> str | None:
    """Name of an instance in SkyPilot; None where it has none.

    Prices of other catalogs name instances of some providers in their own ways.
    """
    cloud = SKYPILOT_CLOUDS.get(provider)
    if cloud is None or (cloud in OWN_NAMES and not OWN_NAMES[cloud].fullmatch(instance)):
        return None
    if cloud == "gcp" and instance.startswith("n1-"):
        return None  # a host, to which GPUs are attached
    name = instance.replace(" ", "_") if cloud == "nebius" else instance
    return None if " " in name else name


def old_driver(provider: str) -> str | None:
    """Reason why PyTorch does not run on the machines that SkyPilot rents; None where it does."""
    driver = DRIVERS.get(SKYPILOT_CLOUDS.get(provider, ""))
    least = least_driver(PINNED_CUDA)
    if driver is None or least is None or driver >= least:
        return None
    needs = f"PyTorch with CUDA {PINNED_CUDA} needs {least} or newer"
    return f"SkyPilot's image for {provider} has driver {driver}, and {needs}"


@dataclass(frozen=True, slots=True)
class Place:
    """Offer as SkyPilot names it.

    Attributes:
        infra: cloud, and region where it is a single one.
        instance: name of the instance.
    """

    infra: str
    instance: str
    offer: Offer

    @property
    def is_spot(self) -> bool:
        """Whether the provider may reclaim the instance."""
        return self.offer.market == "spot"


def places(devices: Devices, catalog: Catalog, *, spot: bool | None) -> list[Place]:
    """Offers of instances for these GPUs that SkyPilot can rent, the cheapest first.

    Where there are too many, further regions of an instance are left out first: whatever else has
    GPUs is more likely to have one when the cheapest region has none.

    Args:
        devices: GPUs of the catalog.
        catalog: GPUs and prices.
        spot: True for spot only, False for on-demand only, None for both.
    """
    by_name: dict[tuple[str, str, bool], Place] = {}
    for offer in sorted(catalog.offers(devices.gpu), key=lambda o: o.usd_per_hour):
        instance = skypilot_instance(offer.provider, offer.instance)
        if instance is None or not devices.are_in(offer.gpus_per_instance):
            continue
        if not devices.fit_host(host_memory_gib(offer)):
            continue
        if old_driver(offer.provider) is not None:
            continue
        region = named_region(offer.region)
        infra = SKYPILOT_CLOUDS[offer.provider] + (f"/{region}" if region else "")
        place = Place(infra, instance, offer)
        if spot in {None, place.is_spot}:
            by_name.setdefault((infra, instance, place.is_spot), place)
    cheapest: dict[tuple[str, str, bool], Place] = {}
    for (infra, instance, is_spot), place in by_name.items():
        cheapest.setdefault((infra.partition("/")[0], instance, is_spot), place)
    elsewhere = [place for place in by_name.values() if place not in cheapest.values()]
    chosen = [*cheapest.values(), *elsewhere][:MOST_PLACES]
    return sorted(chosen, key=lambda place: place.offer.usd_per_hour)
