"""A cluster for the GPUs of a specification, and the bill it will run up: ``deploy``."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_catalog.catalog import Catalog, load_catalog
from gpu_catalog.errors import UserError
from gpu_catalog.offer import Offer
from orchestrator.clouds.cluster_file import cloud_file, kuberay_file, local_file
from orchestrator.clouds.deployment_request import CLOUDS, DeploymentRequest
from orchestrator.clouds.node_types import HEADS, ChosenNodes, choose, instances
from orchestrator.planning.measurement_cost import MeasurementCost, trial_seconds
from orchestrator.spec.job import SECONDS_PER_HOUR
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.compatibility import incompatibility

OWN_GPU = "a GPU of your own catalog, which a node's join-check does not know: start it by hand"
WIDTH = 114
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")


class DeployError(UserError):
    """No cluster can be made of what was asked for; one line on why."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A cluster's file.

    Attributes:
        text: of the file.
        bill: lines on what it costs.
        left_out: a line for each GPU that the provider does not have.
        dollars: by which options a sweep counts what these nodes cost.
    """

    text: str
    bill: tuple[str, ...]
    left_out: tuple[str, ...]
    dollars: str = (
        "a sweep counts its dollars by what your nodes are rented as, if you say so: --providers, "
        "--regions, --spot or --no-spot"
    )


def deployment(
    asked: DeploymentRequest, spec: SweepSpec, text: str, name: str, catalog: Catalog
) -> Deployment:
    """A cluster for the GPUs on which a specification measures.

    Args:
        asked: provider and options.
        spec: the specification.
        text: of its file.
        name: what to call it.
        catalog: GPUs and prices.

    Raises:
        DeployError: there is nothing to make a cluster of.
    """
    _check(asked)
    keys = list(dict.fromkeys(c.device for c in spec.all_cells() if not c.simulated))
    if not keys:
        raise DeployError(f"{name}: measures on no GPU: everything in it is simulated")
    if asked.provider not in CLOUDS:
        return _without_cloud(asked, _Given(spec, text, name, catalog), keys)
    choice = choose(keys, asked.provider, catalog, asked.region, spot=asked.spot)
    if not choice.nodes:
        raise DeployError("\n".join([*choice.left_out, f"{name}: no GPU of it is to be had"]))
    bill = _cloud_bill(asked, choice, spec, catalog)
    header = _header(name, asked, bill, choice.left_out)
    file = cloud_file(asked.provider, choice, asked.nodes_each, header)
    return Deployment(file, bill, choice.left_out, _dollars(asked, choice.region, catalog))


def write_file(out: Path, text: str) -> None:
    """Writes a cluster's file.

    Raises:
        DeployError: it cannot be written.
    """
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DeployError(f"--out {out}: cannot be written ({error.strerror})") from None


def _check(asked: DeploymentRequest) -> None:
    wrong = (
        (asked.hosts and asked.provider != "local", "--hosts goes with --provider local"),
        (asked.job and asked.provider != "kuberay", "--job goes with --provider kuberay"),
        (
            (asked.region is not None or asked.spot is not None) and asked.provider not in CLOUDS,
            f"--region, --spot and --no-spot are of clouds, not of --provider {asked.provider}",
        ),
        (len(asked.hosts) == 1, "--hosts HEAD,HOST,…: the head and at least one more"),
        *(
            (not NAME.fullmatch(text), f"{text!r} is no host nor region: letters, digits, . and -")
            for text in (*asked.hosts, *([] if asked.region is None else [asked.region]))
        ),
    )
    for is_wrong, line in wrong:
        if is_wrong:
            raise DeployError(line)


@dataclass(frozen=True, slots=True)
class _Given:
    """A specification, its text and name, and the catalog."""

    spec: SweepSpec
    text: str
    name: str
    catalog: Catalog


def _without_cloud(asked: DeploymentRequest, given: _Given, keys: Sequence[str]) -> Deployment:
    """On hosts that are there, or Kubernetes': their nodes know the shipped GPUs alone."""
    known = {gpu.key for gpu in load_catalog().gpus}
    own = tuple(f"{key}: {OWN_GPU}" for key in keys if key not in known)
    kept = [key for key in keys if key in known]
    if not kept:
        raise DeployError("\n".join([*own, f"{given.name}: no GPU of it is to be had"]))
    bill = (_local_bill if asked.provider == "local" else _kuberay_bill)(given, kept)
    header = _header(given.name, asked, bill, own)
    if asked.provider == "local":
        hosts = asked.hosts or ("YOUR_HEAD", *(f"YOUR_{key.upper()}_HOST" for key in kept))
        return Deployment(local_file(kept, hosts, header), bill, own)
    job = (given.spec.name, given.text) if asked.job else None
    gpus = [given.catalog.gpu(key) for key in kept]
    return Deployment(kuberay_file(gpus, asked.nodes_each, header, job), bill, own)


def _local_bill(given: _Given, keys: Sequence[str]) -> tuple[str, ...]:
    offers = {key: _cheapest_alone(key, given.catalog) for key in keys}
    prices = {key: None if o is None else o.usd_per_hour for key, o in offers.items()}
    known = [usd for usd in prices.values() if usd is not None]
    lines = ["nothing an hour if the hosts are yours; rented, the cheapest are:"]
    for key, o in offers.items():
        rented = "no price known"
        if o is not None:
            rented = f"{o.provider} {o.instance} {o.market} {_dated(o)}"
        lines.append(f"  {key}: {rented}")
    lines.append(f"${sum(known):.2f} an hour for one each of the {len(known)} with a price")
    lines.append("they are billed until you give them back: 'ray down' ends Ray alone")
    return (*lines, *_sweep_bill(given.spec, given.catalog, prices))


def _kuberay_bill(given: _Given, keys: Sequence[str]) -> tuple[str, ...]:
    return (
        "what an hour costs is not known: your Kubernetes' nodes are billed by whoever runs it",
        *_sweep_bill(given.spec, given.catalog, dict.fromkeys(keys)),
    )


def _cloud_bill(
    asked: DeploymentRequest, choice: ChosenNodes, spec: SweepSpec, catalog: Catalog
) -> tuple[str, ...]:
    """What an hour costs with every node up, and what the sweep takes."""
    lines = [
        f"{_node_text(asked, choice)} in {choice.region}, dollars an hour:",
        *(f"  {n.gpu}: {n.instance.name} {n.market} {_dated(n.offer)}" for n in choice.nodes),
    ]
    head = _head_offer(asked.provider, choice.region, catalog)
    lines.append(f"  head: {HEADS[asked.provider]} on-demand {_dated(head)}, until 'ray down'")
    lines.append(_total_text(asked, choice, head))
    gpus = dict.fromkeys(node.gpu for node in choice.nodes)
    prices = {gpu: choice.most(gpu) for gpu in gpus}
    return (*lines, *_sweep_bill(spec, catalog, prices))


def _dated(offer: Offer | None) -> str:
    return "not known there" if offer is None else f"{offer.usd_per_hour:.4g} (as of {offer.date})"


def _total_text(asked: DeploymentRequest, choice: ChosenNodes, head: Offer | None) -> str:
    """What an hour costs with everything up."""
    gpus = list(dict.fromkeys(node.gpu for node in choice.nodes))
    nodes = asked.nodes_each * len(gpus)
    up = f"with {nodes} node{'s' * (nodes > 1)} and the head up"
    unknown = [gpu for gpu in gpus if choice.most(gpu) is None] + ["the head"] * (head is None)
    head_usd = 0.0 if head is None else head.usd_per_hour
    if not unknown:
        # Both markets of a GPU may be up at once; the number of nodes is limited over all.
        slots = sorted(
            (node.usd_per_hour or choice.most(node.gpu) or 0.0 for node in choice.nodes),
            reverse=True,
        )
        usd = sum([each for each in slots for _ in range(asked.nodes_each)][:nodes])
        return f"at most ${usd + head_usd:.2f} an hour {up}"
    least = sum(asked.nodes_each * min(choice.prices(gpu), default=0.0) for gpu in gpus)
    missing = f"not every price in the region is known of {', '.join(unknown)}"
    known = f"at least ${least + head_usd:.2f} an hour {up}: " if least + head_usd else ""
    return f"{known}{missing}; 'catalog refresh' asks for them"


def _node_text(asked: DeploymentRequest, choice: ChosenNodes) -> str:
    each = "a node" if asked.nodes_each == 1 else f"{asked.nodes_each} nodes"
    gpus = len({node.gpu for node in choice.nodes})
    return f"{each} for each of {gpus} GPUs" if gpus > 1 else f"{each} for one GPU"


def _head_offer(provider: str, region: str, catalog: Catalog) -> Offer | None:
    gpu = next(each.gpu for each in instances(provider) if each.name == HEADS[provider])
    for offer in catalog.offers(gpu):
        where = (offer.provider, offer.region, offer.instance, offer.market)
        if where == (provider, region, HEADS[provider], "on-demand"):
            return offer
    return None


def _sweep_bill(
    spec: SweepSpec, catalog: Catalog, prices: Mapping[str, float | None]
) -> tuple[str, ...]:
    """What the sweep itself is expected to take, where nothing is measured yet."""
    effort = MeasurementCost((), spec.workload.overheads.startup_minutes)
    startup, each = effort.start_seconds(""), trial_seconds(spec, "", effort)
    trials = {key: _trials(spec, catalog, key) for key in prices}
    seconds = {key: startup + count * each for key, count in trials.items() if count}
    minutes = max(seconds.values(), default=0.0) / 60
    took = (
        f"the sweep: {sum(trials.values())} trials, {minutes:.0f} minutes with a node for each GPU"
    )
    assumed = (
        f"assumed: {startup / 60:.0f} minutes to start a node and {each / 60:.0f} a trial; more "
        "with large models"
    )
    known = {key: usd for key, usd in prices.items() if usd is not None}
    if known.keys() < seconds.keys():
        return (f"{took}; its dollars are not known ({assumed})",)
    usd = sum(taken / SECONDS_PER_HOUR * known[key] for key, taken in seconds.items())
    return (f"{took}, about ${usd:.2f} ({assumed})",)


def _dollars(asked: DeploymentRequest, region: str, catalog: Catalog) -> str:
    """Options that say what its nodes are, as far as there are prices of such."""
    offers = [offer for offer in catalog.all_offers if offer.provider == asked.provider]
    if not offers:
        return (
            f"a sweep on it counts other providers' dollars: no price of {asked.provider} is known "
            "('catalog refresh' asks for them)"
        )
    regions = f" --regions {region}" if any(offer.region == region for offer in offers) else ""
    spot = {None: "", True: " --spot", False: " --no-spot"}[asked.spot]
    return f"measure on it with: sweep SPEC --providers {asked.provider}{regions}{spot}"


def _trials(spec: SweepSpec, catalog: Catalog, key: str) -> int:
    """Cells that this GPU could run, with every extra installed."""
    gpu = catalog.gpu(key)
    return sum(
        incompatibility(cell.recipe, spec.model(cell.model), gpu) is None
        for cell in spec.all_cells()
        if cell.device == key and not cell.simulated
    )


def _cheapest_alone(key: str, catalog: Catalog) -> Offer | None:
    return next((o for o in catalog.offers(key) if o.gpus_per_instance == 1), None)


def _header(
    name: str, asked: DeploymentRequest, bill: Sequence[str], left_out: Sequence[str]
) -> str:
    """The comment at the top of a file: who made it, and what it costs."""
    lines = [
        f"Made by: python -m orchestrator deploy {name} {asked.words}",
        "",
        "What it costs:",
        *(f"  {line}" for line in bill),
        *(["", "Not in it:", *(f"  {line}" for line in left_out)] if left_out else []),
    ]
    wrapped = (
        textwrap.wrap(line, WIDTH, subsequent_indent="    ", drop_whitespace=True) or [""]
        for line in lines
    )
    return "\n".join(f"# {line}".rstrip() for part in wrapped for line in part)
