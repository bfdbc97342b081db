"""Fit the speeds of links between GPUs to times of collectives that others measured.

    .venv/bin/python tests/benchmarks/link_speeds.py FOLDER

FOLDER is ``data/profiling/network`` of microsoft/vidur, with a folder of tables for each machine.
Writes the rows of these machines to gpu_catalog/data/links.csv and every few of the times to
tests/data/collectives.csv. Prints the errors of sizes that were left out of the fit: a fifth at a
time, and all above half the largest.
"""

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fitting.timed_collective import TimedCollective
from gpu_catalog.catalog import shipped_rows
from gpu_catalog.gpu import Interconnect
from gpu_catalog.links.within_nodes import FILE, Link, MeasuredLink
from orchestrator.markdown_table import table

ROOT = Path(__file__).resolve().parents[2]
TABLE, EXTRACT = ROOT / "gpu_catalog" / "data" / FILE, ROOT / "tests" / "data" / "collectives.csv"
SOURCE = "microsoft/vidur@7d47513 (MIT), fit of its all-reduce table of"
RECORDED = "2026-11-29"
LEAST_MB, JUDGED_MB = 1.0, 4.0
"""Buffers of the fits, as ``trials.ranks.collective_times`` has them, and those of the errors."""
PARTS = 5
KEPT_SIZES = 48  # of each machine and number of GPUs in the extract
NUMBERS = set(MeasuredLink.model_fields) - {"gpu", "interconnect"}
COLUMNS = (
    *("interconnect", "gpus", "collective", "alpha_us", "small_mb", "small_gb_per_second"),
    *("bus_gb_per_second", "source", "recorded"),
)
HEADER = ("machine", "gpus", "buffer_bytes", "microseconds")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with its name in vidur, its GPUs in words and their link."""

    folder: str
    gpus: str
    interconnect: Interconnect


MACHINES = (
    Machine("a100_dgx", "A100 in a DGX", "nvlink-switch-3"),
    Machine("h100_dgx", "H100 in a DGX", "nvlink-switch-4"),
    Machine("a100_pairwise_nvlink", "A100 in pairs joined by NVLink", "nvlink-pair-3"),
    Machine("h100_pairwise_nvlink", "H100 in pairs joined by NVLink", "nvlink-pair-4"),
)


def times_of(folder: Path, machine: Machine) -> Iterator[TimedCollective]:
    """Times of a machine within one node, a number of GPUs after the other.

    vidur names GPUs of a node and of all nodes, has milliseconds, and repeats some sizes.
    """
    with (folder / machine.folder / "all_reduce.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            (int(row["num_workers"]), int(row["size"]), row["time_stats.all_reduce.median"])
            for row in csv.DictReader(file)
            if row["rank"] == "0" and row["num_workers"] == row["devices_per_node"]
        ]
    for gpus in sorted({row[0] for row in rows}):
        of_these = [row for row in rows if row[0] == gpus and row[1] >= 1e6 * LEAST_MB]
        sizes = np.array([float(size) for _, size, _ in of_these])
        seconds = np.array([1e-3 * float(text) for _, _, text in of_these])
        yield TimedCollective(machine.folder, gpus, "all-reduce", sizes, seconds)


def in_digits(value: object) -> object:
    """Value of a table, numbers in three digits."""
    return f"{float(f'{value:.3g}'):g}" if isinstance(value, float) else value


def table_row(machine: Machine, link: MeasuredLink) -> Link:
    """Row of the shipped table."""
    facts = {
        "interconnect": machine.interconnect,
        "source": f"{SOURCE} {link.gpus} {machine.gpus}",
        "recorded": RECORDED,
    }
    numbers = {name: in_digits(value) for name, value in link.model_dump(include=NUMBERS).items()}
    return Link.model_validate({**facts, **numbers})


def extract_of(timed: TimedCollective) -> Iterator[tuple[object, ...]]:
    """Rows of some of the times, at sizes of about equal ratios."""
    order = np.argsort(timed.sizes, kind="stable")
    sizes = timed.sizes[order]
    wanted = np.geomspace(sizes[0], sizes[-1], KEPT_SIZES)
    for i in order[np.unique(np.searchsorted(sizes, wanted))].tolist():
        yield timed.gpu, timed.gpus, int(timed.sizes[i]), round(1e6 * float(timed.seconds[i]), 1)


def csv_text(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as a CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def errors_of_larger(timed: TimedCollective) -> np.ndarray:
    """Errors of buffers above half the largest, by a fit to the others."""
    is_larger = timed.sizes > timed.sizes.max() / 2
    link = timed.only(~is_larger).link()
    assert link is not None
    return timed.only(is_larger).errors(link)


def errors_row(timed: TimedCollective, row: Link) -> tuple[str, ...]:
    """Median errors of sizes held out, by both forms, too; of the shipped row; of larger sizes."""
    held_out = (
        timed.held_out_errors(fit, PARTS)
        for fit in (
            TimedCollective.link,
            TimedCollective.with_one_bandwidth,
            TimedCollective.with_two_bandwidths,
        )
    )
    shipped = timed.errors(MeasuredLink(gpu=timed.gpu, **row.model_dump(include=NUMBERS)))
    is_judged = timed.sizes >= 1e6 * JUDGED_MB
    errors = [one[is_judged] for one in (*held_out, shipped)] + [errors_of_larger(timed)]
    medians = [f"{100 * float(np.median(one)):.1f} %" for one in errors]
    return timed.gpu, str(timed.gpus), str(len(timed.sizes)), *medians


def main() -> None:
    """Write table and extract, and print the errors as Markdown."""
    rows, extract, lines = [], [], []
    for machine in MACHINES:
        for timed in times_of(Path(sys.argv[1]), machine):
            link = timed.link()
            assert link is not None
            rows.append(table_row(machine, link))
            extract += extract_of(timed)
            lines.append(errors_row(timed, rows[-1]))
    rows += [
        row for row in shipped_rows(Link, FILE) if not row.source.startswith("microsoft/vidur")
    ]
    values = [[in_digits(getattr(row, name)) for name in COLUMNS] for row in rows]
    TABLE.write_text(csv_text(COLUMNS, values), encoding="utf-8")
    EXTRACT.write_text(csv_text(HEADER, extract), encoding="utf-8")
    header = (
        "machine",
        "GPUs",
        "times",
        "held out",
        "one bandwidth",
        "two",
        "shipped row",
        "larger",
    )
    sys.stdout.write(f"{table(header, lines)}\n")


if __name__ == "__main__":
    main()
