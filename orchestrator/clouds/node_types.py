"""Which instances of a provider a cluster has for a sweep's GPUs, and what they cost. Pure."""

import csv
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Market, Offer

REGIONS = {"aws": "us-east-1", "gcp": "us-central1", "azure": "eastus"}  # where no price tells
HEADS = {"aws": "m8a.large", "gcp": "e2-standard-2", "azure": "Standard_D2s_v5"}


@dataclass(frozen=True, slots=True)
class CloudInstance:
    """An instance type with one GPU, or none.

    Attributes:
        name: the provider's.
        gpu: key of its GPU in the catalog.
        vcpus: its cores.
        markets: it is to be had on.
    """

    name: str
    gpu: str
    vcpus: int
    markets: tuple[Market, ...]


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node of a cluster.

    Attributes:
        gpu: key of its GPU in the catalog, and its Ray resource.
        kind: of that, cuda or cpu.
        instance: what is rented.
        market: how.
        offer: its price in the region; absent where the catalog has none.
    """

    gpu: str
    kind: str
    instance: CloudInstance
    market: Market
    offer: Offer | None

    @property
    def usd_per_hour(self) -> float | None:
        """Of the instance; absent where it is not known."""
        return None if self.offer is None else self.offer.usd_per_hour

    @property
    def name(self) -> str:
        """Of the node type in the cluster's file."""
        return f"{self.gpu}-{self.market}"


@dataclass(frozen=True, slots=True)
class ChosenNodes:
    """The nodes for a sweep.

    Attributes:
        region: of them all.
        nodes: a spot one before the one on demand that stands in for it.
        left_out: a line for each GPU that cannot be had.
    """

    region: str
    nodes: tuple[NodeType, ...]
    left_out: tuple[str, ...]

    def prices(self, gpu: str) -> list[float]:
        """What an hour on this GPU is known to cost here, the least first."""
        mine = [n.usd_per_hour for n in self.nodes if n.gpu == gpu]
        return sorted(usd for usd in mine if usd is not None)

    def most(self, gpu: str) -> float | None:
        """The most an hour on this GPU can cost here; None where that is not known.

        That is the price on demand, below which spot prices stay.
        """
        mine = [node for node in self.nodes if node.gpu == gpu]
        dearest = next((n for n in mine if n.market == "on-demand"), mine[0])
        return None if dearest.offer is None else max(self.prices(gpu))


@cache
def instances(provider: str) -> tuple[CloudInstance, ...]:
    """Those of a provider that a cluster's file can name, the smallest of each GPU first."""
    text = (resources.files("orchestrator.clouds") / "templates" / "instances.csv").read_text(
        encoding="utf-8"
    )
    markets: dict[str, tuple[Market, ...]] = {"both": ("spot", "on-demand"), "spot": ("spot",)}
    return tuple(
        CloudInstance(row["instance"], row["gpu"], int(row["vcpus"]), markets[row["markets"]])
        for row in csv.DictReader(io.StringIO(text))
        if row["provider"] == provider
    )


def choose(
    keys: Sequence[str], provider: str, catalog: Catalog, region: str | None, *, spot: bool | None
) -> ChosenNodes:
    """The cheapest instances of a provider for these GPUs, one GPU each.

    Args:
        keys: of the catalog.
        provider: aws, gcp or azure.
        catalog: GPUs and prices.
        region: of the provider; absent for the one with prices of most of these GPUs, the
            cheapest of those.
        spot: spot instances alone, or none; absent for spot first, on demand in its place.
    """
    offers = {key: _startable(key, provider, catalog) for key in keys}
    region = region or _region(offers, provider)
    nodes, left_out = [], []
    for key in keys:
        found = _nodes(
            key, provider, catalog, [o for o in offers[key] if o.region == region], spot=spot
        )
        if found:
            nodes += found
        else:
            left_out.append(_why_not(key, provider, catalog, spot=spot))
    return ChosenNodes(region, tuple(nodes), tuple(left_out))


def _startable(key: str, provider: str, catalog: Catalog) -> list[Offer]:
    """Offers of instances with this GPU alone, the cheapest first."""
    names = {each.name for each in instances(provider) if each.gpu == key}
    return [o for o in catalog.offers(key) if o.provider == provider and o.instance in names]


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
    known = {each.name: each for each in instances(provider) if each.gpu == key}
    wanted: tuple[Market, ...] = ("spot",) if spot else ("on-demand",)
    if spot is None:
        wanted = ("spot", "on-demand")
    nodes = []
    for market in wanted:
        possible = [each for each in known.values() if market in each.markets]
        if not possible:
            continue
        offer = next((o for o in offers if o.market == market), None)
        # Where this market's price is not known: what is the cheapest on the other.
        other = offers[0].instance if offers else possible[0].name
        name = other if offer is None else offer.instance
        nodes.append(NodeType(key, catalog.gpu(key).kind, known[name], market, offer))
    return nodes


def _why_not(key: str, provider: str, catalog: Catalog, *, spot: bool | None) -> str:
    if any(each.gpu == key for each in instances(provider)):
        only = "on demand" if spot else "as a spot instance"
        return f"{key}: {provider} has it {only} alone"
    several = [o for o in catalog.offers(key) if o.provider == provider and o.gpus_per_instance > 1]
    if several:
        offer = several[0]
        return (
            f"{key}: {provider} has it {offer.gpus_per_instance} to an instance alone "
            f"({offer.instance}, ${offer.usd_per_hour:.2f}/h), of which a sweep uses one: left out"
        )
    others = dict.fromkeys(o.provider for o in catalog.offers(key) if o.gpus_per_instance == 1)
    elsewhere = f"; elsewhere: {', '.join(others)}" if others else ""
    return f"{key}: {provider} does not offer it{elsewhere}"
