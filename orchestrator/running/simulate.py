"""Simulated cells of a sweep: traced, replayed and logged like measured ones."""

import logging
from functools import partial

from orchestrator.planning.plan import Plan, trial_task
from orchestrator.run_folder.file_names import PLAN
from orchestrator.running.recorder import ObservationRecorder
from orchestrator.running.session import SweepSession
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import job_of, shorter_lengths
from trials.local_runner import simulate_trials
from trials.records.cell import Cell, by_cell
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces
from trials.trial import TrialTask, next_probe

logger = logging.getLogger(__name__)


def simulate(session: SweepSession, plan: Plan, constants: EfficiencyConstants) -> Plan:
    """Simulate the pending simulated cells of a plan; the plan that is left is written."""
    cells = [cell for cell in plan.pending if cell.simulated]
    if not cells:
        return plan
    models = ", ".join(dict.fromkeys(cell.model for cell in cells))
    text = "%s: tracing %s to simulate %d cells; no GPU runs them"
    logger.info(text, session.folder.path, models, len(cells))
    with session.progress(cells, complete=len(plan.complete)) as progress:
        simulate_trials(
            _tasks(session, cells),
            ObservationRecorder(session.writer, progress),
            Traces(report=progress.remark),
            constants,
            partial(_shorter, session.spec.workload),
        )
    done = {task.cell for task in _tasks(session, cells) if next_probe(task, task.done) is None}
    plan = plan.model_copy(
        update={
            "complete": (*plan.complete, *(cell for cell in cells if cell in done)),
            "pending": tuple(cell for cell in plan.pending if cell not in done),
        }
    )
    session.writer.write(PLAN, plan)
    return plan


def _shorter(workload: Job, cell: Cell) -> tuple[int, ...]:
    """Tokens per example to simulate beside the full length."""
    return shorter_lengths(job_of(workload, cell.recipe, cell.seq_len), cell.seq_len)


def _tasks(session: SweepSession, cells: list[Cell]) -> list[TrialTask]:
    """Trials of cells, by the observations until now."""
    observations = by_cell(session.folder.observations())
    return [trial_task(session.spec, session.catalog, cell, observations[cell]) for cell in cells]
