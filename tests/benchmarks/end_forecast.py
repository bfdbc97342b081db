"""Errors of a sweep's forecast of its own end, replayed from the probes of real sweeps.

    python tests/benchmarks/end_forecast.py [RUN]...    without a run, laptop_sweeps.csv
    python tests/benchmarks/end_forecast.py --keep RUN  adds the measured probes of a run to the CSV

A display asks twice a second. Simulated cells are not trials: they are replayed before.
"""

import csv
import datetime as dt
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from orchestrator.markdown_table import table
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.progress import EndedTrials, EndForecast, Pace

KEPT = Path(__file__).with_name("laptop_sweeps.csv")
COLUMNS = ("sweep", "trial", "begun", "seconds")
MOMENTS = (0.1, 0.5, 0.9)  # of the whole sweep
AROUND = 0.05  # before and after each moment
STEP_SECONDS = 0.5


@dataclass(frozen=True)
class Probe:
    """A probe of a trial, in seconds since its sweep began to probe."""

    trial: int
    begun: float
    seconds: float

    @property
    def end(self) -> float:
        """When its result came."""
        return self.begun + self.seconds


def probes_of(run: Path) -> list[Probe]:
    """Measured probes of a run."""
    measured = [o for o in RunFolder(run).observations() if not o.cell.simulated]
    begun = [dt.datetime.fromisoformat(o.started_at) for o in measured]
    numbers = {
        key: number for number, key in enumerate(dict.fromkeys(o.cell.key for o in measured))
    }
    return [
        Probe(numbers[o.cell.key], (at - min(begun)).total_seconds(), o.seconds)
        for o, at in zip(measured, begun, strict=True)
    ]


def kept_sweeps() -> dict[str, list[Probe]]:
    """Probes of the kept sweeps, by name."""
    sweeps: defaultdict[str, list[Probe]] = defaultdict(list)
    with KEPT.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            probe = Probe(int(row["trial"]), float(row["begun"]), float(row["seconds"]))
            sweeps[row["sweep"]].append(probe)
    return dict(sweeps)


def forecasts(probes: Iterable[Probe]) -> tuple[float, list[tuple[float, float | None]]]:
    """Seconds of a sweep, and its forecasts of the end with the second of each."""
    trials: defaultdict[int, list[Probe]] = defaultdict(list)
    for probe in probes:
        trials[probe.trial].append(probe)
    spans = {n: (min(p.begun for p in own), max(p.end for p in own)) for n, own in trials.items()}
    whole = max(end for _, end in spans.values())
    forecast, told = EndForecast(0.0), []
    for tick in range(1, int(whole / STEP_SECONDS)):
        now = tick * STEP_SECONDS
        ended = EndedTrials()
        for n, (a, b) in spans.items():
            if b <= now:
                ended.add(Pace(len(trials[n]), b - a))
        running = [
            Pace(sum(p.end <= now for p in trials[n]), now - a)
            for n, (a, b) in spans.items()
            if a <= now < b
        ]
        left = forecast.seconds_left(now, len(trials), ended, running)
        told.append((now, None if left is None else now + left))
    return whole, told


def errors_at(probes: Iterable[Probe]) -> dict[float, float | None]:
    """Median error of the end around each moment, as a share of the sweep; None before a forecast.

    The error is that of the moment of the end, whichever its sign.
    """
    whole, told = forecasts(probes)
    errors: dict[float, float | None] = {}
    for moment in MOMENTS:
        near = [
            abs(end - whole) / whole
            for now, end in told
            if end is not None and abs(now / whole - moment) <= AROUND
        ]
        errors[moment] = statistics.median(near) if near else None
    return errors


def largest_rise(probes: Iterable[Probe]) -> float:
    """Largest rise of the seconds left from one look to the next, as a share of the sweep."""
    whole, told = forecasts(probes)
    left = [end - now for now, end in told if end is not None]
    return max((b - a for a, b in pairwise(left)), default=0.0) / whole


def main(arguments: list[str]) -> None:
    """Print the errors, or keep a run."""
    if arguments[:1] == ["--keep"]:
        kept = kept_sweeps() if KEPT.exists() else {}
        for run in map(Path, arguments[1:]):
            kept[f"{run.name} {len(kept) + 1}"] = probes_of(run)
        with KEPT.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(COLUMNS)
            for name, probes in kept.items():
                rows.writerows([name, p.trial, p.begun, round(p.seconds, 2)] for p in probes)
        return
    sweeps = {Path(run).name: probes_of(Path(run)) for run in arguments} or kept_sweeps()
    text = table(
        ("sweep", "trials", "minutes", *(f"error at {m:.0%}" for m in MOMENTS), "largest rise"),
        [
            (
                name,
                len({probe.trial for probe in probes}),
                f"{max(probe.end for probe in probes) / 60:.1f}",
                *(
                    "no forecast" if error is None else f"{error:.0%}"
                    for error in errors_at(probes).values()
                ),
                f"{largest_rise(probes):.0%}",
            )
            for name, probes in sweeps.items()
        ],
    )
    sys.stdout.write(f"Forecasts of the end of a sweep, as a share of the whole\n\n{text}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
