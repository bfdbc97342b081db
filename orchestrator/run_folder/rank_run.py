"""A run's ranking for another job, other prices or other constraints."""

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fitting.families.cell_step_time import Batch, StepTimeSource
from fitting.families.fit_family import fit_families
from fitting.families.records import FamilyFit
from fitting.learning_curves import curves
from orchestrator.planning.plan import Plan
from orchestrator.planning.slow_nodes import SlowNode, slow_nodes
from orchestrator.pricing.offer_options import OfferOptions
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.ranking.epochs_needed import EpochsByCell, EpochsError, learned_epochs
from orchestrator.ranking.job_lengths import of_drawn_lengths
from orchestrator.ranking.priced_cells import RankingInputs
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.ranking.ranking import rank
from orchestrator.request import BatchOption, PathText
from orchestrator.run_folder.learning_log import learned_file, learned_in
from orchestrator.run_folder.plan_and_prices import plan_of, run_and_prices
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.spec.job_options import (
    AUTO,
    JobOptions,
    OverheadOptions,
    changed_job,
    with_overheads,
)
from trials.records.log_reader import LineReader
from trials.records.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """Options of a ranking; absent ones are the specification's own."""

    run: PathText
    batch_size: BatchOption | None = None
    learned: Path | None = None
    job: JobOptions
    overheads: OverheadOptions
    offers: OfferOptions
    prices: PriceOptions

    @property
    def is_of_own_job(self) -> bool:
        """Whether no option changes the job, its batch size or the offers: reports rank these."""
        given = self.batch_size, self.job, self.overheads, self.offers
        return given == (None, JobOptions(), OverheadOptions(), OfferOptions())


@dataclass(frozen=True, slots=True)
class RankedRun:
    """A ranking, the run's slow nodes, and the age of the prices in use."""

    ranking: Ranking
    slow_nodes: list[SlowNode]
    prices: str


def rank_run(request: RankRequest, today: dt.date) -> RankedRun:
    """Price a job on every offer, by what a run measured. Nothing is written.

    Raises:
        UserError: there is no run, a file cannot be read, or options are wrong.
    """
    folder = RunFolder.existing(request.run)
    prices, spec = run_and_prices(folder, request.prices)
    catalog = prices.over(spec.merged_catalog())
    job = changed_job(spec.workload, request.job, tuple(spec.models.values()))
    job = with_overheads(request.overheads, job)
    batch: Batch = request.batch_size or job.batch_size or "fastest"
    cells = spec.all_cells()
    observations = folder.observations(LineReader(brief=cells, cells=cells))
    slow = slow_nodes(observations)  # before the ranking, which fills the memory
    plan = plan_of(folder, spec, observations)
    inputs = RankingInputs(
        job,
        catalog,
        plan,
        StepTimeSource(
            of_drawn_lengths(observations, job, spec.workload),
            _families(observations),
        ),
        batch_wish=batch,
        constraints=request.offers.constraints(catalog),
        today=today,
        epochs=_learned(request, folder, plan),
        seed=spec.seed,
        run=str(folder.path),
    )
    return RankedRun(rank(inputs), slow, prices.age(catalog, today))


def _families(observations: Sequence[Observation]) -> Iterator[FamilyFit]:
    """Laws of the step time, fitted when the first is looked up."""
    yield from fit_families(observations)


def _learned(request: RankRequest, folder: RunFolder, plan: Plan) -> EpochsByCell | None:
    """Epochs of each cell by training curves; None unless they are asked for."""
    learned = request.learned
    if request.job.epochs != AUTO:
        if learned is not None:
            raise EpochsError(f"--learned {learned}: goes with --epochs auto: add it")
        return None
    cells = (*plan.complete, *plan.pending, *(skip.cell for skip in plan.skipped))
    epochs = learned_in(folder) if learned is None else learned_file(learned)
    return learned_epochs(cells, curves(epochs), str(learned or folder.path))
