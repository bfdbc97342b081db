"""One trial: asks for probe after probe until the cell is known.

What is next follows from what was observed, and from nothing else, so a trial that died goes on
where its observations end.
"""

import datetime as dt
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from trials.batch_ladder import LadderStep, batch_ladder
from trials.child_process.child_prober import ChildProber, Prober
from trials.child_process.fork_server import ProbeEnd
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest, Setup
from trials.records.model import Model
from trials.records.observation import (
    MEMORY_MISSES,
    Basis,
    Observation,
    Outcome,
    Purpose,
    largest_batch,
)
from trials.records.timing_rule import TimingRule
from trials.search import ProbeResult, search_largest_batch

ATTEMPTS = 3  # a probe that says nothing of memory is tried again in a fresh child, this often
HANGS = 2  # one that hangs, less often: each costs a whole timeout


class TrialTask(Record):
    """Everything a trial needs to know.

    Attributes:
        cell: what to measure.
        model: the model of ``cell.model``.
        gpu: the catalog row of the GPU that runs it, ``cell.device``.
        target: the catalog row of the smaller GPU it stands in for; absent if it does not.
        seed: weights, tokens and the ladder's order are drawn from it.
        batch_limit: the largest batch size to try.
        boundary_repeats: how often the largest batch is tried again, each time in a fresh child
            with other tokens.
        timing: when to stop timing steps.
        build_timeout_seconds: how long building the model may take.
        probe_timeout_seconds: how long one probe may take.
        threads: CPU threads a step may use.
        done: what earlier runs observed of this cell.
        likely_largest: the largest batch that something else speaks for: where the search begins.
        timed: batch sizes to time; absent for all of the ladder's, empty for the largest.
        most_seconds: no probe begins later than this after the trial did; absent for no limit.
        slow_nodes: ids of nodes that are not to be trusted: what was timed there is timed again.
    """

    cell: Cell
    model: Model
    gpu: Gpu
    target: Gpu | None = None
    seed: int
    batch_limit: int
    boundary_repeats: int = 1
    timing: TimingRule
    build_timeout_seconds: float
    probe_timeout_seconds: float
    threads: int = 1
    done: tuple[Observation, ...] = ()
    likely_largest: int | None = None
    timed: tuple[int, ...] | None = None
    most_seconds: float | None = None
    slow_nodes: tuple[str, ...] = ()

    @property
    def memory_guess_bytes(self) -> int:
        """Memory to hold peaks against until a device has told its own."""
        gpu = self.target or self.gpu
        if gpu.usable_memory_bytes is not None:
            return gpu.usable_memory_bytes
        # Of a box with no number on it nothing is known; the search then finds it out by doubling.
        return round((gpu.marketed_memory_gb or 1) * 1e9)

    @property
    def basis(self) -> Basis:
        """What its observations rest on."""
        if self.cell.simulated:
            return Basis.SIMULATED
        return Basis.MEASURED if self.target is None else Basis.CAPPED

    @property
    def setup(self) -> Setup:
        """What the trial's children are told."""
        return Setup(
            cell=self.cell,
            model=self.model,
            gpu=self.gpu,
            memory_cap_bytes=None if self.target is None else self.memory_guess_bytes,
            seed=self.seed,
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """The next probe of a trial."""

    purpose: Purpose
    batch_size: int
    repeat: int


def child_prober(task: TrialTask, timeouts: float = 1.0) -> ChildProber:
    """Answers a trial's probes from children.

    Args:
        task: the trial.
        timeouts: how many times as long as a probe may what is asked take.
    """
    return ChildProber(
        task.setup,
        build_timeout_seconds=task.build_timeout_seconds,
        probe_timeout_seconds=timeouts * task.probe_timeout_seconds,
    )


def next_ask(
    task: TrialTask, observed: Sequence[Observation], given_up: Collection[Ask] = ()
) -> Ask | None:
    """The probe to make next, given all that was observed of the cell; None when it is known.

    The search is replayed over the evidence: where it asks for a batch size nobody has tried, that
    is next. Once it has closed in, the largest batch is tried again, then the ladder's steps
    follow; a trial under a memory cap has no ladder, since its speed is another GPU's. A miss after
    the search is evidence as any other, and reopens it below: nothing from the smallest miss up is
    tried again, but for the repeats that tell how often it misses.

    Args:
        task: what to measure.
        observed: everything observed of the cell.
        given_up: probes that said nothing however often they were tried. A search that meets one
            ends there: the largest batch stays unknown, the ladder goes up to the largest fit.
    """
    pending = _boundary(task, observed, given_up)
    if pending is not None:
        return pending
    largest = _search(task, observed, given_up)
    if isinstance(largest, Ask):
        return largest
    if largest > 0 and task.boundary_repeats > 0 and largest_batch(observed) is not None:
        first = Ask("boundary", largest, 0)
        if first not in given_up and not _tried(observed, first):
            return first
    if task.target is not None:
        return None
    climbed = {
        (o.batch_size, o.repeat)
        for o in observed
        if o.is_timing and (o.environment is None or o.environment.node_id not in task.slow_nodes)
    }
    for step in _visits(task, largest):
        ask = Ask("ladder", step.batch_size, step.repeat)
        if (step.batch_size, step.repeat) not in climbed and ask not in given_up:
            return ask
    return None


def _visits(task: TrialTask, largest: int) -> list[LadderStep]:
    """The ladder's, or those of what is asked for."""
    ladder = batch_ladder(largest, seed_text=f"{task.seed}/{task.cell.key}")
    if task.timed is None or largest == 0:
        return ladder
    wanted = task.timed or (largest,)
    of_ladder = [step for step in ladder if step.batch_size in wanted]
    others = sorted({size for size in wanted if size <= largest} - {s.batch_size for s in ladder})
    return [*of_ladder, *(LadderStep(size, 0) for size in others)]


def _boundary(
    task: TrialTask, observed: Sequence[Observation], given_up: Collection[Ask]
) -> Ask | None:
    """The next repeat of a batch size whose repeats have begun. All are made, misses or not."""
    for batch_size in sorted({o.batch_size for o in observed if o.purpose == "boundary"}):
        for repeat in range(task.boundary_repeats):
            ask = Ask("boundary", batch_size, repeat)
            if ask not in given_up and not _tried(observed, ask):
                return ask
    return None


def _tried(observed: Sequence[Observation], ask: Ask) -> bool:
    """Whether a probe was made and said something of memory."""
    return any(
        (o.purpose, o.batch_size, o.repeat) == (ask.purpose, ask.batch_size, ask.repeat)
        and o.outcome.is_verdict
        for o in observed
    )


def _search(
    task: TrialTask, observed: Sequence[Observation], given_up: Collection[Ask]
) -> int | Ask:
    """The largest batch by the evidence, or the probe that the search asks for next."""
    fits, smallest_miss = _evidence(observed)
    silent = min((ask.batch_size for ask in given_up if ask.purpose == "search"), default=None)
    if silent is not None:
        # Closing in on where it goes silent would cost a timeout for each step.
        return max((batch_size for batch_size in fits if batch_size < silent), default=0)
    largest_fit = max(fits, default=0)
    if task.likely_largest:
        end = task.batch_limit + 1
        unknown = range(largest_fit + 1, min(smallest_miss or end, end))
        for likely in (task.likely_largest, task.likely_largest + 1):
            if likely in unknown:
                return Ask("search", likely, 0)
    limits = [o.memory_limit_bytes for o in observed if o.environment is not None]
    search = search_largest_batch(
        limit=task.batch_limit,
        memory_limit_bytes=limits[-1] if limits else task.memory_guess_bytes,
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
        return largest
    return Ask("search", batch_size, 0)


def _evidence(observed: Sequence[Observation]) -> tuple[dict[int, ProbeResult], int | None]:
    """Readings of the batch sizes known to fit, and the smallest known not to.

    One miss outweighs any number of fits, at its size and above.
    """
    misses = (o.batch_size for o in observed if o.outcome in MEMORY_MISSES)
    smallest_miss = min(misses, default=None)
    fits: dict[int, ProbeResult] = {}
    for observation in observed:
        below = smallest_miss is None or observation.batch_size < smallest_miss
        if observation.outcome is Outcome.FITS and below:
            assert observation.measurement is not None
            peak = observation.measurement.memory.peak_allocated_bytes
            fits.setdefault(observation.batch_size, ProbeResult(fits=True, peak_memory_bytes=peak))
    return fits, smallest_miss


def run_trial(
    task: TrialTask,
    prober: Prober,
    emit: Callable[[Observation], None],
    *,
    node_id: str | None = None,
    keep_going: Callable[[], bool] = lambda: True,
) -> None:
    """Probes until the cell is known, or what is left of it cannot be had.

    A build does not depend on the batch: when so many in a row as a probe has attempts came to
    nothing, those for the rest of the ladder would be waited for in vain.

    Args:
        task: what to measure, and what is known already.
        prober: answers the probes.
        emit: is given each observation as its probe ends.
        node_id: the Ray node this runs on; absent outside a cluster.
        keep_going: is asked before each probe; when it says no the trial ends there.
    """
    observed = list(task.done)
    attempts: dict[Ask, int] = {}
    given_up: set[Ask] = set()
    failed_builds = 0
    until = time.monotonic() + (math.inf if task.most_seconds is None else task.most_seconds)
    while (ask := next_ask(task, observed, given_up)) is not None and keep_going():
        if time.monotonic() > until:
            return
        observation, final = _observe(task, ask, prober, observed, node_id)
        observed.append(observation)
        emit(observation)
        silent = not observation.outcome.is_verdict
        failed_builds = failed_builds + 1 if silent and observation.environment is None else 0
        most = HANGS if observation.outcome is Outcome.TIMED_OUT else ATTEMPTS
        if final or failed_builds >= most:
            return
        attempts[ask] = attempts.get(ask, 0) + 1
        if attempts[ask] >= most and silent:
            given_up.add(ask)


def _observe(
    task: TrialTask,
    ask: Ask,
    prober: Prober,
    observed: Sequence[Observation],
    node_id: str | None,
) -> tuple[Observation, bool]:
    """One probe, and whether trying anything again is pointless."""
    request = ProbeRequest(
        batch_size=ask.batch_size,
        timing=task.timing if ask.purpose == "ladder" else None,
        draw=ask.repeat + 1 if ask.purpose == "boundary" else 0,
    )
    started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    end = prober.probe(request, fresh=ask.purpose == "boundary")
    environment = end.environment
    if environment is not None and node_id is not None:
        environment = environment.model_copy(update={"node_id": node_id})
    earlier = [
        o.attempt
        for o in observed
        if (o.purpose, o.batch_size, o.repeat) == (ask.purpose, ask.batch_size, ask.repeat)
    ]
    observation = Observation(
        cell=task.cell,
        purpose=ask.purpose,
        batch_size=ask.batch_size,
        repeat=ask.repeat,
        attempt=max(earlier, default=0) + 1,
        outcome=end.outcome,
        detail=end.detail,
        basis=task.basis,
        memory_limit_bytes=_limit(task, end),
        batch_limit=task.batch_limit,
        seed=task.seed,
        measurement=end.measurement,
        environment=environment,
        started_at=started_at,
        seconds=round(time.monotonic() - started, 3),
    )
    return observation, end.final


def _limit(task: TrialTask, end: ProbeEnd) -> int:
    return task.memory_guess_bytes if end.memory_limit_bytes is None else end.memory_limit_bytes
