"""Options that say which offers are meant: to rank, or as which a sweep's nodes are rented."""

import argparse

from orchestrator.parsing import above_zero


def add_constraints(command: argparse.ArgumentParser) -> None:
    """Which offers are wanted."""
    add = command.add_argument
    add("--deadline", type=above_zero, metavar="HOURS", help="leave out what takes longer")
    add("--budget-usd", type=above_zero, metavar="USD", help="leave out what costs more")
    _add_offers(command, "of these alone", "spot instances alone, or none (default: both)")
    add(
        "--single-gpu-instances",
        action="store_true",
        help="none whose other GPUs would be paid for in vain",
    )


def _add_offers(command: argparse.ArgumentParser, providers: str, spot: str) -> None:
    """Which offers are meant, and what for."""
    add = command.add_argument
    add("--providers", metavar="A,B", help=providers)
    add("--regions", metavar="A,B", help="alike, in the provider's own words")
    add("--spot", action=argparse.BooleanOptionalAction, help=spot)


def add_rented(command: argparse.ArgumentParser) -> None:
    """What the nodes are rented as, on which trials run."""
    _add_offers(
        command,
        "your nodes are rented of these: what the sweep costs is counted by the cheapest of their "
        "offers, unless a node itself says what it is (default: as the run has it, else of any)",
        "your nodes are spot instances, or none is (default: the cheaper of both)",
    )
