"""Instance types of a cloud for a sweep's GPUs, and their prices. Pure."""

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Market, Offer

# Used where the catalog has no price.
REGIONS = {"aws": "us-east-1", "gcp": "us-central1", "azure": "eastus"}
HEADS = {"aws": "m8a.large", "gcp": "e2-standard-2", "azure": "Standard_D2s_v5"}


@dataclass(frozen=True, slots=True)
class CloudInstance:
    """Instance type with one GPU, or with none."""

    name: str
    gpu: str
    vcpus: int
    markets: tuple[Market, ...]


@dataclass(frozen=True, slots=True)
class NodeType:
    """Type of worker node of a cluster.

    Attributes:
        gpu: catalog key of its GPU, which is also its Ray resource.
        kind: cuda or cpu.
        instance: instance type that is rented.
        market: market on which it is rented.
        offer: price in the region; None where the catalog has none.
    """

    gpu: str
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
        return f"{self.gpu}-{self.market}"


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
    def gpus(self) -> list[str]:
        """Catalog keys of the GPUs of the nodes."""
        return list(dict.fromkeys(node.gpu for node in self.nodes))

    def prices(self, gpu: str) -> list[float]:
        """Known prices of an hour on this GPU, ascending."""
        prices = [n.usd_per_hour for n in self.nodes if n.gpu == gpu]
        return sorted(usd for usd in prices if usd is not None)

    def most(self, gpu: str) -> float | None:
        """Upper bound of the price of an hour on this GPU; None where it is not known.

        Spot prices stay below the on-demand price, so the bound needs that one.
        """
        nodes = [node for node in self.nodes if node.gpu == gpu]
        bound = next((n for n in nodes if n.market == "on-demand"), nodes[0])
        return None if bound.offer is None else max(self.prices(gpu))


@cache
def instances(provider: str) -> tuple[CloudInstance, ...]:
    """Instance types of a provider for cluster files, the smallest of each GPU first."""
    file = resources.files("orchestrator.clouds") / "templates" / "instances.csv"
    markets: dict[str, tuple[Market, ...]] = {"both": ("spot", "on-demand"), "spot": ("spot",)}
    return tuple(
        CloudInstance(row["instance"], row["gpu"], int(row["vcpus"]), markets[row["markets"]])
        for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines())
        if row["provider"] == provider
    )


def choose(
    keys: Sequence[str], provider: str, catalog: Catalog, region: str | None, *, spot: bool | None
) -> ChosenNodes:
    """Choose the cheapest instance type with one GPU for each of these GPUs.

    Args:
        keys: keys of the catalog.
        provider: aws, gcp or azure.
        catalog: GPUs and prices.
        region: region of the provider; None for the region with prices of most of these GPUs, and
            of several such regions the cheapest.
        spot: True for spot only, False for on-demand only, None for spot first with an on-demand
            replacement.
    """
    names = {instance.name for instance in instances(provider) if instance.gpu in keys}
    offers = {
        key: [o for o in catalog.offers(key) if o.provider == provider and o.instance in names]
        for key in keys
    }
    region = region or _region(offers, provider)
    nodes, left_out = [], []
    for key in keys:
        in_region = [o for o in offers[key] if o.region == region]
        nodes_of_gpu = _nodes(key, provider, catalog, in_region, spot=spot)
        if nodes_of_gpu:
            nodes += nodes_of_gpu
        else:
            left_out.append(_exclusion(key, provider, catalog, spot=spot))
    return ChosenNodes(region, tuple(nodes), tuple(left_out))


def _region(offers: dict[str, list[Offer]], provider: str) -> str:
    cheapest: dict[str, dict[str, float]] = {}
    for offer in itertools.chain.from_iterable(offers.values()):
        cheapest.setdefault(offer.region, {}).setdefault(offer.gpu, offer.usd_per_hour)
    ranked = sorted(
        cheapest, key=lambda name: (-len(cheapest[name]), sum(cheapest[name].values()), name)
    )
    return ranked[0] if ranked else REGIONS[provider]


def _nodes(
    key: str, provider: str, catalog: Catalog, offers: Sequence[Offer], *, spot: bool | None
) -> list[NodeType]:
    by_name = {i.name: i for i in instances(provider) if i.gpu == key}
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
        nodes.append(NodeType(key, catalog.gpu(key).kind, by_name[name], market, offer))
    return nodes


def _exclusion(key: str, provider: str, catalog: Catalog, *, spot: bool | None) -> str:
    if any(instance.gpu == key for instance in instances(provider)):
        market = "on demand" if spot else "as a spot instance"
        return f"{key}: {provider} offers it only {market}"
    several = [o for o in catalog.offers(key) if o.provider == provider and o.gpus_per_instance > 1]
    if several:
        offer = several[0]
        return (
            f"{key}: excluded: {provider} offers it only with {offer.gpus_per_instance} GPUs per "
            f"instance ({offer.instance}, ${offer.usd_per_hour:.2f}/h), and a sweep uses one"
        )
    others = dict.fromkeys(o.provider for o in catalog.offers(key) if o.gpus_per_instance == 1)
    elsewhere = f"; elsewhere: {', '.join(others)}" if others else ""
    return f"{key}: {provider} does not offer it{elsewhere}"
