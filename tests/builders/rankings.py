"""Three made-up devices at three prices, their step times and their ranking."""

import datetime as dt
from dataclasses import replace

from builders.observations import measurement, observation
from builders.runs import ONE_CELL, spec_of
from fitting.families.cell_step_time import StepTimeSource
from fitting.families.fit_family import fit_families
from fitting.families.records import FamilyFit
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.pricing.offer_constraints import Constraints
from orchestrator.ranking.epochs_needed import EpochsByCell
from orchestrator.ranking.priced_cells import NO_CONSTRAINTS, RankingInputs
from orchestrator.ranking.ranked_offer import RankedOffer, Ranking
from orchestrator.ranking.ranking import rank
from orchestrator.spec.job import NO_OVERHEADS, Job
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.observation import Observation, Outcome

# Three devices of the user: two with offers, one without.
OWN_ROWS = """\
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
    - {key: lap, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
    - {key: attic, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
  offers:
    - {gpu: desk, provider: pit, region: here, instance: whole, gpus_per_instance: 4,
       usd_per_hour: 7.2, source: me, recorded: 2026-01-31, as_of: 2025-12-24}
    - {gpu: desk, provider: pit, region: there, instance: single, usd_per_hour: 3.6, market: spot,
       source: me, recorded: 2026-01-31}
    - {gpu: lap, provider: pub, region: here, instance: slow, usd_per_hour: 0.9, source: me,
       recorded: 2026-01-31}
"""
TEXT = ONE_CELL.replace("[cpu]", "[desk, lap, attic]") + OWN_ROWS
SPEC = spec_of(TEXT)
DESK, LAP, ATTIC = SPEC.all_cells()
JOB = Job(examples=1000, epochs=3, overheads=NO_OVERHEADS)


def timed(batch_size: int, *seconds: float, cell: Cell = DESK, **changed: object) -> Observation:
    """A probe on the ladder with these step times."""
    values: dict[str, object] = {
        "purpose": "ladder",
        "measurement": measurement(step_seconds=seconds),
        "cell": cell,
    }
    return observation(batch_size, **(values | changed))


def limit_probes(
    largest: int, cell: Cell = DESK, outcome: Outcome = Outcome.OUT_OF_MEMORY
) -> list[Observation]:
    """Probes that show the largest batch size: a fit and a miss one above it."""
    fit = [observation(largest, cell=cell)] if largest else []
    return [*fit, observation(largest + 1, outcome, cell=cell)]


def ranked(
    observations: list[Observation],
    job: Job = JOB,
    *,
    spec: SweepSpec = SPEC,
    families: tuple[FamilyFit, ...] | None = None,
    plan: Plan | None = None,
    today: dt.date | None = None,
    epochs: EpochsByCell | None = None,
    constraints: Constraints = NO_CONSTRAINTS,
) -> Ranking:
    """Ranking of a specification's cells, by default with laws fitted to the observations."""
    catalog = spec.merged_catalog()
    plan = plan or make_plan(spec, catalog, ClusterResources((Node({"CPU": 1.0}),)), observations)
    step_times = StepTimeSource(
        observations, fit_families(observations) if families is None else families
    )
    inputs = RankingInputs(job, catalog, plan, step_times, constraints=constraints)
    ranking = rank(replace(inputs, today=today, epochs=epochs))
    # Its rows are not validated when they are made.
    text = ranking.model_dump_json()
    assert Ranking.model_validate_json(text).model_dump_json() == text
    return ranking


def job_at(batch_size: int) -> Job:
    """The job at a given batch size."""
    return JOB.model_copy(update={"batch_size": batch_size})


def on_desk(ranking: Ranking) -> RankedOffer:
    """The cheapest offer of the desk; all of its offers have the same throughput."""
    rows = [row for row in ranking.offers if row.cell == DESK]
    assert len({row.examples_per_second for row in rows}) == 1
    return rows[0]


def exclusion_reason(ranking: Ranking, cell: Cell = DESK) -> str:
    """Reason why a cell is excluded."""
    (reason,) = [excluded.reason for excluded in ranking.excluded if excluded.cell == cell]
    assert not [row for row in ranking.offers if row.cell == cell]
    return reason


def two_gpus(desk: float, lap: float, **changed: object) -> list[Observation]:
    """Desk at $3.6/h and lap at $0.9/h, both timed at batch size 8, in seconds."""
    return [
        *limit_probes(8),
        timed(8, *6 * [desk], **changed),
        *limit_probes(8, LAP),
        timed(8, *6 * [lap], cell=LAP, **changed),
    ]
