"""Cluster file for the GPUs of a specification, and its expected cost: ``deploy``."""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_catalog.catalog import Catalog, load_catalog
from gpu_catalog.number_text import short
from gpu_catalog.offer import Offer
from gpu_catalog.safe_text import printable
from orchestrator.clouds.cluster_file import (
    Weights,
    cloud_file,
    kuberay_file,
    local_file,
    skypilot_file,
)
from orchestrator.clouds.cuda_support import too_old
from orchestrator.clouds.deployment_request import CLOUDS, DeployError, DeploymentRequest
from orchestrator.clouds.node_types import HEADS, ChosenNodes, Devices, choose, instances
from orchestrator.clouds.skypilot import old_driver, places
from orchestrator.planning.measurement_cost import MeasurementCost, trial_seconds
from orchestrator.pricing.offer_options import RentalOptions
from orchestrator.pricing.transfer_times import PUBLISHED_BYTES
from orchestrator.spec.job import SECONDS_PER_HOUR
from orchestrator.spec.sweep_spec import SweepSpec
from trials.recipes.fields import DTYPE_BYTES
from trials.recipes.host_bytes import built_host_bytes, least_host_bytes
from trials.recipes.layout_support import unmeasured
from trials.records.cell import Cell
from trials.records.compatibility import incompatibility

OWN_GPU = "excluded: join-check on a node does not know this GPU of yours: start its node by hand"
NO_PLACE = "excluded: no offer of it is known that SkyPilot can rent"
WIDTH = 114
GIB = 2**30
UNTRIED = "Tested with simulated clouds and the launchers' own parsers, not on a real cloud yet."


@dataclass(frozen=True, slots=True)
class Deployment:
    """Cluster file and what the user should know about it.

    Attributes:
        bill: lines on its cost.
        left_out: one line for each GPU that the provider does not offer.
        dollars: options with which a sweep prices these nodes.
    """

    text: str
    bill: tuple[str, ...]
    left_out: tuple[str, ...]
    dollars: str = (
        "give the sweep --providers, --regions and --spot or --no-spot as your nodes are rented, "
        "so that it counts their dollars"
    )


@dataclass(frozen=True, slots=True)
class DeployedSweep:
    """Sweep to deploy: its specification, the text and the name of that, and the catalog."""

    spec: SweepSpec
    text: str
    name: str
    catalog: Catalog

    @property
    def devices(self) -> list[Devices]:
        """GPUs of the cells that are measured, one after another or together."""
        host_gib: dict[tuple[str, int], float] = {}
        for cell in self.spec.all_cells():
            if not cell.simulated and self._unmeasured(cell) is None:
                key = cell.device, cell.ranks_per_node
                host_gib[key] = max(host_gib.get(key, 0.0), self._host_gib(cell))
        return [Devices(*key, gib) for key, gib in host_gib.items()]

    def _host_gib(self, cell: Cell) -> float:
        """Memory that a cell's ranks take on the host of a node, at least.

        Of a model without a published number of weights it is not known, and 0.
        """
        weights, recipe = self.spec.model(cell.model).published_parameters, cell.recipe
        if cell.parallel is None or weights is None:
            return 0.0
        is_full = recipe.method == "full" and recipe.trained_layers is None
        kept = least_host_bytes(cell.parallel, weights, weights if is_full else 0)
        all_bytes = weights * DTYPE_BYTES[recipe.base_dtype]
        is_loaded = cell.weights == "pretrained"
        return (
            max(kept, built_host_bytes(cell.parallel, recipe, all_bytes, is_loaded=is_loaded)) / GIB
        )

    @property
    def trial_nodes(self) -> int:
        """Most nodes of a trial."""
        cells = (cell for cell in self.spec.all_cells() if not cell.simulated)
        return max((cell.nodes for cell in cells if self._unmeasured(cell) is None), default=1)

    @property
    def unmeasured(self) -> list[str]:
        """A line for each GPU and each layout that no cluster measures."""
        reasons = {
            cell.gpus: reason
            for cell in self.spec.all_cells()
            if not cell.simulated and (reason := self._unmeasured(cell)) is not None
        }
        return [f"{gpus}: {reason}" for gpus, reason in reasons.items()]

    def trials(self, devices: Devices) -> list[Cell]:
        """Cells that nodes with these GPUs can run with every extra installed."""
        gpu = self.catalog.gpu(devices.gpu)
        return [
            cell
            for cell in self.spec.all_cells()
            if cell.node_devices == devices.name
            and not cell.simulated
            and incompatibility(cell.recipe, self.spec.model(cell.model), gpu) is None
            and self._unmeasured(cell) is None
        ]

    def _unmeasured(self, cell: Cell) -> str | None:
        old = too_old(self.catalog.gpu(cell.device))
        if old is not None or cell.parallel is None:
            return old
        return unmeasured(cell.recipe, self.spec.model(cell.model).text, cell.parallel)

    @property
    def weights(self) -> Weights:
        """Weights that nodes load from the hub, in 16 bits as it has most of them."""
        cells = self.spec.all_cells()
        names = {cell.model for cell in cells if cell.weights == "pretrained"}
        counts = (self.spec.model(name).published_parameters or 0 for name in names)
        return Weights(bool(names), math.ceil(sum(counts) * PUBLISHED_BYTES / GIB))


def deployment(request: DeploymentRequest, sweep: DeployedSweep) -> Deployment:
    """Make a cluster file for the GPUs on which a specification measures.

    Raises:
        DeployError: the options contradict each other, or no GPU can be rented.
    """
    request.check()
    if request.cache_claim and not sweep.weights.pretrained:
        raise DeployError(f"--cache-claim: no cell of {sweep.name} has weights: pretrained")
    if not sweep.devices:
        why = sweep.unmeasured or [
            f"{sweep.name}: every cell is simulated: a cluster would have nothing to measure"
        ]
        raise DeployError("\n".join(why))
    # A trial on several nodes needs them at once.
    request = replace(request, nodes_each=max(request.nodes_each, sweep.trial_nodes))
    if request.provider == "skypilot":
        return _by_skypilot(request, sweep)
    return (_on_cloud if request.provider in CLOUDS else _without_cloud)(request, sweep)


def write_file(out: Path, text: str) -> None:
    """Write a cluster file.

    Raises:
        DeployError: the file cannot be written.
    """
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DeployError(f"--out {out}: cannot be written ({error.strerror})") from None


def _on_cloud(request: DeploymentRequest, sweep: DeployedSweep) -> Deployment:
    catalog = sweep.catalog
    choice = choose(sweep.devices, request.provider, catalog, request.region, spot=request.spot)
    left_out = (*sweep.unmeasured, *choice.left_out)
    if not choice.nodes:
        line = f"{sweep.name}: {request.provider} offers none of its GPUs"
        raise DeployError("\n".join([*left_out, line]))
    bill = _cloud_bill(request, choice, sweep)
    header = _header(sweep.name, request, bill, left_out)
    file = cloud_file(request.provider, choice, request.nodes_each, header, sweep.weights)
    return Deployment(file, bill, left_out, _dollars(request, choice.region, catalog))


def _by_skypilot(request: DeploymentRequest, sweep: DeployedSweep) -> Deployment:
    """Deployment on whatever offers SkyPilot can rent, the cheapest of each GPU first."""
    allows = RentalOptions(providers=request.providers).offer_filter(sweep.catalog).allows
    offered = [offer for offer in sweep.catalog.all_offers if allows(offer)]
    catalog = Catalog(sweep.catalog.gpus, offered)
    possible = {one: places(one, catalog, spot=request.spot) for one in sweep.devices}
    tasks = {one: offers for one, offers in possible.items() if offers}
    missing = tuple(
        f"{one.name}: {_no_place(one, catalog, request)}" for one in possible if one not in tasks
    )
    offers = (offer for one in possible for offer in catalog.offers(one.gpu))
    old = {offer.provider: old_driver(offer.provider) for offer in offers}
    old_lines = (f"{provider}: excluded: {why}" for provider, why in old.items() if why)
    left_out = (*sweep.unmeasured, *missing, *old_lines)
    if not tasks:
        raise DeployError("\n".join([*left_out, f"{sweep.name}: none of its GPUs can be rented"]))
    bill = (
        "the first offer of each GPU that SkyPilot can have, dollars per hour and node:",
        *(
            f"  {one.name}: {o.provider} {o.instance} {o.market} {_dated(o)}"
            for one, offers in tasks.items()
            for o in (place.offer for place in offers)
        ),
        *_sweep_bill(sweep, {one: offers[0].offer.usd_per_hour for one, offers in tasks.items()}),
    )
    header, spec = _header(sweep.name, request, bill, left_out), (sweep.spec.name, sweep.text)
    of_gpus = [(one, sweep.catalog.gpu(one.gpu), offers) for one, offers in tasks.items()]
    made = skypilot_file(of_gpus, request.nodes_each, header, spec, sweep.weights)
    return Deployment(made, bill, left_out)


def _no_place(devices: Devices, catalog: Catalog, request: DeploymentRequest) -> str:
    """Reason why SkyPilot can rent none of these GPUs."""
    if places(replace(devices, host_gib=0.0), catalog, spot=request.spot):
        return f"{devices.needs_host_memory} that SkyPilot can rent"
    return NO_PLACE + (f", by {', '.join(request.providers)}" if request.providers else "")


def _without_cloud(request: DeploymentRequest, sweep: DeployedSweep) -> Deployment:
    """Deployment on existing hosts or Kubernetes, whose nodes know only the shipped GPUs."""
    shipped = {gpu.key for gpu in load_catalog().gpus}
    kept = [one for one in sweep.devices if one.gpu in shipped]
    own = (f"{one.name}: {OWN_GPU}" for one in sweep.devices if one not in kept)
    left_out = (*sweep.unmeasured, *own)
    if not kept:
        raise DeployError("\n".join([*left_out, f"{sweep.name}: none of its GPUs can be used"]))
    bill = (_local_bill if request.provider == "local" else _kuberay_bill)(sweep, kept)
    header, weights = _header(sweep.name, request, bill, left_out), sweep.weights
    if request.provider == "local":
        hosts = request.hosts or ("YOUR_HEAD", *(f"YOUR_{one.name.upper()}_HOST" for one in kept))
        keys = list(dict.fromkeys(one.gpu for one in kept))
        return Deployment(local_file(keys, hosts, header, weights), bill, left_out)
    job = (sweep.spec.name, sweep.text) if request.job else None
    groups = [(one, sweep.catalog.gpu(one.gpu)) for one in kept]
    file = kuberay_file(groups, request, header, weights, job)
    return Deployment(file, bill, left_out)


def _local_bill(sweep: DeployedSweep, devices: Sequence[Devices]) -> tuple[str, ...]:
    lines = ["your own hosts cost nothing; the cheapest offers to rent are:"]
    prices: dict[Devices, float | None] = dict.fromkeys(devices)
    for one in devices:
        of_gpu = sweep.catalog.offers(one.gpu)
        o = next((o for o in of_gpu if one.are_in(o.gpus_per_instance)), None)
        if o is None:
            lines.append(f"  {one.name}: no known price")
        else:
            lines.append(f"  {one.name}: {o.provider} {o.instance} {o.market} {_dated(o)}")
            prices[one] = o.usd_per_hour
    usd = [usd for usd in prices.values() if usd is not None]
    hosts = "for one host of each of these GPUs with a price"
    return (
        *lines,
        f"${sum(usd):.2f} per hour {hosts}: {len(usd)}",
        "rented hosts are billed until you return them: 'ray down' only stops Ray",
        *_sweep_bill(sweep, prices),
    )


def _kuberay_bill(sweep: DeployedSweep, devices: Sequence[Devices]) -> tuple[str, ...]:
    return (
        "the price per hour is not known: whoever runs your Kubernetes cluster bills its nodes",
        *_sweep_bill(sweep, dict.fromkeys(devices)),
    )


def _cloud_bill(
    request: DeploymentRequest, choice: ChosenNodes, sweep: DeployedSweep
) -> tuple[str, ...]:
    """Lines on the price of an hour with every node up, and on the cost of the sweep."""
    head = _head_offer(request.provider, choice.region, sweep.catalog)
    return (
        f"{_node_text(request, choice)} in {choice.region}, dollars per hour:",
        *(
            f"  {n.devices.name}: {n.instance.name} {n.market} {_dated(n.offer)}"
            for n in choice.nodes
        ),
        f"  head: {HEADS[request.provider]} on-demand {_dated(head)}, until 'ray down'",
        _total_text(request, choice, head),
        *_sweep_bill(sweep, {n.devices: choice.most(n.devices.name) for n in choice.nodes}),
    )


def _dated(offer: Offer | None) -> str:
    return (
        "price unknown" if offer is None else f"{short(offer.usd_per_hour, 4)} (as of {offer.date})"
    )


def _total_text(request: DeploymentRequest, choice: ChosenNodes, head: Offer | None) -> str:
    """Bound of the price of an hour with all nodes and the head up."""
    devices = choice.devices
    nodes = request.nodes_each * len(devices)
    up = f"with {nodes} node{'s' * (nodes > 1)} and the head up"
    unknown = [name for name in devices if choice.most(name) is None]
    unknown += ["the head"] * (head is None)
    head_usd = 0.0 if head is None else head.usd_per_hour
    if not unknown:
        # Nodes of both markets of a GPU may be up at once; only their total number is limited.
        slots = sorted(
            (node.usd_per_hour or choice.most(node.devices.name) or 0.0 for node in choice.nodes),
            reverse=True,
        )
        total = sum([usd for usd in slots for _ in range(request.nodes_each)][:nodes])
        both = max(Counter(node.devices.name for node in choice.nodes).values(), default=0) > 1
        why = ": of a GPU, a spot node and its on-demand replacement may run at once" * both
        return f"at most ${total + head_usd:.2f} per hour {up}{why}"
    least = sum(request.nodes_each * min(choice.prices(name), default=0.0) for name in devices)
    missing = f"prices in the region are missing for {', '.join(unknown)}"
    bound = f"at least ${least + head_usd:.2f} per hour {up}: " if least + head_usd else ""
    return f"{bound}{missing}; 'catalog refresh' fetches them"


def _node_text(request: DeploymentRequest, choice: ChosenNodes) -> str:
    nodes = "a node" if request.nodes_each == 1 else f"{request.nodes_each} nodes"
    names = choice.devices
    return f"{nodes} for each of {len(names)} GPUs" if len(names) > 1 else f"{nodes} for one GPU"


def _head_offer(provider: str, region: str, catalog: Catalog) -> Offer | None:
    gpu = next(i.gpu for i in instances(provider) if i.name == HEADS[provider])
    head = (provider, region, HEADS[provider], "on-demand")
    offers = catalog.offers(gpu)
    return next((o for o in offers if (o.provider, o.region, o.instance, o.market) == head), None)


def _sweep_bill(sweep: DeployedSweep, prices: Mapping[Devices, float | None]) -> tuple[str, ...]:
    """Expected time and cost of the sweep itself, from assumed times: nothing is measured yet."""
    spec = sweep.spec
    effort = MeasurementCost((), spec.workload.overheads.expected_startup_minutes)
    startup, trial = effort.start_seconds(""), trial_seconds(spec, "", effort)
    trials = {one: sweep.trials(one) for one in prices}
    seconds = {one: startup + len(cells) * trial for one, cells in trials.items() if cells}
    minutes = max(seconds.values(), default=0.0) / 60
    count = sum(map(len, trials.values()))
    nodes = "a node" if sweep.trial_nodes == 1 else "the nodes of a trial"
    expected = f"the sweep: {count} trials, {minutes:.0f} minutes with {nodes} for each GPU"
    assumed = (
        f"assumed: {startup / 60:.0f} minutes to start a node and {trial / 60:.0f} for a trial; "
        "large models take longer"
    )
    known_prices = {one: usd for one, usd in prices.items() if usd is not None}
    if known_prices.keys() < seconds.keys():
        return (f"{expected}; its cost is unknown ({assumed})",)
    node_seconds = {
        one: max(c.nodes for c in cells) * startup + sum(c.nodes for c in cells) * trial
        for one, cells in trials.items()
        if cells
    }
    usd = sum(node_seconds[one] / SECONDS_PER_HOUR * known_prices[one] for one in seconds)
    return (f"{expected}, about ${usd:.2f} ({assumed})",)


def _dollars(request: DeploymentRequest, region: str, catalog: Catalog) -> str:
    """Options with which a sweep prices these nodes, as far as the catalog has their prices."""
    offers = [offer for offer in catalog.all_offers if offer.provider == request.provider]
    if not offers:
        return (
            f"a sweep on it uses other providers' prices: no price of {request.provider} is known "
            "('catalog refresh' fetches them)"
        )
    regions = f" --regions {region}" if any(offer.region == region for offer in offers) else ""
    spot = {None: "", True: " --spot", False: " --no-spot"}[request.spot]
    return f"to measure on this cluster: sweep SPEC --providers {request.provider}{regions}{spot}"


def _header(
    name: str, request: DeploymentRequest, bill: Sequence[str], left_out: Sequence[str]
) -> str:
    """Comment at the top of a cluster file: the command that made it, and its cost."""
    lines = [
        f"Made by: python -m orchestrator deploy {name} {request.words}",
        *([] if request.provider == "local" else [UNTRIED]),
        "",
        "Cost:",
        *(f"  {line}" for line in bill),
        *(["", "Not included:", *(f"  {line}" for line in left_out)] if left_out else []),
    ]
    wrapped = (
        textwrap.wrap(printable(line), WIDTH, subsequent_indent="    ") or [""] for line in lines
    )
    return "\n".join(f"# {line}".rstrip() for part in wrapped for line in part)
