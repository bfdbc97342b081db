"""One trial: its input, and the next probe of its cell by the observations until now.

The next probe follows from the observations alone, so a trial that died continues where its
observations end.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from trials.batch_ladder import LadderStep, batch_ladder
from trials.drawn_lengths import DrawnLengths, next_size, sizes_to_try
from trials.records.cell import Cell
from trials.records.messages import Setup
from trials.records.model import Model
from trials.records.observation import (
    FITS,
    MEMORY_MISSES,
    Basis,
    Observation,
    Outcome,
    Purpose,
    fits_always,
    largest_batch,
    surviving_batch,
)
from trials.records.timing_rule import TimingRule
from trials.search import LikelyLargest, ProbeResult, search_largest_batch

ATTEMPTS = 3  # attempts at a probe without a verdict on memory, each in a fresh child
HANGS = 2  # attempts at a probe that hangs: each costs a whole timeout


class TrialTask(Record):
    """Input of a trial.

    Attributes:
        model: the model of ``cell.model``.
        gpu: catalog row of the GPU that runs it, ``cell.device``.
        target: catalog row of the smaller GPU that ``gpu`` stands in for; absent otherwise.
        seed: seed of weights, tokens and the ladder's order.
        boundary_repeats: number of further probes of the largest batch, each in a fresh child with
            other tokens.
        drawn: lengths of the job's examples, to find the largest batch that survives them; absent
            for batches of the cell's length alone.
        timing: when to stop timing steps.
        build_timeout_seconds: longest time to build the model.
        probe_timeout_seconds: longest time of one probe.
        threads: CPU threads a step may use.
        done: earlier observations of this cell.
        likely_largest: estimate of the largest batch from another source; the search begins by it.
        timed: batch sizes to time; absent for the whole ladder, empty for the largest alone.
        most_seconds: no probe starts later than this after the start of the trial; absent for no
            limit.
        slow_nodes: ids of slow nodes: batch sizes timed there are timed again.
        linked: ids of nodes on which the links of as many GPUs were timed together.
    """

    cell: Cell
    model: Model
    gpu: Gpu
    target: Gpu | None = None
    seed: int
    batch_limit: int
    boundary_repeats: int = 1
    drawn: DrawnLengths | None = None
    timing: TimingRule
    build_timeout_seconds: float
    probe_timeout_seconds: float
    threads: int = 1
    done: tuple[Observation, ...] = ()
    likely_largest: LikelyLargest | None = None
    timed: tuple[int, ...] | None = None
    most_seconds: float | None = None
    slow_nodes: tuple[str, ...] = ()
    linked: tuple[tuple[str, ...], ...] = ()

    @property
    def memory_guess_bytes(self) -> int:
        """Memory limit in bytes by the catalog, until the device itself reports it."""
        return round(self._memory_bytes * (1 - (self.cell.recipe.generation_share or 0.0)))

    @property
    def _memory_bytes(self) -> int:
        gpu = self.target or self.gpu
        if gpu.usable_memory_bytes is not None:
            return gpu.usable_memory_bytes
        # Without any figure a guess of 1 GB sends the search to doubling.
        return round((gpu.marketed_memory_gb or 1) * 1e9)

    @property
    def basis(self) -> Basis:
        """Basis of its observations."""
        if self.cell.simulated:
            return Basis.SIMULATED
        return Basis.MEASURED if self.target is None else Basis.CAPPED

    def times_link(self, node_ids: Sequence[str]) -> bool:
        """Whether the links between its GPUs on these nodes are still to be timed."""
        is_several = self.cell.ranks > 1 and not self.cell.simulated
        return is_several and {*node_ids} not in map(set, self.linked)

    @property
    def setup(self) -> Setup:
        """First message to the fork server of its children."""
        return Setup(
            cell=self.cell,
            model=self.model,
            gpu=self.gpu,
            memory_cap_bytes=None if self.target is None else self._memory_bytes,
            seed=self.seed,
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True)
class PlannedProbe:
    """Purpose, batch size and repeat of a probe to make."""

    purpose: Purpose
    batch_size: int
    repeat: int


def next_probe(
    task: TrialTask, observed: Sequence[Observation], given_up: Collection[PlannedProbe] = ()
) -> PlannedProbe | None:
    """Next probe of a cell by its observations; None when the trial is complete.

    The search is replayed over the observations; the first batch size it requests that no probe
    has tried is next. After the search come the repeats of the largest batch, the search for the
    largest that survives drawn lengths, then the steps of the ladder up to it. A trial under a
    memory cap has no ladder, since its speed is that of another GPU. A miss after the search
    reopens the search below it: no batch size from the smallest miss up is tried again, except for
    the repeats, which measure how often it misses.

    Args:
        task: input of the trial.
        observed: all observations of the cell.
        given_up: probes without a verdict after all their attempts. A search that reaches one ends
            there: the largest batch stays unknown, and the ladder ends at the largest fit.
    """
    pending = _boundary(task, observed, given_up)
    if pending is not None:
        return pending
    largest = _search(task, observed, given_up)
    if not isinstance(largest, PlannedProbe) and largest_batch(observed) is not None:
        largest = _confirmed(task, largest, observed, given_up)
    if isinstance(largest, PlannedProbe):
        return largest
    if task.target is not None:
        return None
    climbed = {
        (o.batch_size, o.repeat)
        for o in observed
        if o.is_timing and not nodes_of(o) & {*task.slow_nodes}
    }
    for step in _visits(task, largest, observed):
        planned = PlannedProbe("ladder", step.batch_size, step.repeat)
        if (step.batch_size, step.repeat) not in climbed and planned not in given_up:
            return planned
    return None


def nodes_of(o: Observation) -> set[str]:
    """Ids of the Ray nodes of a probe, as far as it reports them; empty outside a cluster."""
    ranks = () if o.measurement is None else o.measurement.ranks
    first = None if o.environment is None else o.environment.node_id
    if not ranks:
        return set() if first is None else {first}
    return {node for node in (first, *(rank.node_id for rank in ranks)) if node is not None}


def _visits(task: TrialTask, largest: int, observed: Sequence[Observation]) -> list[LadderStep]:
    """Visits of the ladder, or of the batch sizes that the task names, below every miss.

    Where the whole effective batch is the largest, smaller ones may have missed.
    """
    _, miss = _evidence([o for o in observed if o.batch_size != largest])
    visits = _planned_visits(task, largest)
    return [v for v in visits if v.batch_size == largest or miss is None or v.batch_size < miss]


def _planned_visits(task: TrialTask, largest: int) -> list[LadderStep]:
    ladder = batch_ladder(
        largest,
        seed_text=f"{task.seed}/{task.cell.key}",
        effective_batch=task.cell.rank_recipe.effective_batch,
    )
    if task.timed is None or largest == 0:
        return ladder
    wanted = task.timed or (largest,)
    of_ladder = [step for step in ladder if step.batch_size in wanted]
    others = sorted({size for size in wanted if size <= largest} - {s.batch_size for s in ladder})
    return [*of_ladder, *(LadderStep(size, 0) for size in others)]


def _confirmed(
    task: TrialTask,
    largest: int,
    observed: Sequence[Observation],
    given_up: Collection[PlannedProbe],
) -> int | PlannedProbe:
    """Largest batch that survives drawn lengths too, or the next probe that confirms the largest.

    A probe without a verdict ends the search for the surviving batch at what survived until then.
    """
    first = PlannedProbe("boundary", largest, 0)
    is_due = largest > 0 and task.boundary_repeats > 0 and first not in given_up
    if is_due and not _has_verdict(observed, first):
        return first
    if task.drawn is None:
        return largest
    drawn = [o for o in observed if o.is_drawn and o.outcome.is_verdict]
    survived = {o.batch_size: o.outcome is Outcome.FITS for o in drawn}
    size = next_size(sizes_to_try(task.cell.recipe, largest), survived)
    if size is not None and not any(probe.purpose == "drawn" for probe in given_up):
        return PlannedProbe("drawn", size, 0)
    surviving = surviving_batch(drawn)
    return largest if surviving is None else min(surviving, largest)


def _boundary(
    task: TrialTask, observed: Sequence[Observation], given_up: Collection[PlannedProbe]
) -> PlannedProbe | None:
    """Next repeat of a batch size whose repeats have begun; misses do not end them."""
    for batch_size in sorted({o.batch_size for o in observed if o.purpose == "boundary"}):
        for repeat in range(task.boundary_repeats):
            planned = PlannedProbe("boundary", batch_size, repeat)
            if planned not in given_up and not _has_verdict(observed, planned):
                return planned
    return None


def _has_verdict(observed: Sequence[Observation], planned: PlannedProbe) -> bool:
    """Whether a probe was made and ended with a verdict on memory."""
    return any(
        o.batch_size == planned.batch_size
        and (o.purpose, o.repeat) == (planned.purpose, planned.repeat)
        and o.outcome.is_verdict
        for o in observed
    )


def _search(
    task: TrialTask, observed: Sequence[Observation], given_up: Collection[PlannedProbe]
) -> int | PlannedProbe:
    """Largest batch by the observations, or the next probe of the search."""
    whole = task.cell.rank_recipe.whole_batch(task.batch_limit)
    whole_fits = fits_always(observed, whole)
    if whole is not None and whole_fits:
        return whole
    fits, smallest_miss = _evidence(observed)
    silent = min((p.batch_size for p in given_up if p.purpose == "search"), default=None)
    if silent is not None:
        # Each further step towards a probe without a verdict could cost another timeout.
        return max((batch_size for batch_size in fits if batch_size < silent), default=0)
    largest_fit = max(fits, default=0)
    limits = [o.memory_limit_bytes for o in observed if o.environment is not None]
    search = search_largest_batch(
        limit=task.batch_limit,
        memory_limit_bytes=limits[-1] if limits else task.memory_guess_bytes,
        estimate=task.likely_largest,
    )
    try:
        batch_size = next(search)
        while batch_size <= largest_fit or (
            smallest_miss is not None and batch_size >= smallest_miss
        ):
            implied = ProbeResult(fits=batch_size <= largest_fit)
            batch_size = search.send(fits.get(batch_size, implied))
    except StopIteration as closed:
        largest: int = closed.value
        if whole is not None and whole_fits is None:
            return PlannedProbe("search", whole, 0)
        return largest
    return PlannedProbe("search", batch_size, 0)


def _evidence(observed: Sequence[Observation]) -> tuple[dict[int, ProbeResult], int | None]:
    """Results of the batch sizes that fit, by batch size, and the smallest one that does not.

    One miss outweighs any number of fits at its size and above.
    """
    observed = [o for o in observed if not o.is_drawn]
    misses = (o.batch_size for o in observed if o.outcome in MEMORY_MISSES)
    smallest_miss = min(misses, default=None)
    fits: dict[int, ProbeResult] = {}
    for observation in observed:
        below = smallest_miss is None or observation.batch_size < smallest_miss
        memory = observation.memory
        if observation.outcome is FITS and below and memory is not None:
            peak = memory.peak_allocated_bytes
            fits.setdefault(observation.batch_size, ProbeResult(fits=True, peak_memory_bytes=peak))
    return fits, smallest_miss


def probe_after(task: TrialTask, new: Sequence[Observation]) -> PlannedProbe | None:
    """Next probe of a running trial; None when it is complete.

    Args:
        task: input of the trial.
        new: observations since it began.
    """
    outcomes: defaultdict[PlannedProbe, list[Outcome]] = defaultdict(list)
    for o in new:
        outcomes[PlannedProbe(o.purpose, o.batch_size, o.repeat)].append(o.outcome)
    given_up = {
        probe
        for probe, ends in outcomes.items()
        if not ends[-1].is_verdict and len(ends) >= most_attempts(ends[-1])
    }
    return next_probe(task, [*task.done, *new], given_up)


def most_attempts(outcome: Outcome) -> int:
    """Attempts at a probe whose last one ended so."""
    return HANGS if outcome is Outcome.TIMED_OUT else ATTEMPTS
