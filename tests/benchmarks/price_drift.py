"""How far prices of GPUs move in a month: the same offers on two days of a public daily record.

The record is github:toolshedlabs-hash/gpu-price-feed, data/history/v2: the lowest on-demand price
per GPU and hour of each provider, on 2026-07-23 and 2026-10-01. gpuhunt publishes dated catalogs,
too; they are not part of its package.
"""

import csv
import datetime as dt
import math
import sys
from collections import defaultdict
from pathlib import Path

from gpu_catalog.live_prices.price_checks import MARKETPLACES
from orchestrator.markdown_table import table
from orchestrator.pricing.price_drift import A_MONTH

PAIRS = Path(__file__).with_name("price_pairs.csv")
FIRST, LAST = dt.date(2026, 7, 23), dt.date(2026, 10, 1)
DAYS = (LAST - FIRST).days


def moves() -> dict[tuple[bool, bool], list[float]]:
    """Change of the logarithm of each price, by whether it is a marketplace's and Blackwell's."""
    groups: defaultdict[tuple[bool, bool], list[float]] = defaultdict(list)
    with PAIRS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = row["provider"] in MARKETPLACES, row["newest"] == "yes"
            ratio = float(row["usd_2026_10_01"]) / float(row["usd_2026_07_23"])
            groups[key].append(math.log(ratio))
    return dict(groups)


def monthly_drift(changes: list[float]) -> float:
    """Standard deviation of the logarithm of a price after a month, as of a random walk."""
    mean_square = sum(change**2 for change in changes) / len(changes)
    return math.sqrt(mean_square * A_MONTH / DAYS)


def main() -> None:
    """Print the estimates."""
    rows = [
        (
            "marketplace" if market else "price list",
            "Blackwell" if newest else "older",
            len(changes),
            f"{monthly_drift(changes):.1%}",
            f"{math.exp(sum(changes) / len(changes)) - 1:+.1%}",
            f"{math.exp(max(changes)) - 1:+.0%}",
        )
        for (market, newest), changes in sorted(moves().items())
    ]
    headers = ("offers", "GPUs", "number", "drift in 30 days", "mean change", "largest rise")
    sys.stdout.write(f"Prices per GPU on {FIRST} and {LAST}\n\n{table(headers, rows)}\n")


if __name__ == "__main__":
    main()
