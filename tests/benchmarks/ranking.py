"""The ranking: whether its intervals and odds hold, and how fast it is beside plain pandas.

Prints Markdown. A minute on two cores.
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
from trials.records.cell import Cell
from trials.records.observation import Observation
from trials.records.recipe import Recipe

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
    """A device of no other facts."""
    key = f"gpu{number}"
    return Gpu(key=key, kind="cpu", usable_memory_bytes=10**9, source="made", recorded=NOTED)


def offer(number: int, usd_per_hour: float, instance: int = 0) -> Offer:
    """Of a device."""
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
    """On a device."""
    return Cell(gpu=f"gpu{number}", model="llama-tiny", recipe=FULL, seq_len=seq_len)


def visits(
    of: Cell, floor: float, slope: float, spread: float, random: np.random.Generator
) -> Iterator[Observation]:
    """A ladder's, each off by its own, and each step by 1 %."""
    for step in batch_ladder(LARGEST, seed_text=""):
        visit = (floor + slope * step.batch_size) * np.exp(random.normal(0, spread))
        seconds = tuple((visit * np.exp(random.normal(0, 0.01, STEPS))).tolist())
        yield observation(
            step.batch_size,
            cell=of,
            purpose="ladder",
            repeat=step.repeat,
            environment=WHERE,
            measurement=measurement(step_seconds=seconds),
        )


def ranked(catalog: Catalog, plan: Plan, observations: Sequence[Observation]) -> Ranking:
    """The ranking of the job, without laws."""
    return rank(RankingInputs(JOB, catalog, plan, StepTimeSource(observations, ()), today=TODAY))


def calibration() -> tuple[float, list[tuple[float, float, int]]]:
    """How often the 90 % interval of an offer's dollars holds the truth; told against true odds."""
    random = np.random.default_rng(1)
    sigma = DRIFT * math.sqrt((TODAY - NOTED).days / 30)
    held: list[bool] = []
    told: list[float] = []
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
        seen = [
            each
            for of, floor, slope in zip(cells, floors, slopes, strict=True)
            for each in visits(of, floor, slope, spread, random)
        ]
        plan = Plan(complete=tuple(cells), pending=(), skipped=())
        rows = ranked(catalog, plan, seen).offers
        paid = np.exp(random.normal(0, sigma, GPUS))
        truth = []
        for row in rows:
            number = cells.index(row.cell)
            seconds = floors[number] + slopes[number] * row.batch_size
            truth.append(job_hours(JOB, row.batch_size, seconds) * row.usd_per_hour * paid[number])
        for row, usd in zip(rows, truth, strict=True):
            held.append(row.usd_low <= usd <= row.usd_high)
            told.append(row.probability_cheapest)
            true.append(usd == min(truth))
    edges = np.array([0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 1.0000001])
    bins = np.digitize(told, edges)
    reliability = [
        (float(np.mean(np.array(told)[of])), float(np.mean(np.array(true)[of])), int(of.sum()))
        for number in range(1, len(edges))
        if (of := bins == number).any()
    ]
    return float(np.mean(held)), reliability


def large() -> tuple[Catalog, Plan, list[Observation]]:
    """Ten thousand observations, five hundred offers: 10 devices at 125 lengths."""
    random = np.random.default_rng(2)
    cells = [cell(number, 64 + length) for length in range(125) for number in range(10)]
    seen = [
        each
        for of in cells
        for each in visits(of, 0.01, 1e-3 * (1 + int(of.gpu[3:]) / 10), 0.01, random)
    ]
    offers = [
        offer(number, float(random.uniform(0.3, 5)), instance)
        for number in range(10)
        for instance in range(50)
    ]
    catalog = Catalog([gpu(number) for number in range(10)], offers)
    return catalog, Plan(complete=tuple(cells), pending=(), skipped=()), seen


def plain(catalog: Catalog, seen: Sequence[Observation]) -> pd.DataFrame:
    """What one would write for the purpose: medians, the fastest batch, a join with the offers.

    No intervals, no odds, no front.
    """
    frame = pd.DataFrame(
        {
            "gpu": [o.cell.gpu for o in seen],
            "seq_len": [o.cell.seq_len for o in seen],
            "batch": [o.batch_size for o in seen],
            "seconds": [o.measurement.step_seconds for o in seen if o.measurement],
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
    """Whether both have the same cheapest offers, at the same cost."""
    ours = {row.cell.seq_len: row.usd for row in ranking.offers if row.rank == 1}
    theirs = frame.groupby("seq_len")["cost"].min().to_dict()
    return ours.keys() == theirs.keys() and all(
        abs(usd / theirs[length] - 1) < 1e-9 for length, usd in ours.items()
    )


def main() -> None:
    """Prints the tables."""
    held, reliability = calibration()
    say = sys.stdout.write
    say(f"{held:.1%} of the 90 % intervals hold the truth, over {SWEEPS} made-up sweeps.\n\n")
    rows = [(f"{told:.1%}", f"{true:.1%}", count) for told, true, count in reliability]
    say(table(("told to be the cheapest", "was", "offers"), rows) + "\n\n")
    catalog, plan, seen = large()
    started = time.perf_counter()
    ranking = ranked(catalog, plan, seen)
    ours = time.perf_counter() - started
    started = time.perf_counter()
    frame = plain(catalog, seen)
    theirs = time.perf_counter() - started
    assert same(ranking, frame)
    rows = [
        ("ranking, with intervals, odds and the front", f"{ours:.2f} s", "1.00"),
        ("pandas, without", f"{theirs:.2f} s", f"{theirs / ours:.2f}"),
    ]
    headers = (f"{len(seen):,} observations, {len(ranking.offers):,} offers of jobs", "took", "/")
    say(table(headers, rows) + "\n")


if __name__ == "__main__":
    main()
