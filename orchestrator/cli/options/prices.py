"""Options that choose GPUs and prices."""

import argparse
from pathlib import Path


def add_catalog(command: argparse.ArgumentParser) -> None:
    """Add the user's own catalog."""
    command.add_argument(
        "--catalog",
        type=Path,
        metavar="FILE",
        help="YAML or TOML file of your own GPUs and offers, added to the catalog",
    )


def add_prices(command: argparse.ArgumentParser) -> None:
    """Add the user's own catalog and prices."""
    add_catalog(command)
    command.add_argument(
        "--prices",
        action="append",
        metavar="TABLE|FILE",
        help="a price table: refreshed (the default once it exists), shipped or paper; or a CSV or "
        "YAML file of your own prices, which replace those of the table; repeatable",
    )
