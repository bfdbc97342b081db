"""Write the table of ``docs/explanation/trainer-reference.md``: our step beside SFTTrainer's.

Every cell is trained, measured and simulated once, which takes about ten minutes.
"""

import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from fakes.torch_process import small_steps
from trainer_reference.cells import COMPARED, ReferenceCell

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "trainer-reference.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEADER = (
    "| method | precision | loss | combinations | measured peak | simulated peak | losses |\n"
    "|---|---|---|---|---|---|---|\n"
)


class Differences(NamedTuple):
    """Relative differences from the trainer: of both peaks, and the largest of ten losses."""

    measured: float
    simulated: float
    loss: float


def main() -> None:
    """Compare every cell and write the largest differences of each method, precision and loss."""
    from trainer_reference.models import write_model  # noqa: PLC0415 - imports torch and TRL

    groups: defaultdict[tuple[str, str, str], list[Differences]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, small_steps():
        write_model("llama", Path(name))
        for cell in COMPARED:
            differences = compared(cell, Path(name))
            groups[cell.method, cell.precision, cell.loss].append(differences)
            print(cell.key, differences, file=sys.stderr, flush=True)  # noqa: T201 - progress
    table = "".join(_row(axes, group) for axes, group in groups.items())
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{HEADER}{table}\n{END}{after}", "utf-8")


def compared(cell: ReferenceCell, folder: Path) -> Differences:
    """Train ten steps by the trainer and by the project, and simulate the step."""
    from trainer_reference.project import measure, simulated_peak  # noqa: PLC0415 - as above
    from trainer_reference.trainer import train  # noqa: PLC0415 - as above

    run = train(cell, folder)
    counter, losses = measure(cell, folder, run)
    return Differences(
        measured=counter.peak_bytes / run.peak_bytes - 1,
        simulated=simulated_peak(cell, folder) / run.peak_bytes - 1,
        loss=max(abs(ours / theirs - 1) for ours, theirs in zip(losses, run.losses, strict=True)),
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
