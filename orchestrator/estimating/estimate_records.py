"""Records of an estimate."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from fitting.laws.fit_result import Interval
from gpu_catalog.gpu import Gpu, Interconnect
from gpu_catalog.record import Record
from orchestrator.estimating.memory_error import MemoryError90
from orchestrator.estimating.question import Placement, Question, placement
from orchestrator.pricing.host_memory import TooLittleHostMemory
from orchestrator.pricing.offer_constraints import MissedConstraints
from orchestrator.spec.job import Overheads
from trials.recipes.parallel import Strategy
from trials.records.observation import Basis, Outcome
from trials.simulation.clock.time_error import TimeError90
from trials.simulation.simulated_cell import GIB, SimulatedCell
from trials.simulation.timing_model import SimulatedStepTime
from trials.simulation.trace_request import Fidelity
from trials.simulation.varying_lengths import VaryingLengths

if TYPE_CHECKING:
    import pandas as pd

BatchChoice = Literal["asked", "largest", "fastest"]
NESTED = {
    *("alternatives", "boxes", "assumed_lengths", "overheads", "memory_error", "time_error"),
    "too_little_host_memory",
}
"""Fields of an estimate that are no columns of a frame."""

FROZEN_IN_FP32 = "Frozen weights are in fp32, as the trainer loads them"
SEVERAL_UNTRIED = "Several GPUs that train together were not tried"


class Price(Record):
    """The job on the best offer of a GPU by the objective, with 90 % intervals.

    ``usd_per_hour`` is the price of the whole instance, or of all ``instances``, one a node, on the
    day ``price_as_of``, None where it is unknown; the catalog has it since ``price_recorded``.
    ``note`` has the catalog's caveats on the offer, ``host_memory_gib`` the memory of an instance's
    host, None where it is unknown.
    """

    provider: str
    instance: str
    region: str
    market: str
    gpus_per_instance: int
    instances: int = 1
    usd_per_hour: float
    price_as_of: date | None
    price_recorded: date
    hours: float
    hours_interval: Interval
    usd: float
    usd_interval: Interval
    host_memory_gib: float | None = None
    note: str | None = None


class Alternative(Record):
    """Another recipe that fits a GPU.

    Attributes:
        options: options of the command line that differ from the given ones.
        learns_alike: whether training learns the same as with the recipe of the estimate.
        surely_fits: whether a batch fits even by the error of the memory.
        usd: dollars of the job on the cheapest offer; None without an allowed one.
    """

    options: str
    method: str
    recipe: str
    learns_alike: bool
    surely_fits: bool
    batch_size: int
    micro_batches: int
    reserved_gib: float
    step_seconds: float | None
    hours: float | None
    usd: float | None


class Box(Record):
    """Another number of GPUs of the same kind that a job fits.

    Attributes:
        gpus: number of GPUs.
        is_own: whether the user owns them: ``price`` is then the electricity of the cards alone,
            not of the rest of the machine. The same GPUs rented are an estimate of their own.
        strategy: how they share the training; None for one GPU.
        hours, usd: hours and dollars of the job by the best offer; None where unknown.
    """

    gpus: int
    strategy: Strategy | None
    hours: float | None
    usd: float | None


class AssumedLengths(Record):
    """Memory of a job without lengths, as if its examples varied like those of a data set.

    Attributes:
        data: data set, whose lengths are scaled so that the longest is ``seq_len``.
        surviving_batch_size: largest batch that survives an epoch in 95 % of simulated runs.
        reserved_gib: 5th and 95th percentile, over these runs, of the most memory that the
            allocator reserves at the estimate's ``batch_size`` where it is not limited.
    """

    data: str
    surviving_batch_size: int
    reserved_gib: Interval


class Estimate(Record):
    """Simulation of one cell on one GPU, or on several. Unknown values are None.

    Attributes:
        gpu: key of the GPU, after the number of them where several train together: ``8xH100-SXM``.
            Memory and batch sizes are those of each GPU.
        gpus: number of GPUs.
        strategy: how several GPUs share the training.
        replicas: copies of the model, each in shards among GPUs of its own; for ``hsdp`` alone.
        degree: GPUs of a group among which linear layers are divided; for ``tp`` alone.
        nodes: nodes with as many of the GPUs each.
        node_network_gbps, rdma: network of each of several nodes; None where unknown.
        interconnect: link between the GPUs of its instance; None for that of the catalog's GPU.
        exposed_seconds: part of ``step_seconds`` in which GPUs only wait for one another; None for
            one GPU.
        sparsity: active experts over experts; 1.0 without experts.
        image_tokens: tokens of each example that come from images; None for text alone.
        seq_len_limit: longest sequence that was tried, where ``seq_len`` is the longest that fits;
            a ``seq_len`` equal to it is a lower bound. None where the length was given.
        batch_size: examples per micro-batch, or packed rows, of all fields below.
        micro_batches: micro-batches per optimizer step.
        effective_batch: examples, or packed rows, per optimizer step of all GPUs.
        batch: origin of the batch size: requested, the largest that fits, or the fastest.
        tokens_per_example: mean padded length that times refer to, of a row where rows are packed;
            memory refers to ``seq_len``.
        examples_per_row: examples in a packed row; 1 where rows are not packed.
        outcome: outcome of a step of that size.
        max_batch_size: largest batch that fits; 0 when not even one example fits.
        batch_limit: largest batch size that was tried, which is the GPU's share of the effective
            batch where the recipe has one; a ``max_batch_size`` equal to it is a lower bound.
        max_batch_size_interval: interval of it, by that of the memory; no end exceeds
            ``batch_limit``.
        surviving_batch_size: largest batch that survives an epoch of examples of varying length, in
            95 % of simulated runs; None where all batches are of one length.
        survives_surely: whether ``batch_size`` survives even at the upper end of the memory's
            interval; None as above.
        varying_reserved_gib: 5th and 95th percentile, over these runs, of the most memory that the
            allocator reserves at ``batch_size`` where it is not limited; None as above.
        assumed_lengths: runs on assumed lengths, where the job has none; None for all but the best
            row of the command ``estimate`` for named GPUs and one length.
        peak_gib, peak_gib_interval: peak of the memory that PyTorch's allocator has in use.
        reserved_gib: peak of the memory that it reserves.
        usable_gib: memory of the GPU that it may reserve.
        host_gib: most memory that the processes of a node keep on its host, by their tensors; None
            where they keep nothing there.
        routed_peak_gib: median and 95th percentile of the peak over drawn shares of the experts;
            None without draws.
        step_seconds, step_seconds_interval: seconds of a step; they and the fields below are None
            when the GPU's speed is unknown or the batch does not fit.
        examples, epochs: size of the job that is priced.
        assumed: options that were not given, and whose values are assumed for the job.
        overheads: time of the job outside its steps, and drift of prices.
        hours, hours_interval: hours of the job as rented by ``price``, or else on demand.
        price: best offer by the objective; None without an allowed one.
        too_little_host_memory: instances that are left out because their host has less memory.
        no_price: reason why ``price`` is None although a step time is known.
        fidelity: similarity of the traced stack to the one that would run.
        approximations: parts of the stack that others stand in for.
        constants: source of the timing model's constants.
        left_out: part of the training without which memory, times and price are.
        memory_error: published runs that the intervals of memory and batch size are computed from.
        time_error: measured steps that the interval of the step time is computed from; None without
            a step time, and for constants with an error of their own, as ``calibrate`` writes them.
        not_compared: axes of the recipe with a value that no published run has.
        options: options of the command line that state what was chosen of the recipe; None where
            nothing was.
        alternatives: other recipes that fit the GPU, in order of preference; where the estimate's
            own does not fit, the cheapest change that does.
        boxes: other numbers of these GPUs that fit, where the estimate chose the number.
    """

    model: str
    gpu: str
    gpus: int = 1
    is_own: bool = False
    strategy: Strategy | None = None
    replicas: int | None = None
    degree: Annotated[int | None, Field(exclude_if=lambda n: n is None)] = None
    nodes: int = 1
    node_network_gbps: float | None = None
    rdma: bool | None = None
    interconnect: Annotated[Interconnect | None, Field(exclude_if=lambda n: n is None)] = None
    method: str
    recipe: str
    experts: int | None
    active_experts: int | None
    sparsity: float
    seq_len: int
    image_tokens: int | None = None
    seq_len_limit: int | None = None
    batch_size: int
    micro_batches: int
    effective_batch: int
    batch: BatchChoice
    tokens_per_example: float
    examples_per_row: float = 1.0
    outcome: Outcome
    max_batch_size: int
    batch_limit: int
    max_batch_size_interval: Interval
    surviving_batch_size: int | None = None
    survives_surely: bool | None = None
    varying_reserved_gib: Interval | None = None
    assumed_lengths: AssumedLengths | None = None
    peak_gib: float
    peak_gib_interval: Interval
    reserved_gib: float
    usable_gib: float
    host_gib: float | None = None
    routed_peak_gib: tuple[float, float] | None = None
    step_seconds: float | None = None
    step_seconds_interval: Interval | None = None
    exposed_seconds: float | None = None
    tokens_per_second: float | None = None
    examples_per_second: float | None = None
    examples_per_second_interval: Interval | None = None
    examples: int
    epochs: int
    assumed: tuple[str, ...] = ()
    overheads: Overheads
    hours: float | None = None
    hours_interval: Interval | None = None
    price: Price | None = None
    too_little_host_memory: tuple[TooLittleHostMemory, ...] = ()
    no_price: str | None = None
    fidelity: Fidelity
    approximations: tuple[str, ...]
    constants: str
    left_out: str | None = None
    memory_error: MemoryError90
    time_error: TimeError90 | None = None
    not_compared: tuple[str, ...] = ()
    options: str | None = None
    alternatives: tuple[Alternative, ...] = ()
    boxes: tuple[Box, ...] = ()
    basis: Basis = Basis.SIMULATED

    @property
    def data_parallel_ranks(self) -> int:
        """GPUs, or groups of them under ``tp``, that train on batches of their own."""
        return self.gpus // (self.degree or 1)

    @property
    def lasting_batch_size(self) -> int:
        """Largest batch that fits in every step, also where lengths vary."""
        survives = self.surviving_batch_size
        return self.max_batch_size if survives is None else survives

    @property
    def surely_fits(self) -> bool:
        """Whether ``batch_size`` fits in every step, even by the error of the memory."""
        within = self.max_batch_size_interval
        return within.low >= self.batch_size and self.survives_surely is not False

    @property
    def holds_limit(self) -> bool:
        """Whether the largest batch that was tried fits, even by the error of the memory."""
        most = min(self.lasting_batch_size, self.max_batch_size_interval.low)
        return most >= self.batch_limit

    @property
    def needed_gib(self) -> float:
        """Memory that the batch reserves at most, also where lengths vary."""
        varying = self.varying_reserved_gib
        return self.reserved_gib if varying is None else max(varying.high, self.reserved_gib)


@dataclass(frozen=True, slots=True)
class Estimated:
    """An estimate with the simulation that it was made from.

    Attributes:
        question: the job, and the recipe on this GPU.
        varying: runs on examples of varying length; None where all batches are of one length.
        hours: hours of the job's steps by candidate batch size; empty for a single candidate.
        missed: best hours and dollars of the GPU's offers where none meets the constraints.
        prices: the job on each offer that meets them, the best first.
    """

    estimate: Estimate
    question: Question
    cell: SimulatedCell
    varying: VaryingLengths | None
    gpu: Gpu
    step: SimulatedStepTime | None
    hours: Mapping[int, float]
    missed: MissedConstraints | None
    prices: tuple[Price, ...] = ()

    @property
    def placement(self) -> Placement:
        """GPU and layout."""
        return placement(self.question, self.gpu)

    @property
    def weights_gib(self) -> float:
        """Memory of the model itself."""
        return float(self.cell.held.sizes.sum()) / GIB

    @property
    def freezes_in_fp32(self) -> bool:
        """Whether frozen weights take twice the bytes that products under autocast need."""
        recipe = self.cell.recipe
        return recipe.method == "lora" and recipe.precision == "fp32-mixed-load"


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates of a job on several GPUs, the best first by the objective.

    Attributes:
        question: the job and the recipe.
        skipped: one line for each GPU that cannot be estimated, with the reason; where all GPUs
            were asked for, one for all of AMD.
        prices: the price table in use, and its age.
    """

    estimated: tuple[Estimated, ...]
    question: Question
    skipped: tuple[str, ...]
    prices: str

    @property
    def recommends(self) -> bool:
        """Whether the training fits a GPU, and no deadline or budget excludes all of its offers."""
        if any(row.missed is not None for row in self):
            return any(row.estimate.price is not None for row in self)
        return self.fits_any

    @property
    def fits_any(self) -> bool:
        """Whether the training fits a GPU."""
        return any(row.estimate.outcome is Outcome.FITS for row in self)

    def __len__(self) -> int:
        """Number of GPUs with an estimate."""
        return len(self.estimated)

    def __iter__(self) -> Iterator[Estimated]:
        """Iterate over the estimates, the best first."""
        return iter(self.estimated)

    def to_frame(self) -> "pd.DataFrame":
        """A row per GPU: offer, batch size, peak memory, step time, hours and dollars.

        Intervals have a column for each end, ``_low`` and ``_high``.
        """
        import pandas as pd  # noqa: PLC0415 - the commands do without it

        rows = [_row(row.estimate.model_dump(mode="json")) for row in self]
        columns = [name for name in dict.fromkeys(_columns(Estimate)) if name not in NESTED]
        return pd.DataFrame(rows, columns=columns)

    def _repr_html_(self) -> str:
        """The frame as an HTML table, for notebooks."""
        return str(self.to_frame().to_html(index=False))


def _columns(record: type[Record]) -> Iterator[str]:
    """Names of a record's fields in one level, as in ``_row``."""
    for name, field in record.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)}
        if Price in kinds:
            yield from _columns(Price)
        elif Interval in kinds:
            yield from (f"{name.removesuffix('_interval')}_{end}" for end in Interval.model_fields)
        else:
            yield name


def _row(values: dict[str, Any]) -> dict[str, Any]:
    """An estimate's fields in one level: the price's beside the others, intervals as two."""
    price = values.pop("price") or {}
    row: dict[str, Any] = {}
    for name, value in (values | price).items():
        if isinstance(value, dict):
            row |= {f"{name.removesuffix('_interval')}_{end}": value[end] for end in value}
        elif not name.endswith("_interval"):
            row[name] = value
    return row
