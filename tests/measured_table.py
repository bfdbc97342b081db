"""The README's table of what was measured on which GPU, made from the observations that are kept.

`make check` fails when the README says something else; `measured_table.py --write` writes it anew.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_catalog.catalog import load_catalog
from orchestrator.markdown_table import table
from trials.records.cell import Cell
from trials.records.model import find_model, presets
from trials.records.observation import Observation, Outcome, largest_batch
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "tests" / "data" / "measured"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
COMPARED_HEADERS = ("cell", "batch", "peak measured", "simulated", "step measured", "simulated")
HEADERS = ("GPU", "model", "recipe", "experts", "tokens", "largest batch", "examples/s", "when")


def observations(folder: Path) -> list[Observation]:
    """Every observation of every kept run."""
    return [
        Observation.model_validate_json(line)
        for file in sorted(folder.glob("*/observations.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def measured_block(seen: Sequence[Observation]) -> str:
    """What the README says: a row per cell, then the models that no GPU has run."""
    by_cell: defaultdict[Cell, list[Observation]] = defaultdict(list)
    for o in seen:
        by_cell[o.cell].append(o)
    parts = []
    if by_cell:
        parts.append(table(HEADERS, [_row(cell, of) for cell, of in by_cell.items()]))
    compared = [row for cell, of in by_cell.items() for row in _compared(cell, of)]
    if compared:
        parts.append("Measured against simulated, at the largest batch that was timed:")
        parts.append(table(COMPARED_HEADERS, compared))
    ran = {cell.model for cell, of in by_cell.items() if any(o.measurement for o in of)}
    never = [name for name in presets() if name not in ran and not name.endswith("-tiny")]
    if never:
        parts.append(f"Models that this project has not yet run on a GPU: {', '.join(never)}.")
    return "\n\n".join(parts) + "\n"


def _row(cell: Cell, seen: Sequence[Observation]) -> tuple[object, ...]:
    known = largest_batch(seen)
    speeds = [
        o.batch_size / statistics.median(o.measurement.step_seconds)
        for o in seen
        if o.outcome is Outcome.FITS and o.measurement is not None and o.measurement.step_seconds
    ]
    return (
        cell.gpu if cell.capped_on is None else f"{cell.gpu}, as if on {cell.capped_on}",
        cell.model,
        cell.recipe.key,
        "none" if cell.experts is None else f"{cell.active_experts} of {cell.experts}",
        cell.seq_len,
        "not known" if known is None else known[0],
        f"{max(speeds):.3g}" if speeds else "not measured",
        max(o.started_at for o in seen)[:10],
    )


def _compared(cell: Cell, seen: Sequence[Observation]) -> Iterator[tuple[object, ...]]:
    """Peak and step time of a cell's largest timed batch, as measured and as simulated."""
    gpu = load_catalog().gpu(cell.gpu)
    timed = [
        (o.batch_size, o.measurement)
        for o in seen
        if o.outcome is Outcome.FITS and o.measurement is not None and o.measurement.step_seconds
    ]
    if gpu.kind != "cuda" or cell.capped_on is not None or not timed:
        return
    batch_size, measured = max(timed, key=lambda each: each[0])
    simulated = SimulatedCell(cell, find_model(cell.model), Traces())
    peak = simulated.without_limit(batch_size, gpu).peak_allocated_bytes
    seconds = simulated.step_time(batch_size, gpu, EfficiencyConstants()).seconds
    measured_peak = measured.memory.peak_allocated_bytes
    measured_seconds = statistics.median(measured.step_seconds)
    yield (
        cell.key,
        batch_size,
        f"{measured_peak / 2**30:.2f} GiB",
        f"{peak / 2**30:.2f} GiB ({peak / measured_peak - 1:+.1%})",
        f"{measured_seconds:.3g} s",
        f"{seconds:.3g} s ({seconds / measured_seconds - 1:+.0%})",
    )


def main() -> int:
    """Checks the README, or writes it."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.stderr.write(f"README.md: the lines {BEGIN.strip()} and {END.strip()} are missing\n")
        return 1
    wanted = f"{before}{BEGIN}{measured_block(observations(MEASURED))}{END}{after}"
    if "--write" in sys.argv[1:]:
        readme.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        sys.stderr.write(
            "README.md: the table of measured GPUs is not that of tests/data/measured: write it "
            "with tests/measured_table.py --write\n"
        )
        return 1
    sys.stdout.write("README.md: the table of measured GPUs is that of tests/data/measured\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
