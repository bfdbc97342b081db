"""Adaptive sweeps: how often they choose the cheapest GPU, and how much they measure.

Each synthetic world has four devices with random step times; a sweep starts with only their prices.
"""

import contextlib
import io
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_scheduling_adaptive import PRICES, Device, adaptive, chosen, swept

from orchestrator.markdown_table import table
from trials.batch_ladder import batch_ladder

WORLDS = 100
LIMIT = 64  # of the search


def main() -> None:
    """Print the table."""
    random = np.random.default_rng(20261121)
    right, visits, whole, regrets = 0, 0, 0, []
    for _ in range(WORLDS):
        world: dict[str, Device | None] = {}
        costs = {}
        for key, usd in PRICES.items():
            largest = int(random.integers(4, 200))
            slope = 10 ** random.uniform(-3, -2) / usd**0.8  # expensive ones are mostly faster
            floor = slope * random.uniform(0, 10)
            world[key] = Device(largest, floor, slope)
            most = min(largest, LIMIT)
            costs[key] = usd * (floor / most + slope)
            whole += len(batch_ladder(most, seed_text=""))
        with contextlib.redirect_stderr(io.StringIO()):
            observations, _ = swept(adaptive(), world)
        regret = costs[chosen(observations).leader.cell.gpu] / min(costs.values()) - 1
        regrets.append(regret)
        right += regret <= 0.01
        visits += sum(o.purpose == "ladder" for o in observations)
    rows = [
        ("chose the cheapest, or within 1 % of it", f"{right} of {WORLDS}"),
        ("more expensive than the cheapest, at most", f"{max(regrets):.1%}"),
        (
            "timed batches, of those of a full sweep",
            f"{visits / WORLDS:.1f} of {whole / WORLDS:.1f}",
        ),
    ]
    sys.stdout.write(table(("adaptive sweep", "result"), rows) + "\n")


if __name__ == "__main__":
    main()
