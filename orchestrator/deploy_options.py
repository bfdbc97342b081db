"""The options of ``deploy`` and ``join-check``."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOUDS = ("aws", "gcp", "azure")
PROVIDERS = (*CLOUDS, "local", "kuberay")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options of ``deploy`` say.

    Attributes:
        provider: one of ``PROVIDERS``.
        region: of the provider; absent for the one with the best prices.
        spot: spot instances alone, or none; absent for spot first.
        nodes_each: most nodes for a GPU at once.
        hosts: of ``local``, the head's first.
        job: of KubeRay, whether to make a job that brings its own cluster.
    """

    provider: str
    region: str | None = None
    spot: bool | None = None
    nodes_each: int = 1
    hosts: tuple[str, ...] = ()
    job: bool = False

    @property
    def words(self) -> str:
        """These options, as they are given."""
        spot = {None: "", True: " --spot", False: " --no-spot"}[self.spot]
        return (
            f"--provider {self.provider}"
            + (f" --region {self.region}" if self.region else "")
            + (f" --max-workers {self.nodes_each}" if self.nodes_each != 1 else "")
            + spot
            + (f" --hosts {','.join(self.hosts)}" if self.hosts else "")
            + (" --job" if self.job else "")
        )


def add_deploy(
    commands: Any,
    positive: Callable[[str], int],
    add_prices: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Adds both commands to a parser."""
    deploy = commands.add_parser(
        "deploy",
        help="a cluster's file for the GPUs of a specification, and what it will cost",
        description="Writes the file from which 'ray up' or 'kubectl apply' makes a cluster whose "
        "nodes start when a trial wants their GPU: deploy/README.md tells what to do with it.",
    )
    add = deploy.add_argument
    add("spec", type=Path, metavar="SPEC", help="a YAML file, or a shipped sweep")
    add("--provider", required=True, choices=PROVIDERS, help="who has the machines")
    add("--region", metavar="R", help="of the provider (default: where the GPUs are cheapest)")
    add("--out", type=Path, metavar="FILE", help="where to write it (default: print it)")
    add(
        "--max-workers",
        type=positive,
        default=1,
        metavar="N",
        help="nodes for each GPU at most (default: 1)",
    )
    add(
        "--spot",
        action=argparse.BooleanOptionalAction,
        help="spot instances alone, or none (default: spot, on demand where there is none)",
    )
    add("--hosts", metavar="HEAD,HOST", help="of --provider local: addresses, the head's first")
    add(
        "--job",
        action="store_true",
        help="of --provider kuberay: a RayJob, which measures SPEC and takes its cluster down",
    )
    add_prices(deploy)
    join = commands.add_parser(
        "join-check",
        help="whether this machine has the GPU of a key; prints what 'ray start --resources' takes",
        description="Asks NVML for name and memory of this machine's GPU. Prints the node's "
        "resources if it is the catalog's GPU of that key; else says what it is, and ends with 1.",
    )
    join.add_argument("keys", metavar="KEY[,KEY]", help="of 'catalog gpus'; any of several")
    add_prices(join)


def asked_deployment(options: argparse.Namespace) -> Asked:
    """What the options say."""
    return Asked(
        provider=options.provider,
        region=options.region,
        spot=options.spot,
        nodes_each=options.max_workers,
        hosts=tuple(h.strip() for h in (options.hosts or "").split(",") if h.strip()),
        job=options.job,
    )
