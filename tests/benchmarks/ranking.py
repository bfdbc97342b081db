"""The ranking: coverage of its intervals, its probabilities, and its speed against plain pandas.

Prints Markdown, after a minute on two cores.
"""

import datetime as dt
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders.observations import environment, measurement, observation

from fitting.families.cell_step_time import StepTimeSource
from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from orchestrator.markdown_table import table
from orchestrator.planning.plan import Plan
from orchestrator.ranking.priced_cells import RankingInputs
from orchestrator.ranking.priced_job import job_hours
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.ranking.ranking import rank
from orchestrator.spec.job import NO_OVERHEADS, Job
from trials.batch_ladder import batch_ladder
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.observation import Observation

SWEEPS = 2000
GPUS = 3
STEPS = 10
LARGEST = 40
NOTED = dt.date(2026, 9, 22)
TODAY = dt.date(2026, 11, 21)
DRIFT = 0.02  # of a price in 30 days
JOB = Job(
    examples=15_000,
    epochs=10,
    overheads=NO_OVERHEADS.model_copy(update={"price_drift": DRIFT}),
)
FULL = Recipe(method="full", precision="bf16", attention="sdpa")
WHERE = environment()


def gpu(number: int) -> Gpu:
    """Device without further facts."""
    key = f"gpu{number}"
    return Gpu(key=key, kind="cpu", usable_memory_bytes=10**9, source="made", recorded=NOTED)


def offer(number: int, usd_per_hour: float, instance: int = 0) -> Offer:
    """Offer of a device."""
    return Offer(
        gpu=f"gpu{number}",
        provider="made",
        region="here",
        instance=f"i{instance}",
        usd_per_hour=usd_per_hour,
        recorded=NOTED,
        source="made",
    )


def cell(number: int, seq_len: int = 128) -> Cell:
    """Cell on a device."""
    return Cell(gpu=f"gpu{number}", model="llama-tiny", recipe=FULL, seq_len=seq_len)


def visits(
    timed_cell: Cell, floor: float, slope: float, spread: float, random: np.random.Generator
) -> Iterator[Observation]:
    """Visits of a ladder. Each has an error of its own, and each step one of 1 %."""
    for step in batch_ladder(LARGEST, seed_text=""):
        visit = (floor + slope * step.batch_size) * np.exp(random.normal(0, spread))
        seconds = tuple((visit * np.exp(random.normal(0, 0.01, STEPS))).tolist())
        yield observation(
            step.batch_size,
            cell=timed_cell,
            purpose="ladder",
            repeat=step.repeat,
            environment=WHERE,
            measurement=measurement(step_seconds=seconds),
        )


def ranked(catalog: Catalog, plan: Plan, observations: Sequence[Observation]) -> Ranking:
    """Rank the job without laws."""
    return rank(RankingInputs(JOB, catalog, plan, StepTimeSource(observations, ()), today=TODAY))


def calibration() -> tuple[float, list[tuple[float, float, int]]]:
    """Coverage of the 90 % intervals of dollars, and predicted against true probabilities."""
    random = np.random.default_rng(1)
    sigma = DRIFT * math.sqrt((TODAY - NOTED).days / 30)
    held: list[bool] = []
    predicted: list[float] = []
    true: list[bool] = []
    for _ in range(SWEEPS):
        spread = 10 ** random.uniform(-2.3, -1.4)  # 0.5 to 4 %
        slopes = 1e-3 * np.exp(random.normal(0, 0.04, GPUS))
        floors = slopes * random.uniform(0, 20, GPUS)
        cells = [cell(number) for number in range(GPUS)]
        catalog = Catalog(
            [gpu(number) for number in range(GPUS)],
            [offer(number, 1.0 + number * 1e-9) for number in range(GPUS)],
        )
        observations = [
            visit
            for timed_cell, floor, slope in zip(cells, floors, slopes, strict=True)
            for visit in visits(timed_cell, floor, slope, spread, random)
        ]
        plan = Plan(complete=tuple(cells), pending=(), skipped=())
        rows = ranked(catalog, plan, observations).offers
        paid = np.exp(random.normal(0, sigma, GPUS))
        truth = []
        for row in rows:
            number = cells.index(row.cell)
            seconds = floors[number] + slopes[number] * row.batch_size
            truth.append(job_hours(JOB, row.batch_size, seconds) * row.usd_per_hour * paid[number])
        for row, usd in zip(rows, truth, strict=True):
            held.append(row.usd_low <= usd <= row.usd_high)
            predicted.append(row.probability_cheapest)
            true.append(usd == min(truth))
    edges = np.array([0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 1.0000001])
    bins = np.digitize(predicted, edges)
    reliability = [
        (
            float(np.mean(np.array(predicted)[in_bin])),
            float(np.mean(np.array(true)[in_bin])),
            int(in_bin.sum()),
        )
        for number in range(1, len(edges))
        if (in_bin := bins == number).any()
    ]
    return float(np.mean(held)), reliability


def large() -> tuple[Catalog, Plan, list[Observation]]:
    """Ten thousand observations of 10 devices at 125 lengths, and five hundred offers."""
    random = np.random.default_rng(2)
    cells = [cell(number, 64 + length) for length in range(125) for number in range(10)]
    observations = [
        visit
        for timed_cell in cells
        for visit in visits(
            timed_cell, 0.01, 1e-3 * (1 + int(timed_cell.gpu[3:]) / 10), 0.01, random
        )
    ]
    offers = [
        offer(number, float(random.uniform(0.3, 5)), instance)
        for number in range(10)
        for instance in range(50)
    ]
    catalog = Catalog([gpu(number) for number in range(10)], offers)
    return catalog, Plan(complete=tuple(cells), pending=(), skipped=()), observations


def plain(catalog: Catalog, observations: Sequence[Observation]) -> pd.DataFrame:
    """Rank with plain pandas: medians, the fastest batch, and a join with the offers.

    There are no intervals, probabilities or front.
    """
    frame = pd.DataFrame(
        {
            "gpu": [o.cell.gpu for o in observations],
            "seq_len": [o.cell.seq_len for o in observations],
            "batch": [o.batch_size for o in observations],
            "seconds": [o.measurement.step_seconds for o in observations if o.measurement],
        }
    ).explode("seconds")
    frame["seconds"] = frame["seconds"].astype(float)
    medians = frame.groupby(["gpu", "seq_len", "batch"], as_index=False)["seconds"].median()
    medians["rate"] = medians["batch"] / medians["seconds"]
    best = medians.loc[medians.groupby(["gpu", "seq_len"])["rate"].idxmax()]
    offers = pd.DataFrame([(o.gpu, o.instance, o.usd_per_hour) for o in catalog.all_offers])
    offers.columns = pd.Index(["gpu", "instance", "usd"])
    joined = best.merge(offers, on="gpu")
    steps = np.ceil(JOB.examples / joined["batch"]) * JOB.epochs
    joined["hours"] = steps * joined["seconds"] / 3600
    joined["cost"] = joined["hours"] * joined["usd"]
    return joined.sort_values(["seq_len", "cost"])


def same(ranking: Ranking, frame: pd.DataFrame) -> bool:
    """Whether both rankings have the same cheapest offers, at the same cost."""
    ours = {row.cell.seq_len: row.usd for row in ranking.offers if row.rank == 1}
    theirs = frame.groupby("seq_len")["cost"].min().to_dict()
    return ours.keys() == theirs.keys() and all(
        abs(usd / theirs[length] - 1) < 1e-9 for length, usd in ours.items()
    )


def main() -> None:
    """Print the tables."""
    held, reliability = calibration()
    say = sys.stdout.write
    say(f"{held:.1%} of the 90 % intervals contain the true value ({SWEEPS} synthetic sweeps).\n\n")
    rows = [(f"{predicted:.1%}", f"{true:.1%}", count) for predicted, true, count in reliability]
    say(table(("predicted probability", "was", "offers"), rows) + "\n\n")
    catalog, plan, observations = large()
    started = time.perf_counter()
    ranking = ranked(catalog, plan, observations)
    ours = time.perf_counter() - started
    started = time.perf_counter()
    frame = plain(catalog, observations)
    theirs = time.perf_counter() - started
    assert same(ranking, frame)
    rows = [
        ("ranking, with intervals, odds and the front", f"{ours:.2f} s", "1.00"),
        ("pandas, without", f"{theirs:.2f} s", f"{theirs / ours:.2f}"),
    ]
    count = f"{len(observations):,} observations, {len(ranking.offers):,} offers of jobs"
    headers = (count, "took", "/")
    say(table(headers, rows) + "\n")


if __name__ == "__main__":
    main()
