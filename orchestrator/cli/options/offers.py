"""Options that choose offers: providers, regions, markets, deadline and budget."""

import argparse

from orchestrator.cli.options.value_types import above_zero


def add_constraints(command: argparse.ArgumentParser) -> None:
    """Add the constraints on the offers of a job."""
    add = command.add_argument
    add(
        "--deadline",
        type=above_zero,
        metavar="HOURS",
        help="exclude offers on which the job takes longer",
    )
    add(
        "--budget-usd",
        type=above_zero,
        metavar="USD",
        help="exclude offers on which the job costs more",
    )
    _add_offers(
        command,
        "only offers of these providers",
        "only offers in these regions, as the provider names them",
        "only spot instances, or only on-demand instances (default: both)",
    )
    add(
        "--single-gpu-instances",
        action="store_true",
        help="exclude instances with several GPUs, whose other GPUs would idle",
    )


def add_rented(command: argparse.ArgumentParser) -> None:
    """Add the offers that the nodes of a sweep are rented from."""
    _add_offers(
        command,
        "providers of your nodes; the sweep is priced at their cheapest offer, unless a node names "
        "its own (default: as stored in the run, else any)",
        "regions of your nodes, as the provider names them (default: as stored in the run, else "
        "any)",
        "whether your nodes are spot instances (default: the cheaper market)",
    )


def _add_offers(command: argparse.ArgumentParser, providers: str, regions: str, spot: str) -> None:
    add = command.add_argument
    add("--providers", metavar="A,B", help=providers)
    add("--regions", metavar="A,B", help=regions)
    add("--spot", action=argparse.BooleanOptionalAction, help=spot)
