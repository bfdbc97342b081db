"""Commands ``deploy``, ``launch``, ``join-check`` and ``node-notice``."""

import argparse
import contextlib

from orchestrator.cli.options.clock import now, today
from orchestrator.cli.parsers.program import build_parser
from orchestrator.clouds.deployment import DeployedSweep, deployment, write_file
from orchestrator.clouds.deployment_request import DeploymentRequest
from orchestrator.clouds.join_check import JoinError, clock_mistake, node_resources
from orchestrator.clouds.launch import LaunchError, files_left_behind, launch
from orchestrator.clouds.preemption_notice import wait_for_notice
from orchestrator.clouds.start_checks import missing_hub_token
from orchestrator.configurations.cells import spec_text, with_cells
from orchestrator.console import print_file, print_result, remark
from orchestrator.estimating.calibration_file import known_constants
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.request import names_in, request_of
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.recipe_choices import with_chosen_recipes
from orchestrator.spec.spec_file import parse_spec, read_spec_text
from orchestrator.storage.run_storage import output_path, run_path


def run_deploy(options: argparse.Namespace) -> int:
    """Write the cluster file of a specification, and print its cost."""
    prices = request_of(PriceOptions, vars(options)).in_use()
    text, _ = spec_text(options.spec)
    spec = parse_spec(text, str(options.spec), base=prices.catalog)
    catalog = prices.over(spec.merged_catalog())
    folder, constants = RunFolder(output_path(None, spec.name)), known_constants(None)
    spec = with_chosen_recipes(spec, folder, catalog, constants, today())
    request = DeploymentRequest(
        provider=options.provider,
        region=options.region,
        spot=options.spot,
        nodes_each=options.max_workers or 1,
        hosts=names_in(options.hosts or ()),
        job=options.job,
        cache_claim=options.cache_claim,
        providers=names_in(options.providers or ()),
    )
    deployed = deployment(request, DeployedSweep(spec, text, str(options.spec), catalog))
    if options.out is None:
        print_file(deployed.text.rstrip("\n"))
    else:
        write_file(options.out, deployed.text)
    for line in (*deployed.left_out, *deployed.bill):
        remark(line)
    remark(deployed.dollars.replace("SPEC", str(options.spec)))
    if (missing := missing_hub_token(deployed.text)) is not None:
        remark(missing)
    remark(f"Prices: {prices.age(catalog, today())}")
    return 0


def run_join_check(options: argparse.Namespace) -> int:
    """Print the resources of this machine's node, if it can do what the key says."""
    if options.head is not None and (mistake := clock_mistake(options.head, now)):
        raise JoinError(mistake)
    prices = request_of(PriceOptions, vars(options)).in_use()
    keys, weights_gib = names_in(options.keys), options.weights_gib or 0.0
    print_result(node_resources(keys, prices.catalog, weights_gib=weights_gib))
    return 0


def run_launch(options: argparse.Namespace) -> int:
    """Sweep on a cluster that is started for the sweep and stopped after it."""
    words = ["sweep", options.spec.name, *options.more]
    # A mistake of usage ends the command here, before the cluster is started.
    swept = build_parser().parse_args(words)
    folder = options.spec.absolute().parent
    text = with_cells(read_spec_text(options.spec), str(options.spec), folder)
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
    wait_for_notice(options.provider, options.metadata, options.node_id)
    return 0
