"""Commands ``deploy``, ``launch``, ``join-check`` and ``node-notice``."""

import argparse
import contextlib
from pathlib import Path

from orchestrator.cli.commands.catalog import in_use_text
from orchestrator.cli.options.cluster import asked_deployment
from orchestrator.cli.options.inputs import asked_prices, spec_text, today
from orchestrator.clouds.deployment import deployment, write_file
from orchestrator.clouds.join_check import node_resources
from orchestrator.clouds.launch import LaunchError, files_left_behind, launch
from orchestrator.clouds.preemption_notice import wait_for_notice
from orchestrator.console import print_result, remark
from orchestrator.estimating.calibration_file import known_constants
from orchestrator.spec.spec_file import parse_spec, read_spec_text
from orchestrator.storage.run_storage import run_path


def deploy(options: argparse.Namespace) -> int:
    """Writes the file of a cluster for a specification, and tells the bill."""
    prices, asked = asked_prices(options), asked_deployment(options)
    text, _ = spec_text(options.spec)
    spec = parse_spec(text, str(options.spec), base=prices.catalog)
    catalog = prices.over(spec.merged_catalog())
    made = deployment(asked, spec, text, str(options.spec), catalog)
    out: Path | None = options.out
    if out is None:
        print_result(made.text.rstrip("\n"))
    else:
        write_file(out, made.text)
    for line in (*made.left_out, *made.bill):
        remark(line)
    remark(made.dollars.replace("SPEC", str(options.spec)))
    remark(in_use_text(prices, catalog, today()))
    return 0


def join_check(options: argparse.Namespace) -> int:
    """Prints the resources of this machine's node, if it is what its key says."""
    prices = asked_prices(options)
    keys = [key.strip() for key in options.keys.split(",") if key.strip()]
    print_result(node_resources(keys, prices.catalog))
    return 0


def launch_sweep(options: argparse.Namespace) -> int:
    """Sweeps on a cluster that is there for that alone."""
    words = ["sweep", options.spec.name, *options.more]
    swept = options.parser.parse_args(words)  # ends here where the sweep would on the cluster
    text, folder = read_spec_text(options.spec), options.spec.absolute().parent
    files = [("catalog", swept.catalog), *(("prices", name) for name in swept.prices or ())]
    mistakes = ["--dry-run: starts no cluster: take 'sweep --dry-run'"] if swept.dry_run else []
    mistakes += files_left_behind([*files, ("constants", swept.constants)], folder)
    if mistakes:
        raise LaunchError("\n".join(mistakes))
    with contextlib.chdir(folder):  # as the job will be in its copy
        prices = asked_prices(swept)
        known_constants(swept.constants)
        spec = parse_spec(text, str(options.spec), base=prices.catalog)
        prices.over(spec.merged_catalog())
    out = swept.out or f"runs/{spec.name}"
    run_path(out)
    return launch(options.cluster, options.spec, words, out, print_result)


def node_notice(options: argparse.Namespace) -> int:
    """Has Ray drain this machine's node when its cloud gives notice."""
    wait_for_notice(options.provider, options.metadata, options.node_id)
    return 0
