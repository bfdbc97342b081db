"""Instances with several GPUs, which an estimate that names no GPU looks at too."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from orchestrator.estimating.choosing.layouts import STRATEGIES, StrategyOption, on_layout
from orchestrator.estimating.choosing.recipe_choice import Estimating, fits, for_comparison
from orchestrator.estimating.estimate import by_objective
from orchestrator.estimating.estimate_records import Box, Estimated
from orchestrator.estimating.question import EstimateError, Question, obstacle
from trials.recipes.parallel import Parallel

COUNTS = (2, 4, 8)
"""Numbers of GPUs to look at beside one."""
WEIGHTS_ON_HOST = ("parameters", "all")

OnLayouts = Callable[[Sequence[tuple[Question, Sequence[Gpu]]]], list[Estimated]]
"""Estimates the best recipe of each question, which has a layout, on each of its GPUs."""


@dataclass(frozen=True, slots=True)
class BoxSearch:
    """Choice of the number of GPUs of each kind, among one and those that instances have.

    Attributes:
        strategy: strategies to try.
        layouts: layouts of a number of GPUs by these; raises EstimateError where they have none.
        catalog: catalog with the offers.
        estimated_jobs: estimates questions on GPUs.
        best_on: estimates the best recipe of each layout on its GPUs.
    """

    strategy: StrategyOption
    layouts: Callable[[int], Iterable[Parallel | None]]
    catalog: Catalog
    estimated_jobs: Estimating
    best_on: OnLayouts

    def best(self, rows: Sequence[Estimated], question: Question) -> list[Estimated]:
        """The best number of each GPU; the largest one that was tried where no GPU does.

        Where one GPU suffices, its recipe is copied to each of the others (``ddp``), which takes no
        further trace. Where it does not, weights, gradients and optimizer state are divided
        (``fsdp2``), if as many GPUs, or the host, can hold the weights at all.

        Args:
            rows: estimates of one GPU of each kind.
            question: the question of one GPU.

        Raises:
            TraceError: the model cannot be traced under a recipe.
        """
        copies = "ddp" in STRATEGIES[self.strategy]
        jobs = [
            (job, row.gpu)
            for row in rows
            for count in (_offered(row.gpu, question, self.catalog) if copies and fits(row) else ())
            if (job := _on(for_comparison(row.question), _copied(count))) is not None
            and obstacle(job, row.gpu) is None
        ]
        boxes = self.estimated_jobs(jobs) if jobs else []
        tight = [row for row in rows if not (copies and fits(row))]
        shards = [
            (job, gpus)
            for count in COUNTS
            for layout in self._sharded(count)
            if (gpus := self._holding(tight, layout, question))
            and (job := _on(question, layout)) is not None
        ]
        boxes += self.best_on(shards) if shards else []
        groups = _by_gpu([*rows, *boxes])
        best = list(map(_best, groups))
        if not any(map(fits, best)):  # changes are looked for on the largest number
            best = [max(group, key=lambda row: row.estimate.gpus) for group in groups]
        return [self._with_draws(row, question) for row in best]

    def _sharded(self, count: int) -> list[Parallel]:
        """Layouts of so many GPUs that divide the training; none where they cannot."""
        try:
            every = self.layouts(count)
        except EstimateError:
            return []
        return [layout for layout in every if layout is not None and layout.is_sharded]

    def _holding(
        self, rows: Iterable[Estimated], layout: Parallel, question: Question
    ) -> list[Gpu]:
        """GPUs of which an instance has as many as a layout, and as hold the weights."""
        return [
            row.gpu
            for row in rows
            if layout.gpus in _offered(row.gpu, question, self.catalog)
            and (layout.offload in WEIGHTS_ON_HOST or could_hold(row, layout.gpus))
        ]

    def _with_draws(self, row: Estimated, question: Question) -> Estimated:
        """The estimate of a copied recipe with the draws that it was compared without."""
        draws = question.draws_lengths, question.routing_draws
        if (row.question.draws_lengths, row.question.routing_draws) == draws:
            return row
        lengths, routings = draws
        whole = replace(row.question, draws_lengths=lengths, routing_draws=routings)
        (drawn,) = self.estimated_jobs([(whole, row.gpu)])
        kept = {"boxes": row.estimate.boxes, "alternatives": row.estimate.alternatives}
        return replace(drawn, estimate=drawn.estimate.model_copy(update=kept))


def _copied(count: int) -> Parallel:
    return Parallel(gpus=count, strategy="ddp")


def _offered(gpu: Gpu, question: Question, catalog: Catalog) -> list[int]:
    """Numbers of GPUs that some allowed instance has."""
    allowed = filter(question.constraints.allows, catalog.offers(gpu.key))
    numbers = {offer.gpus_per_instance for offer in allowed}
    return [count for count in COUNTS if count in numbers]


def _on(question: Question, layout: Parallel) -> Question | None:
    """The question on a layout; None where it would train with another effective batch."""
    try:
        shared = on_layout(question, layout, question.batch_limit)
    except EstimateError:
        return None
    same = shared.recipe.effective_batch == question.recipe.effective_batch
    return shared if same and question.recipe.effective_batch is not None else None


def could_hold(row: Estimated, gpus: int) -> bool:
    """Whether so many GPUs together have room for the weights of an estimate for one."""
    return row.weights_gib / gpus < row.estimate.usable_gib


def numbers_tried(rows: Iterable[Estimated], question: Question) -> list[int]:
    """Numbers of GPUs that share the effective batch under some strategy of these estimates."""
    estimates = [row.estimate for row in rows]
    others = {box.strategy for estimate in estimates for box in estimate.boxes}
    used = {estimate.strategy for estimate in estimates} | others
    strategies = [strategy for strategy in used if strategy is not None]
    shared = (
        count
        for count in COUNTS
        if any(_on(question, Parallel(gpus=count, strategy=one)) is not None for one in strategies)
    )
    return [1, *shared]


def _by_gpu(rows: Iterable[Estimated]) -> list[list[Estimated]]:
    groups: dict[str, list[Estimated]] = defaultdict(list)
    for row in rows:
        groups[row.gpu.key].append(row)
    return list(groups.values())


def _best(group: Sequence[Estimated]) -> Estimated:
    """Best number of a GPU, with the others that fit as its boxes.

    It is the best by the objective of those that fit and have a price; without any, one GPU if it
    fits.
    """

    def order(row: Estimated) -> tuple[float, ...]:
        has_price = row.estimate.price is not None
        return (not fits(row), not has_price, *(by_objective(row) if has_price else ()))

    best = min(group, key=order)  # of equals the first, which is one GPU
    boxes = tuple(
        Box(
            gpus=row.estimate.gpus,
            strategy=row.estimate.strategy,
            hours=row.estimate.hours,
            usd=None if row.estimate.price is None else row.estimate.price.usd,
        )
        for row in sorted(group, key=lambda row: row.estimate.gpus)
        if row is not best and fits(row)
    )
    return replace(best, estimate=best.estimate.model_copy(update={"boxes": boxes}))
