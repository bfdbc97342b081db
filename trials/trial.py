"""One trial: asks for probe after probe until the cell is known.

What is next follows from what was observed, and from nothing else, so a trial that died goes on
where its observations end.
"""

import datetime as dt
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from trials.child import Prober
from trials.ladder import batch_ladder
from trials.observation import Basis, Observation, Outcome, Purpose
from trials.probe import ProbeRequest
from trials.search import Reading, search_largest_batch
from trials.timing import TimingRule
from trials.workload import Cell

ATTEMPTS = 3  # a probe that FAILED is tried again in a fresh child; then the trial gives up


class TrialTask(Record):
    """Everything a trial needs to know.

    Attributes:
        cell: what to measure.
        gpu: the catalog row of ``cell.gpu``; its usable memory bounds the search.
        seed: weights, tokens and the ladder's order are drawn from it.
        batch_limit: the largest batch size to try.
        timing: when to stop timing steps.
        build_timeout_seconds: how long building the model may take.
        probe_timeout_seconds: how long one probe may take.
        done: what earlier runs observed of this cell.
    """

    cell: Cell
    gpu: Gpu
    seed: int
    batch_limit: int
    timing: TimingRule
    build_timeout_seconds: float
    probe_timeout_seconds: float
    done: tuple[Observation, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """The next probe of a trial."""

    purpose: Purpose
    batch_size: int
    repeat: int


def next_ask(task: TrialTask, observed: Sequence[Observation]) -> Ask | None:
    """The probe to make next, given all that was observed of the cell; None when it is known.

    The search is replayed over the evidence: where it asks for a batch size nobody has tried, that
    is next. Once it has closed in, the ladder's steps follow. A miss on the ladder is evidence as
    any other, and reopens the search below it: nothing from the smallest miss up is tried again.
    """
    fits, smallest_miss = _evidence(observed)
    assert task.gpu.usable_memory_bytes is not None
    search = search_largest_batch(
        limit=task.batch_limit, memory_limit_bytes=task.gpu.usable_memory_bytes
    )
    try:
        batch_size = next(search)
        while batch_size in fits or (smallest_miss is not None and batch_size >= smallest_miss):
            batch_size = search.send(
                fits.get(batch_size, Reading(fits=False, peak_memory_bytes=None))
            )
    except StopIteration as closed:
        largest: int = closed.value
    else:
        return Ask("search", batch_size, 0)
    climbed = {
        (o.batch_size, o.repeat)
        for o in observed
        if o.purpose == "ladder" and o.outcome is Outcome.FITS
    }
    for step in batch_ladder(largest, seed_text=f"{task.seed}/{task.cell.key}"):
        if (step.batch_size, step.repeat) not in climbed:
            return Ask("ladder", step.batch_size, step.repeat)
    return None


def _evidence(observed: Sequence[Observation]) -> tuple[dict[int, Reading], int | None]:
    """Readings of the batch sizes known to fit, and the smallest known not to.

    One miss outweighs any number of fits, at its size and above.
    """
    misses = (o.batch_size for o in observed if o.outcome.is_verdict and o.measurement is None)
    smallest_miss = min(misses, default=None)
    fits: dict[int, Reading] = {}
    for observation in observed:
        below = smallest_miss is None or observation.batch_size < smallest_miss
        if observation.measurement is not None and below:
            peak = observation.measurement.peak_memory_bytes
            reading = Reading(fits=True, peak_memory_bytes=peak)
            fits.setdefault(observation.batch_size, reading)
    return fits, smallest_miss


def run_trial(
    task: TrialTask,
    prober: Prober,
    emit: Callable[[Observation], None],
    *,
    node_id: str | None = None,
) -> None:
    """Probes until the cell is known, or one probe has FAILED as often as is allowed.

    Args:
        task: what to measure, and what is known already.
        prober: answers the probes.
        emit: is given each observation as its probe ends.
        node_id: the Ray node this runs on; absent outside a cluster.
    """
    observed = list(task.done)
    attempts: dict[Ask, int] = {}
    while (ask := next_ask(task, observed)) is not None:
        attempts[ask] = attempts.get(ask, 0) + 1
        if attempts[ask] > ATTEMPTS:
            return
        observation = _observe(task, ask, prober, observed, node_id)
        observed.append(observation)
        emit(observation)


def _observe(
    task: TrialTask,
    ask: Ask,
    prober: Prober,
    observed: Sequence[Observation],
    node_id: str | None,
) -> Observation:
    timing = task.timing if ask.purpose == "ladder" else None
    started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    end = prober.probe(ProbeRequest(batch_size=ask.batch_size, timing=timing))
    environment = end.environment
    if environment is not None and node_id is not None:
        environment = environment.model_copy(update={"node_id": node_id})
    earlier = [
        o.attempt
        for o in observed
        if (o.purpose, o.batch_size, o.repeat) == (ask.purpose, ask.batch_size, ask.repeat)
    ]
    assert task.gpu.usable_memory_bytes is not None
    return Observation(
        cell=task.cell,
        purpose=ask.purpose,
        batch_size=ask.batch_size,
        repeat=ask.repeat,
        attempt=max(earlier, default=0) + 1,
        outcome=end.outcome,
        detail=end.detail,
        basis=Basis.MEASURED,
        memory_limit_bytes=task.gpu.usable_memory_bytes,
        batch_limit=task.batch_limit,
        seed=task.seed,
        measurement=end.measurement,
        environment=environment,
        started_at=started_at,
        seconds=round(time.monotonic() - started, 3),
    )
