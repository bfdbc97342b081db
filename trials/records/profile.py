"""Records of the log beside observations: profiles of steps, and times of links. No torch here.

They enter no law, no ranking and no search: steps run slower under a profiler, and links are timed
without any step.
"""

import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from gpu_catalog.record import Record, former_names
from trials.recipes.fields import PositiveInt
from trials.records.cell import Cell
from trials.records.collectives import CollectiveTime
from trials.records.observation import LOG_VERSION, Environment, Observation, Outcome, Seconds

Stage = Literal["forward", "backward", "recompute", "optimizer"]
"""Part of a step. ``recompute`` is the forward pass that gradient checkpointing repeats, a part of
the backward pass."""
Layer = Literal[
    "embeddings", "norms", "attention", "mamba", "experts", "mlp", "head", "loss", "other",
    "optimizer", "idle",
]  # fmt: skip
"""Kind of layer of an operator. ``experts`` includes the router; ``other`` is code between the
layers (residuals, positions, masks); ``idle`` is a GPU that waits for its host."""
STAGES: tuple[Stage, ...] = get_args(Stage)
LAYERS: tuple[Layer, ...] = get_args(Layer)
ATTEMPTS = 3  # attempts at a profile without a verdict


class ProfileRule(Record):
    """Numbers of steps of a profile.

    Attributes:
        steps: least number of steps of each kind: plain, with timed stages, under the profiler.
        least_seconds: least total time of the first two kinds, where steps are short.
        most_steps: most steps of these kinds.
        warmup_steps: steps under the profiler that do not count.
        training_steps: training steps between the two counts of the experts' tokens.
    """

    steps: PositiveInt = 3
    least_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 2.0
    most_steps: PositiveInt = 30
    warmup_steps: Annotated[int, Field(strict=True, ge=0)] = 2
    training_steps: PositiveInt = 10

    def is_enough(self, plain_seconds: Sequence[float]) -> bool:
        """Whether these plain steps are enough."""
        count = len(plain_seconds)
        if count < self.steps:
            return False
        return count >= self.most_steps or 2 * sum(plain_seconds) >= self.least_seconds


class ProfileRow(Record):
    """Time of one class of operators of one kind of layer in one stage of a step.

    Attributes:
        stage: stage of the step.
        layer: kind of layer.
        kernel: class of operators: ``matmul gate``, ``dequantise``, ``gather/scatter``, …; ``host``
            is Python, views and other work that moves no data.
        seconds: seconds on the CPU, or of a GPU's kernels.
        calls: number of operators or kernels.
        flops: floating-point operations of matrix products and attention.
    """

    stage: Stage
    layer: Layer
    kernel: str
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    calls: int
    flops: int


class ExpertLoad(Record):
    """Tokens routed to each expert, before and after some training.

    Attributes:
        examples: number of examples in the batch they were counted on, the same both times.
        training_steps: steps between the counts, on other batches.
        before: (layers, experts) tokens of each expert at the initial weights.
        after: (layers, experts) the same after training.
    """

    _former = model_validator(mode="before")(former_names(queries="examples"))

    examples: int
    training_steps: int
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


def tokens_per_example(counts: Sequence[Sequence[int]], examples: int) -> list[float]:
    """Tokens of each expert per example, averaged over layers: the bars of 2408.04693, Fig. 11."""
    return [sum(expert) / len(counts) / examples for expert in zip(*counts, strict=True)]


def load_variance(counts: Sequence[Sequence[int]], examples: int) -> float:
    """Variance over the experts of ``tokens_per_example``, as in 2408.04693, Fig. 11."""
    return statistics.pvariance(tokens_per_example(counts, examples))


def load_imbalance(counts: Sequence[Sequence[int]]) -> float:
    """Tokens of the busiest expert over an equal share, averaged over layers; 1 is balanced."""
    return statistics.fmean(max(layer) * len(layer) / sum(layer) for layer in counts)


class Profile(Record):
    """Breakdown of the time of a step.

    Attributes:
        of: source of the rows' times: operators on the CPU, or kernels on a GPU.
        plain_seconds: raw durations of steps without any hooks.
        forward_seconds, backward_seconds, optimizer_seconds: durations of the stages of further
            steps without the profiler, one index per step. The forward pass includes the loss, the
            backward pass includes recomputation.
        profiled_seconds: raw durations of the steps under the profiler.
        rows: times by stage, layer and kernel in the median one of these (the lower of two).
        load: tokens of each expert; absent without experts, or where they cannot be counted.
    """

    of: Literal["cpu", "gpu"]
    plain_seconds: Seconds
    forward_seconds: Seconds
    backward_seconds: Seconds
    optimizer_seconds: Seconds
    profiled_seconds: Seconds
    rows: tuple[ProfileRow, ...]
    load: ExpertLoad | None = None

    @property
    def step_seconds(self) -> float:
        """Median of the plain steps."""
        return statistics.median(self.plain_seconds)

    @property
    def overhead(self) -> float:
        """Relative overhead of the profiler on a step.

        It compares the shortest steps, which other load on the machine disturbs least.
        """
        return min(self.profiled_seconds) / min(self.plain_seconds) - 1

    def stage_seconds(self, stage: Stage) -> float:
        """Median seconds of a stage without the profiler.

        ``backward`` includes ``recompute``, which is estimated by its share under the profiler.
        """
        match stage:
            case "forward":
                return statistics.median(self.forward_seconds)
            case "backward":
                return statistics.median(self.backward_seconds)
            case "optimizer":
                return statistics.median(self.optimizer_seconds)
            case "recompute":
                backward = self.profiled(("backward", "recompute"))
                share = self.profiled([stage]) / backward if backward > 0 else 0.0
                return share * self.stage_seconds("backward")

    def profiled(self, stages: Collection[Stage]) -> float:
        """Total seconds of the rows of some stages."""
        return sum(row.seconds for row in self.rows if row.stage in stages)

    def unprofiled_seconds(self, row: ProfileRow) -> float:
        """Seconds of a row in a plain step, by its share of its stage under the profiler."""
        stages: tuple[Stage, ...] = (row.stage,)
        whole: Stage = row.stage
        if row.stage in ("backward", "recompute"):
            stages, whole = ("backward", "recompute"), "backward"
        profiled = self.profiled(stages)
        return row.seconds / profiled * self.stage_seconds(whole) if profiled > 0 else 0.0


class Profiled(Record):
    """One attempt to profile a batch size of a cell, a line of the observation log.

    Attributes:
        kind: kind of record, which distinguishes its lines from observations.
        cell: cell that was profiled.
        batch_size: examples per step.
        attempt: 1 for the first attempt.
        outcome: outcome of the probe.
        detail: one line on the cause, for every outcome but FITS.
        seed: seed of data and weights.
        profile: present when the outcome is FITS.
        environment: present when the child lived long enough to report it.
        started_at: UTC time in ISO 8601.
        seconds: wall time of the attempt.
    """

    kind: Literal["profile"] = "profile"
    cell: Cell
    batch_size: int
    attempt: int = 1
    outcome: Outcome
    detail: str | None = None
    seed: int
    profile: Profile | None = None
    environment: Environment | None = None
    started_at: str
    seconds: float

    @property
    def key(self) -> str:
        """Unique key within a run."""
        return f"{self.cell.key}/profile/b{self.batch_size}/t{self.attempt}"

    @property
    def key_in_cell(self) -> tuple[object, ...]:
        """Unique key among the records of its cell, without the text of ``key``."""
        return "profile", self.batch_size, self.attempt


class LinkTimes(Record):
    """Times of collectives of several GPUs, a line of the observation log.

    A trial times them before its first probe, by processes without a model, unless an earlier trial
    of the run has timed as many GPUs on the same nodes.

    Attributes:
        kind: as of ``Profiled``.
        log_version: earlier programs know no such lines.
        cell: cell of the trial; the times are those of its GPUs and nodes, whatever it trains.
        node_ids: ids of the Ray nodes, in the order of the ranks; empty outside a cluster.
        outcome: ``FITS`` where they were timed.
        detail: one line on the cause, for every outcome but FITS.
        times: times of the collectives at growing buffers; empty where memory allows none.
        environment: present when the processes lived long enough to report it.
        started_at: UTC time in ISO 8601.
        seconds: wall time, with the start of the processes.
    """

    kind: Literal["link"] = "link"
    log_version: Annotated[int, Field(ge=2, le=LOG_VERSION)] = 2
    cell: Cell
    node_ids: tuple[str, ...] = ()
    outcome: Outcome
    detail: str | None = None
    times: tuple[CollectiveTime, ...] = ()
    environment: Environment | None = None
    started_at: str
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @property
    def key(self) -> str:
        """Unique key within a run."""
        return f"{self.cell.key}/link/{self.started_at}"

    @property
    def key_in_cell(self) -> tuple[object, ...]:
        """Unique key among the records of its cell, without the text of ``key``."""
        return "link", self.started_at


KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(profile|link)"')
KINDS: dict[bytes, type["Beside"]] = {b"profile": Profiled, b"link": LinkTimes}
Beside = Profiled | LinkTimes
"""Records of a log that are no observations."""
Logged = Observation | Beside
"""Records in a run's log of observations."""


def logged(line: bytes) -> Logged:
    """Parse one line of the log.

    Raises:
        ValidationError: the line is no record of a log.
    """
    return (_kind(line) or Observation).model_validate_json(line)


def profile_or_none(line: bytes) -> Profiled | None:
    """Read a profile; None for a line that holds none.

    Raises:
        ValidationError: it begins as a profile, and is none.
    """
    return Profiled.model_validate_json(line) if _kind(line) is Profiled else None


def link_or_none(line: bytes) -> LinkTimes | None:
    """Read the times of a link, as ``profile_or_none``."""
    return LinkTimes.model_validate_json(line) if _kind(line) is LinkTimes else None


def is_observation(line: bytes) -> bool:
    """Whether a line of the log is no other kind of record, by its first field."""
    return _kind(line) is None


def _kind(line: bytes) -> type[Beside] | None:
    match = KIND.match(line)
    return None if match is None else KINDS[match[1]]


def is_progress(record: Logged) -> bool:
    """Whether a record brings its cell nearer to its end.

    Links do not: a trial that always dies may time them on each node that it comes to.
    """
    return record.outcome.is_verdict and not isinstance(record, LinkTimes)


def observations_of(records: Iterable[Logged]) -> list[Observation]:
    """Observations among the records of a log, some of which may be lines that stand for them."""
    return [record for record in records if not isinstance(record, Beside)]


def links_of(records: Sequence[Logged]) -> list[LinkTimes]:
    """Links that were timed; logs before ``LinkTimes`` have their times within a probe."""
    within = [
        LinkTimes(
            cell=o.cell,
            node_ids=tuple(dict.fromkeys(r.node_id for r in o.measurement.ranks if r.node_id)),
            outcome=Outcome.FITS,
            times=o.measurement.collectives,
            environment=o.environment,
            started_at=o.started_at,
            seconds=0.0,  # among those of the probe
        )
        for o in observations_of(records)
        if o.measurement is not None and o.measurement.collectives
    ]
    return within + [record for record in records if isinstance(record, LinkTimes)]


def linked_nodes(links: Iterable[LinkTimes], cell: Cell) -> tuple[tuple[str, ...], ...]:
    """Nodes, by set, on which the links of as many GPUs of that kind as a cell's were timed."""
    alike = (link for link in links if link.cell.devices == cell.devices)
    return tuple(link.node_ids for link in alike if link.outcome is Outcome.FITS)


def sizes_to_profile(largest: int, profiled: Sequence[Profiled]) -> list[int]:
    """Batch sizes still to be profiled: one example, and the largest batch.

    Args:
        largest: largest batch size of the cell.
        profiled: earlier attempts at profiles of the cell.
    """
    done = {p.batch_size for p in profiled if p.outcome.is_verdict}
    tries = [p.batch_size for p in profiled]
    sizes = sorted({1, largest}) if largest > 0 else []
    return [size for size in sizes if size not in done and tries.count(size) < ATTEMPTS]
