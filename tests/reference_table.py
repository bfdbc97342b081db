"""Write the tables of ``docs/explanation/trainer-reference.md``: our step beside the trainers'.

Every cell is trained, measured and simulated once, which takes about ten minutes a table.
"""

import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from fakes.torch_process import small_steps
from trainer_reference.cells import (
    COMPARED,
    COMPARED_ADAPTERS,
    COMPARED_FOREACH,
    COMPARED_OFFLOADED,
    COMPARED_QUANTISED,
    PACKED,
    PREFERENCE,
    PREFERENCE_ROUTERS,
    ROUTERS,
    UPDATES,
    ReferenceCell,
)

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "trainer-reference.md"
COLUMNS = ("combinations", "measured peak", "simulated peak", "losses")


class Differences(NamedTuple):
    """Relative differences from the trainer: of both peaks, and the largest of ten losses."""

    measured: float
    simulated: float
    loss: float


TABLES: dict[str, tuple[tuple[str, ...], tuple[ReferenceCell, ...]]] = {
    "table": (("method", "precision", "loss"), COMPARED),
    "quantisation": (("quantisation", "kbit_preparation", "precision"), COMPARED_QUANTISED),
    "adapters": (("adapters", "method", "precision", "loss"), COMPARED_ADAPTERS),
    "foreach": (("method", "precision"), COMPARED_FOREACH),
    "offloading": (("method", "precision", "loss"), COMPARED_OFFLOADED),
    "preference": (("task", "reference", "method", "precision"), PREFERENCE),
    "grpo": (("generation_share", "reference", "method", "precision"), UPDATES),
    "packing": (("packing", "attention", "method", "precision"), PACKED),
    "routers": (("model", "task", "loss", "method", "precision"), ROUTERS + PREFERENCE_ROUTERS),
}
"""Axes and cells of each table by its name."""


def main() -> None:
    """Write the tables that the arguments name, or all of them."""
    for name in sys.argv[1:] or TABLES:
        write_table(name, *TABLES[name])


def write_table(name: str, axes: tuple[str, ...], cells: tuple[ReferenceCell, ...]) -> None:
    """Compare cells and write the largest differences of each group of axes."""
    from trainer_reference.models import write_model  # noqa: PLC0415 - imports torch and TRL

    groups: defaultdict[tuple[str, ...], list[Differences]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, small_steps():
        for model in sorted({cell.model for cell in cells}):
            write_model(model, Path(folder))
        for cell in cells:
            differences = compared(cell, Path(folder))
            groups[tuple(_value(cell, axis) for axis in axes)].append(differences)
            print(cell.key, differences, file=sys.stderr, flush=True)  # noqa: T201 - progress
    columns = (*axes, *COLUMNS)
    header = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    table = "".join(_row(values, group) for values, group in groups.items())
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    PAGE.write_text(f"{before}{begin}\n{header}{table}\n{end}{rest.partition(end)[2]}", "utf-8")


def _value(cell: ReferenceCell, axis: str) -> str:
    value = getattr(cell, axis)
    if isinstance(value, bool):
        return ("off", "on")[value]
    return "none" if value is None else str(value)


def compared(cell: ReferenceCell, folder: Path) -> Differences:
    """Train ten steps by the trainer and by the project, and simulate the step."""
    from trainer_reference.comparison import train_both  # noqa: PLC0415 - as above
    from trainer_reference.project import simulated_peak  # noqa: PLC0415 - as above

    run, peak_bytes, losses = train_both(cell, folder)
    return Differences(
        measured=peak_bytes / run.peak_bytes - 1,
        simulated=simulated_peak(cell, folder) / run.peak_bytes - 1,
        loss=max(
            0.0 if ours == theirs else abs(ours / theirs - 1)
            for ours, theirs in zip(losses, run.losses, strict=True)
        ),
    )


def _row(axes: tuple[str, ...], group: list[Differences]) -> str:
    loss = max(d.loss for d in group)
    worst = (
        f"{max((d.measured for d in group), key=abs):+.2%}",
        f"{max((d.simulated for d in group), key=abs):+.2%}",
        f"{loss:.0e}" if loss else "equal",
    )
    return f"| {' | '.join((*axes, str(len(group)), *worst))} |\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
