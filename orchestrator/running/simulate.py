"""Simulated cells of a sweep: traced, replayed and logged like measured ones."""

from functools import partial

from orchestrator.console import remark
from orchestrator.planning.plan import Plan, trial_task
from orchestrator.run_folder.file_names import PLAN
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.progress import Progress
from orchestrator.running.recorder import ObservationRecorder
from orchestrator.spec.job_tokens import shorter_lengths
from orchestrator.spec.sweep_spec import SweepSpec
from trials.local_runner import simulate_trials
from trials.records.observation import by_cell
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces
from trials.trial import next_ask


def simulate(
    folder: RunFolder,
    writer: ObservationWriter,
    spec: SweepSpec,
    plan: Plan,
    constants: EfficiencyConstants,
) -> Plan:
    """Simulates what is to be simulated and is not known yet; the plan that is left."""
    cells = [cell for cell in plan.pending if cell.simulated]
    if not cells:
        return plan
    models = ", ".join(dict.fromkeys(cell.model for cell in cells))
    remark(f"{folder.path}: tracing {models} to simulate {len(cells)} cells; no GPU runs them")
    catalog, seen = spec.merged_catalog(), folder.observations()
    known = by_cell(seen)
    tasks = [trial_task(spec, catalog, cell, known[cell]) for cell in cells]
    with Progress(cells, complete=len(plan.complete), known=seen) as progress:
        lengths = partial(shorter_lengths, spec.workload)
        simulate_trials(
            tasks,
            ObservationRecorder(writer, progress),
            Traces(tell=progress.remark),
            constants,
            lengths,
        )
    known = by_cell(folder.observations())
    done = {
        cell
        for cell in cells
        if next_ask(task := trial_task(spec, catalog, cell, known[cell]), task.done) is None
    }
    plan = plan.model_copy(
        update={
            "complete": (*plan.complete, *(cell for cell in cells if cell in done)),
            "pending": tuple(cell for cell in plan.pending if cell not in done),
        }
    )
    writer.write(PLAN, plan)
    return plan
