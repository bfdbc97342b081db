"""Made-up sweeps: specifications, and trials of a device whose memory and time are affine."""

from collections.abc import Sequence
from pathlib import Path

from builders.observations import MIB, environment, measurement
from gpu_catalog.gpu import Gpu
from orchestrator.planning.plan import Plan, trial_task
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.run_folder.run_results import RunResults
from orchestrator.spec.spec_file import parse_spec
from orchestrator.spec.sweep_spec import SweepSpec
from trials.child_process.forked_child import ProbeEnd
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest
from trials.records.observation import Basis, Environment, Observation, Outcome
from trials.run_trial import run_trial

# One cell, with one field per line, so that a test can break any of them.
ONE_CELL = """\
name: made
gpus: [cpu]
cells:
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [16]
workload: {examples: 1000, epochs: 3}
max_batch_size: 64
boundary_repeats: 0
"""
TWO_CELLS = ONE_CELL.replace("[16]", "[16, 32]")
ROUTED = ONE_CELL.replace("llama-tiny", "mixtral-tiny").replace(
    "    seq_lens", "    active_experts: [2]\n    seq_lens"
)
SIMULATED = """\
  - models: [llama-2-7b]
    recipes: [{method: lora, lora_rank: 4, precision: bf16}]
    seq_lens: [64]
    simulated_on: [A40, H100-SXM]
"""


class LineDevice:
    """A prober with affine memory (1 MiB per example) and time (10 ms + 1 ms per example)."""

    def __init__(self, largest: int, where: Environment) -> None:
        self._largest = largest
        self._where = where

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        del fresh
        batch = request.batch_size
        if batch > self._largest:
            return ProbeEnd(Outcome.OUT_OF_MEMORY, "too much", None, self._where)
        seconds = 0.010 + 0.001 * batch
        steps = () if request.timing is None else (seconds,) * 6
        return ProbeEnd(Outcome.FITS, None, measurement(batch * MIB, steps), self._where)


def spec_of(text: str = ONE_CELL) -> SweepSpec:
    """A valid specification."""
    return parse_spec(text, "made.yaml")


def whole_trial(
    cell: Cell,
    spec: SweepSpec,
    *,
    largest: int = 40,
    gpu: Gpu | None = None,
    where: Environment | None = None,
) -> list[Observation]:
    """Observations of a trial of this cell on a device that holds ``largest`` examples."""
    task = trial_task(spec, spec.merged_catalog(), cell, [])
    if gpu is not None:
        task = task.model_copy(update={"gpu": gpu})
    recorded: list[Observation] = []
    run_trial(task, LineDevice(largest, where or environment()), recorded.append)
    return recorded


def made_run(folder: Path, text: str = ONE_CELL, *, measured: int = 1) -> RunFolder:
    """A run folder whose first cells were measured."""
    spec = spec_of(text)
    run = open_run(folder, text, spec)
    with ObservationWriter(run) as writer:
        for cell in spec.all_cells()[:measured]:
            for observation in whole_trial(cell, spec):
                writer.append(observation)
    return run


def results(
    text: str, recorded: list[Observation] | None = None, cells: Sequence[Cell] | None = None
) -> RunResults:
    """Results of a run, by default with observations of every cell."""
    spec = spec_of(text)
    if recorded is None:
        recorded = [o for cell in spec.all_cells() for o in trial(cell, spec)]
    plan = Plan(complete=tuple(cells or spec.all_cells()), pending=(), skipped=())
    return RunResults(spec, spec.merged_catalog(), plan, recorded)


def trial(cell: Cell, spec: SweepSpec) -> list[Observation]:
    """Observations of a trial on an affine device; those of a simulated cell are simulated."""
    recorded = whole_trial(cell, spec, largest=20 if cell.simulated else 40)
    return (
        [o.model_copy(update={"basis": Basis.SIMULATED}) for o in recorded]
        if cell.simulated
        else recorded
    )
