"""Instance types of a cloud for a sweep's GPUs, and their prices. Pure."""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Market, Offer
from orchestrator.pricing.catalog_file import OWN
from orchestrator.pricing.host_memory import instance_memory_gib
from trials.records.cell import devices_name

# Used where the catalog has no price.
REGIONS = {"aws": "us-east-1", "gcp": "us-central1", "azure": "eastus"}
REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
POD_MEMORY_GIB = 28  # for each GPU
HEADS = {"aws": "m8a.large", "gcp": "e2-standard-2", "azure": "Standard_D2s_v5"}


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs of one kind that train together on a node.

    Attributes:
        gpu: their key in the catalog.
        count: number of them.
        host_gib: memory that their trainings take on the host, at least.
    """

    gpu: str
    count: int = 1
    host_gib: float = 0.0

    @property
    def name(self) -> str:
        """Short name, as in tables."""
        return devices_name(self.gpu, self.count)

    def are_in(self, gpus: int) -> bool:
        """Whether an instance with so many of these GPUs is one for them.

        A single GPU is not looked for in instances with several, whose others would be idle.
        """
        return gpus >= self.count and (gpus == 1 or self.count > 1)

    @property
    def pod_memory_gib(self) -> int:
        """Memory of a pod: for each GPU's process, and for what their trainings keep there."""
        return POD_MEMORY_GIB * self.count + math.ceil(self.host_gib)

    @property
    def needs_host_memory(self) -> str:
        """Reason why they are left out where every host is too small, to precede its provider."""
        return (
            f"excluded: its ranks take {self.host_gib:.0f} GiB of host memory together, which is "
            "more than the memory of any instance"
        )

    def fit_host(self, memory_gib: float | None) -> bool:
        """Whether a host has the memory for their trainings; one of unknown memory may."""
        return memory_gib is None or memory_gib >= self.host_gib


@dataclass(frozen=True, slots=True)
class CloudInstance:
    """Instance type with GPUs of one kind, or with none."""

    name: str
    gpu: str
    gpus: int
    vcpus: int
    markets: tuple[Market, ...]


@dataclass(frozen=True, slots=True)
class NodeType:
    """Type of worker node of a cluster.

    Attributes:
        devices: GPUs of the trials that it is for.
        kind: cuda or cpu.
        instance: instance type that is rented.
        market: market on which it is rented.
        offer: price in the region; None where the catalog has none.
    """

    devices: Devices
    kind: str
    instance: CloudInstance
    market: Market
    offer: Offer | None

    @property
    def usd_per_hour(self) -> float | None:
        """Price of the instance; None where it is not known."""
        return None if self.offer is None else self.offer.usd_per_hour

    @property
    def name(self) -> str:
        """Name of the node type in the cluster's file."""
        return f"{self.devices.name}-{self.market}"


@dataclass(frozen=True, slots=True)
class ChosenNodes:
    """Node types chosen for a sweep.

    Attributes:
        nodes: node types; a spot one comes before its on-demand replacement.
        left_out: one line for each GPU that the provider does not offer.
    """

    region: str
    nodes: tuple[NodeType, ...]
    left_out: tuple[str, ...]

    @property
    def devices(self) -> list[str]:
        """Names of the GPUs of the nodes."""
        return list(dict.fromkeys(node.devices.name for node in self.nodes))

    def prices(self, devices: str) -> list[float]:
        """Known prices of an hour on these GPUs, ascending."""
        prices = [n.usd_per_hour for n in self.nodes if n.devices.name == devices]
        return sorted(usd for usd in prices if usd is not None)

    def most(self, devices: str) -> float | None:
        """Upper bound of the price of an hour on these GPUs; None where it is not known.

        Spot prices stay below the on-demand price, so the bound needs that one.
        """
        nodes = [node for node in self.nodes if node.devices.name == devices]
        bound = next((n for n in nodes if n.market == "on-demand"), nodes[0])
        return None if bound.offer is None else max(self.prices(devices))


@cache
def instances(provider: str) -> tuple[CloudInstance, ...]:
    """Instance types of a provider for cluster files, the smallest of each GPU first."""
    file = resources.files("orchestrator.clouds") / "templates" / "instances.csv"
    markets: dict[str, tuple[Market, ...]] = {"both": ("spot", "on-demand"), "spot": ("spot",)}
    return tuple(
        CloudInstance(
            name=row["instance"],
            gpu=row["gpu"],
            gpus=int(row["gpus"]),
            vcpus=int(row["vcpus"]),
            markets=markets[row["markets"]],
        )
        for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines())
        if row["provider"] == provider
    )


def named_region(region: str) -> str | None:
    """The region of an offer; None where a text such as "all listed regions" stands for several.

    Prices of a user's file without a region have none either.
    """
    return region if REGION.fullmatch(region) and region != OWN else None


def choose(
    devices: Sequence[Devices],
    provider: str,
    catalog: Catalog,
    region: str | None,
    *,
    spot: bool | None,
) -> ChosenNodes:
    """Choose the cheapest instance type for each of these GPUs.

    Args:
        devices: GPUs of the catalog.
        provider: aws, gcp or azure.
        catalog: GPUs and prices.
        region: region of the provider; None for the region with prices of most of these GPUs, and
            of several such regions the cheapest.
        spot: True for spot only, False for on-demand only, None for spot first with an on-demand
            replacement.
    """
    offers = {
        one.name: [
            offer
            for offer in catalog.offers(one.gpu)
            if offer.provider == provider and offer.instance in _possible(one, provider)
        ]
        for one in devices
    }
    region = region or _region(offers, provider)
    nodes, left_out = [], []
    for one in devices:
        in_region = [o for o in offers[one.name] if o.region == region]
        chosen = _nodes(one, provider, catalog, in_region, spot=spot)
        if chosen:
            nodes += chosen
        else:
            left_out.append(_exclusion(one, provider, catalog, spot=spot))
    return ChosenNodes(region, tuple(nodes), tuple(left_out))


def _possible(devices: Devices, provider: str) -> dict[str, CloudInstance]:
    """Instance types that are large enough, by name, the smallest first."""
    return {
        instance.name: instance
        for instance in sorted(instances(provider), key=lambda instance: instance.gpus)
        if instance.gpu == devices.gpu
        and devices.are_in(instance.gpus)
        and devices.fit_host(instance_memory_gib(provider, instance.name))
    }


def _region(offers: dict[str, list[Offer]], provider: str) -> str:
    cheapest: dict[str, dict[str, float]] = {}
    for name, of_devices in offers.items():
        for offer in of_devices:
            if named_region(offer.region) is None:
                continue
            cheapest.setdefault(offer.region, {}).setdefault(name, offer.usd_per_hour)
    ranked = sorted(
        cheapest, key=lambda name: (-len(cheapest[name]), sum(cheapest[name].values()), name)
    )
    return ranked[0] if ranked else REGIONS[provider]


def _nodes(
    devices: Devices,
    provider: str,
    catalog: Catalog,
    offers: Sequence[Offer],
    *,
    spot: bool | None,
) -> list[NodeType]:
    by_name = _possible(devices, provider)
    markets: dict[bool | None, tuple[Market, ...]] = {
        None: ("spot", "on-demand"),
        True: ("spot",),
        False: ("on-demand",),
    }
    nodes = []
    for market in markets[spot]:
        possible = [i for i in by_name.values() if market in i.markets]
        if not possible:
            continue
        offer = next((o for o in offers if o.market == market), None)
        # Without a price on this market, take the cheapest instance of the other market.
        other = offers[0].instance if offers else possible[0].name
        name = other if offer is None else offer.instance
        kind = catalog.gpu(devices.gpu).kind
        nodes.append(NodeType(devices, kind, by_name[name], market, offer))
    return nodes


def _exclusion(devices: Devices, provider: str, catalog: Catalog, *, spot: bool | None) -> str:
    if _possible(devices, provider):
        market = "on demand" if spot else "as a spot instance"
        return f"{devices.name}: {provider} offers it only {market}"
    if _possible(replace(devices, host_gib=0.0), provider):
        return f"{devices.name}: {devices.needs_host_memory} of {provider}"
    of_gpu = catalog.offers(devices.gpu)
    several = [o for o in of_gpu if o.provider == provider and o.gpus_per_instance > 1]
    if several and devices.count == 1:
        offer = several[0]
        return (
            f"{devices.name}: excluded: {provider} offers it only with {offer.gpus_per_instance} "
            f"GPUs per instance ({offer.instance}, ${offer.usd_per_hour:.2f}/h), and the sweep "
            "uses one"
        )
    others = dict.fromkeys(o.provider for o in of_gpu if devices.are_in(o.gpus_per_instance))
    elsewhere = f"; elsewhere: {', '.join(others)}" if others else ""
    return f"{devices.name}: {provider} does not offer it{elsewhere}"
