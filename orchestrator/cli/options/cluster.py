"""The options of ``deploy``, ``launch`` and what its nodes run."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.clouds.deployment_request import CLOUDS, PROVIDERS, DeploymentRequest
from orchestrator.clouds.preemption_notice import METADATA


def add_deploy(
    commands: Any,
    positive: Callable[[str], int],
    add_prices: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Adds the commands to a parser."""
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
    _add_launch(commands)
    join = commands.add_parser(
        "join-check",
        help="whether this machine has the GPU of a key; prints what 'ray start --resources' takes",
        description="Asks NVML for name and memory of this machine's GPU. Prints the node's "
        "resources if it is the catalog's GPU of that key; else says what it is, and ends with 1.",
    )
    join.add_argument("keys", metavar="KEY[,KEY]", help="of 'catalog gpus'; any of several")
    add_prices(join)
    notice = commands.add_parser(
        "node-notice",
        help="wait until this machine's cloud gives notice, then have Ray drain its node",
        description="Asks the metadata service every five seconds whether this machine will be "
        "taken away; then Ray places nothing more on its node, and this ends. Nodes of clouds run "
        "it by themselves.",
    )
    add = notice.add_argument
    add("provider", choices=CLOUDS, help="whose machine this is")
    add("--node-id", metavar="ID", help="of Ray's node (default: the one on this machine)")
    add("--metadata", default=METADATA, metavar="URL", help=f"of the service (default: {METADATA})")


def _add_launch(commands: Any) -> None:
    launch = commands.add_parser(
        "launch",
        usage="%(prog)s CLUSTER SPEC [--out RUN] [any option of sweep]",
        help="from a laptop: bring a cluster up, sweep on it, follow it, take it down",
        description="Brings up the cluster of a file that 'deploy' made, submits the sweep, shows "
        "what it says until it has ended, and takes the cluster down. What drops the connection "
        "(sleep, another network) is waited out; the same command again goes on where it was.",
    )
    add = launch.add_argument
    add("cluster", type=Path, metavar="CLUSTER", help="the file that 'deploy' made")
    add("spec", type=Path, metavar="SPEC", help="a YAML file; its folder goes along")
    add(
        "more",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of 'sweep', which runs on the cluster's head; a run that is not in a bucket "
        "is fetched from there at the end",
    )


def asked_deployment(options: argparse.Namespace) -> DeploymentRequest:
    """What the options say."""
    return DeploymentRequest(
        provider=options.provider,
        region=options.region,
        spot=options.spot,
        nodes_each=options.max_workers,
        hosts=tuple(h.strip() for h in (options.hosts or "").split(",") if h.strip()),
        job=options.job,
    )
