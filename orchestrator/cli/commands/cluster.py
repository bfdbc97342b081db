"""Commands ``deploy``, ``launch``, ``join-check`` and ``node-notice``."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from orchestrator.cli.commands import sweep
from orchestrator.cli.options.clock import today
from orchestrator.cli.options.groups import PRICES
from orchestrator.cli.options.parser import make_parser
from orchestrator.cli.options.table import add_table
from orchestrator.clouds.deployment_request import CLOUDS, PROVIDERS, DeploymentRequest
from orchestrator.clouds.preemption_notice import METADATA
from orchestrator.console import print_result, remark

DEPLOY = f"""
spec SPEC                a YAML file, or a shipped sweep
--provider {{{",".join(PROVIDERS)}}}
                         provider of the machines
--region R               region (default: the one with the cheapest GPUs)
--out FILE               file to write (default: print it)
--max-workers N          largest number of nodes per GPU (default: 1)
--[no-]spot              only spot instances, or only on-demand instances (default: spot where there
                         is any)
--hosts HEAD,HOST        with --provider local: addresses of the machines, the head first
--job                    with --provider kuberay: write a RayJob, which measures SPEC and removes
                         its cluster
{PRICES}
"""
LAUNCH = """
cluster CLUSTER          the file that 'deploy' wrote
spec SPEC                a YAML file; its folder is uploaded
"""
JOIN_CHECK = f"""
keys KEY[,KEY]           keys of 'catalog gpus'; one must match
{PRICES}
"""
NODE_NOTICE = f"""
provider {{{",".join(CLOUDS)}}}
                         the cloud of this machine
--node-id ID             id of the Ray node (default: the one on this machine)
--metadata URL           address of the metadata service (default: {METADATA})
"""


def add_options(commands: Any) -> None:
    """Add the commands."""
    deploy = commands.add_parser(
        "deploy",
        run=run_deploy,
        help="write a cluster file for the GPUs of a specification, and print its cost",
        description="Write the file from which 'ray up' or 'kubectl apply' creates a cluster. Its "
        "nodes start when a trial needs their GPU. deploy/README.md describes the next steps.",
    )
    add_table(deploy, DEPLOY, required=["--provider"], spec=Path)
    launch = commands.add_parser(
        "launch",
        run=run_launch,
        usage="%(prog)s CLUSTER SPEC [--out RUN] [any option of sweep]",
        help="from a laptop: start a cluster, sweep on it, follow the sweep, stop the cluster",
        description="Start the cluster of a file that 'deploy' wrote, submit the sweep, print its "
        "output until it ends, and stop the cluster. The command reconnects after a lost "
        "connection. To reconnect to a sweep that is still running, run the same command again. "
        "Kubernetes is not supported.",
    )
    add_table(launch, LAUNCH, cluster=Path, spec=Path)
    launch.add_argument(
        "more",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of 'sweep', which runs on the cluster's head; unless --out is a bucket, the "
        "run is downloaded at the end",
    )
    join_check = commands.add_parser(
        "join-check",
        run=run_join_check,
        help="check that this machine has the GPU of a key; print the resources of its Ray node",
        description="Compare the name and memory of this machine's GPU, as NVML reports them, with "
        "the catalog's GPU of that key. If they match, print the value for 'ray start "
        "--resources'; otherwise print the difference and exit with 1.",
    )
    add_table(join_check, JOIN_CHECK)
    notice = commands.add_parser(
        "node-notice",
        run=run_node_notice,
        help="wait until the cloud announces the end of this machine, then drain its Ray node",
        description="Ask the cloud's metadata service every five seconds whether this machine will "
        "be taken away. If so, make Ray drain the node, and exit. The nodes of a cluster that "
        "'deploy' describes run this command automatically.",
    )
    add_table(notice, NODE_NOTICE)
    notice.set_defaults(metadata=METADATA)


def run_deploy(options: argparse.Namespace) -> int:
    """Write the cluster file of a specification, and print its cost."""
    from orchestrator.clouds.deployment import DeployedSweep, deployment, write_file
    from orchestrator.pricing.prices_in_use import PriceOptions
    from orchestrator.request import names_in, request_of
    from orchestrator.spec.spec_file import named_spec_text, parse_spec

    prices = request_of(PriceOptions, vars(options)).in_use()
    text, _ = named_spec_text(options.spec)
    spec = parse_spec(text, str(options.spec), base=prices.catalog)
    catalog = prices.over(spec.merged_catalog())
    request = DeploymentRequest(
        provider=options.provider,
        region=options.region,
        spot=options.spot,
        nodes_each=options.max_workers or 1,
        hosts=names_in(options.hosts or ()),
        job=options.job,
    )
    deployed = deployment(request, DeployedSweep(spec, text, str(options.spec), catalog))
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
