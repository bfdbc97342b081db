"""Commands ``deploy``, ``launch``, ``join-check`` and ``node-notice``."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from orchestrator.cli.commands import sweep
from orchestrator.cli.options.clock import today
from orchestrator.cli.options.parser import make_parser
from orchestrator.cli.options.prices import add_prices
from orchestrator.cli.options.value_types import positive
from orchestrator.clouds.deployment_request import CLOUDS, PROVIDERS, DeploymentRequest
from orchestrator.clouds.preemption_notice import METADATA
from orchestrator.console import print_result, remark


def add_options(commands: Any) -> None:
    """Add the commands."""
    _add_deploy(commands)
    _add_launch(commands)
    join = commands.add_parser(
        "join-check",
        help="check that this machine has the GPU of a key; print the resources of its Ray node",
        description="Reads the name and memory of this machine's GPU from NVML. If it is the "
        "catalog's GPU of that key, prints the value for 'ray start --resources'. "
        "Otherwise prints the difference and exits with 1.",
    )
    join.add_argument("keys", metavar="KEY[,KEY]", help="keys of 'catalog gpus'; one must match")
    add_prices(join)
    join.set_defaults(run_command=run_join_check)
    notice = commands.add_parser(
        "node-notice",
        help="wait until the cloud announces the end of this machine, then drain its Ray node",
        description="Asks the cloud's metadata service every five seconds whether this machine "
        "will be taken away. If so, it makes Ray drain the node, and exits. The nodes of a "
        "deployed cluster run this command automatically.",
    )
    add = notice.add_argument
    add("provider", choices=CLOUDS, help="the cloud of this machine")
    add("--node-id", metavar="ID", help="id of the Ray node (default: the one on this machine)")
    add(
        "--metadata",
        default=METADATA,
        metavar="URL",
        help=f"address of the metadata service (default: {METADATA})",
    )
    notice.set_defaults(run_command=run_node_notice)


def _add_deploy(commands: Any) -> None:
    deploy = commands.add_parser(
        "deploy",
        help="write a cluster file for the GPUs of a specification, and print its cost",
        description="Writes the file from which 'ray up' or 'kubectl apply' creates a cluster. Its "
        "nodes start when a trial needs their GPU. deploy/README.md describes the next steps.",
    )
    add = deploy.add_argument
    add("spec", type=Path, metavar="SPEC", help="a YAML file, or a shipped sweep")
    add("--provider", required=True, choices=PROVIDERS, help="provider of the machines")
    add("--region", metavar="R", help="region (default: the one with the cheapest GPUs)")
    add("--out", type=Path, metavar="FILE", help="file to write (default: print it)")
    add(
        "--max-workers",
        type=positive,
        default=1,
        metavar="N",
        help="most nodes per GPU (default: 1)",
    )
    add(
        "--spot",
        action=argparse.BooleanOptionalAction,
        help="only spot instances, or only on-demand instances (default: spot where there is any)",
    )
    add(
        "--hosts",
        metavar="HEAD,HOST",
        help="with --provider local: addresses of the machines, the head first",
    )
    add(
        "--job",
        action="store_true",
        help="with --provider kuberay: write a RayJob, which measures SPEC and removes its cluster",
    )
    add_prices(deploy)
    deploy.set_defaults(run_command=run_deploy)


def _add_launch(commands: Any) -> None:
    launch = commands.add_parser(
        "launch",
        usage="%(prog)s CLUSTER SPEC [--out RUN] [any option of sweep]",
        help="from a laptop: start a cluster, sweep on it, follow the sweep, stop the cluster",
        description="Starts the cluster of a file that 'deploy' wrote, submits the sweep, prints "
        "its output until it ends, and stops the cluster. The command reconnects after a lost "
        "connection. Run it again to follow a sweep that is still running.",
    )
    add = launch.add_argument
    add("cluster", type=Path, metavar="CLUSTER", help="the file that 'deploy' wrote")
    add("spec", type=Path, metavar="SPEC", help="a YAML file; its folder is uploaded")
    add(
        "more",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of 'sweep', which runs on the cluster's head; a run outside a bucket is "
        "copied from there at the end",
    )
    launch.set_defaults(run_command=run_launch)


def deployment_request(options: argparse.Namespace) -> DeploymentRequest:
    """The request that options make."""
    return DeploymentRequest(
        provider=options.provider,
        region=options.region,
        spot=options.spot,
        nodes_each=options.max_workers,
        hosts=tuple(h.strip() for h in (options.hosts or "").split(",") if h.strip()),
        job=options.job,
    )


def run_deploy(options: argparse.Namespace) -> int:
    """Write the cluster file of a specification, and print its cost."""
    from orchestrator.clouds.deployment import deployment, write_file
    from orchestrator.pricing.prices_in_use import PriceOptions
    from orchestrator.request import request_of
    from orchestrator.spec.spec_file import named_spec_text, parse_spec

    prices = request_of(PriceOptions, vars(options)).in_use()
    text, _ = named_spec_text(options.spec)
    spec = parse_spec(text, str(options.spec), base=prices.catalog)
    catalog = prices.over(spec.merged_catalog())
    deployed = deployment(deployment_request(options), spec, text, str(options.spec), catalog)
    if options.out is None:
        print_result(deployed.text.rstrip("\n"))
    else:
        write_file(options.out, deployed.text)
    for line in (*deployed.left_out, *deployed.bill):
        remark(line)
    remark(deployed.dollars.replace("SPEC", str(options.spec)))
    remark(f"In use: {prices.age(catalog, today())}")
    return 0


def run_join_check(options: argparse.Namespace) -> int:
    """Print the resources of this machine's node, if its GPU is the key's."""
    from orchestrator.clouds.join_check import node_resources
    from orchestrator.pricing.prices_in_use import PriceOptions
    from orchestrator.request import names_in, request_of

    prices = request_of(PriceOptions, vars(options)).in_use()
    print_result(node_resources(names_in(options.keys), prices.catalog))
    return 0


def run_launch(options: argparse.Namespace) -> int:
    """Sweep on a cluster that is started for the sweep and stopped after it."""
    from orchestrator.clouds.launch import LaunchError, files_left_behind, launch
    from orchestrator.estimating.calibration_file import known_constants
    from orchestrator.pricing.prices_in_use import PriceOptions
    from orchestrator.request import request_of
    from orchestrator.spec.spec_file import parse_spec, read_spec_text
    from orchestrator.storage.run_storage import run_path

    words = ["sweep", options.spec.name, *options.more]
    # A mistake of usage ends the command here, before the cluster is started.
    swept = make_parser([sweep]).parse_args(words)
    text, folder = read_spec_text(options.spec), options.spec.absolute().parent
    files = [("catalog", swept.catalog), *(("prices", name) for name in swept.prices or ())]
    mistakes = ["--dry-run: starts no cluster: take 'sweep --dry-run'"] if swept.dry_run else []
    mistakes += files_left_behind([*files, ("constants", swept.constants)], folder)
    if mistakes:
        raise LaunchError("\n".join(mistakes))
    with contextlib.chdir(folder):  # the working directory of the job's copy
        prices = request_of(PriceOptions, vars(swept)).in_use()
        known_constants(swept.constants)
        spec = parse_spec(text, str(options.spec), base=prices.catalog)
        prices.over(spec.merged_catalog())
    out = swept.out or f"runs/{spec.name}"
    run_path(out)
    return launch(options.cluster, options.spec, words, out, print_result)


def run_node_notice(options: argparse.Namespace) -> int:
    """Drain this machine's Ray node when its cloud announces the end of the machine."""
    from orchestrator.clouds.preemption_notice import wait_for_notice

    wait_for_notice(options.provider, options.metadata, options.node_id)
    return 0
