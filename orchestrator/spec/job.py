"""The job that is priced: its examples, epochs, batches and overheads."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gpu_catalog.record import Record, former_names
from orchestrator.datasets.lengths import DataLengths
from trials.recipes.fields import PositiveInt

SECONDS_PER_MINUTE = 60.0
MINUTES_PER_HOUR = 60.0
SECONDS_PER_HOUR = 3600.0
HOURS_PER_DAY = 24.0
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
A_DAY = 1440.0  # minutes
MOST_INTERRUPTIONS = 240.0
MOST_DRIFT = 1.0
UNSIZED_STARTUP_MINUTES = 10.0
"""Assumed for a model of unknown size, and for a node that measures."""
UNSIZED_CHECKPOINT_SECONDS = 30.0
"""Assumed for a checkpoint of unknown size."""
CHECKPOINT_MINUTES = 60.0
"""Assumed least work between two checkpoints, on demand."""
CHECKPOINT_SHARE = 0.05
"""Assumed share of the work that checkpoints take at most: who waits long writes fewer."""


class Overheads(Record):
    """Time of a job outside its steps, and drift of prices. The defaults are assumptions.

    Attributes:
        startup_minutes: time from renting a node to the first step: starting the node and the
            image; downloading, loading and quantising the model. None for that of the model's size
            (``orchestrator.pricing.transfer_times``).
        checkpoint_seconds: time to write a checkpoint, during which no step runs; None as above.
        checkpoint_minutes: work between two checkpoints on an on-demand instance; None for an
            hour, or longer where checkpoints would take more than a twentieth of it. A job on a
            spot instance uses the interval that minimises its time.
        interruptions_per_day: mean number of interruptions of a spot instance in a day. Google
            Cloud states that 5 to 15 % of preemptible instances are interrupted in a day; AWS's
            classes range from under 5 % to over 20 % in a month.
        price_drift: relative change of an on-demand price in 30 days (one standard deviation),
            estimated from two days of providers' price lists; that of a marketplace's asks and of
            GPUs of the newest generations is a multiple.
        spot_price_drift: the same for a spot price.
    """

    startup_minutes: Annotated[NotNegative, Field(le=A_DAY)] | None = None
    checkpoint_seconds: Annotated[NotNegative, Field(le=60 * A_DAY)] | None = None
    checkpoint_minutes: AboveZero | None = None
    interruptions_per_day: Annotated[NotNegative, Field(le=MOST_INTERRUPTIONS)] = 0.1
    price_drift: Annotated[NotNegative, Field(le=MOST_DRIFT)] = 0.05
    spot_price_drift: Annotated[NotNegative, Field(le=MOST_DRIFT)] = 0.1

    @property
    def expected_startup_minutes(self) -> float:
        """Minutes of start-up; ``UNSIZED_STARTUP_MINUTES`` where they are not known."""
        given = self.startup_minutes
        return UNSIZED_STARTUP_MINUTES if given is None else given

    @property
    def expected_checkpoint_seconds(self) -> float:
        """Seconds of a checkpoint; ``UNSIZED_CHECKPOINT_SECONDS`` where they are not known."""
        given = self.checkpoint_seconds
        return UNSIZED_CHECKPOINT_SECONDS if given is None else given

    def on_nodes(self, nodes: int) -> Self:
        """Those of several spot instances: an interruption of any of them stops all."""
        return self.model_copy(update={"interruptions_per_day": nodes * self.interruptions_per_day})

    @property
    def on_demand_checkpoint_minutes(self) -> float:
        """Minutes of work between two checkpoints on an on-demand instance."""
        if self.checkpoint_minutes is not None:
            return self.checkpoint_minutes
        writing = self.expected_checkpoint_seconds / SECONDS_PER_MINUTE
        return max(CHECKPOINT_MINUTES, writing / CHECKPOINT_SHARE)


NO_OVERHEADS = Overheads(
    startup_minutes=0,
    checkpoint_seconds=0,
    interruptions_per_day=0,
    price_drift=0,
    spot_price_drift=0,
)


NOT_PACKED = "does not apply to preference data, which trainers do not pack: leave it out"

Padding = Literal["longest", "grouped", "packed", "best-fit"]

LongExamples = Literal["cut", "split", "dropped"]
"""What a trainer makes of examples that are longer than a row."""

PACKED: tuple[Padding, ...] = ("packed", "best-fit")
"""Paddings whose rows hold several examples."""

Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class JobTerms(Record):
    """Terms of a job, independent of its data.

    Attributes:
        examples: number of training examples; by default that of the data.
        epochs: passes over the examples.
        batch_size: batch size to price the job at; by default the fastest that was timed.
        overheads: time outside the steps.
        padding: composition of a batch: random examples padded to the longest of them
            (``longest``), examples of similar length (``grouped``), full rows (``packed``), or rows
            of whole examples (``best-fit``), as recipes with ``packing`` have them anyway.
        cutoff: tokens to which longer examples are truncated, or tokens of a packed row; by
            default no limit.
        pad_to_multiple: multiple to which the length of a batch is rounded up.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"queries": "examples"}
    _former = model_validator(mode="before")(former_names(**FORMER))

    examples: PositiveInt | None = None
    epochs: PositiveInt
    batch_size: PositiveInt | None = None
    overheads: Overheads = Overheads()
    padding: Padding = "longest"
    cutoff: PositiveInt | None = None
    pad_to_multiple: PositiveInt = 8


class Job(JobTerms):
    """The job to be priced.

    Attributes:
        examples: number of training examples.
        lengths: their lengths; None if each has the full sequence length.
    """

    examples: PositiveInt
    lengths: DataLengths | None = None

    def on_nodes(self, nodes: int) -> Self:
        """The job on several spot instances: an interruption of any of them stops all."""
        if nodes == 1:
            return self
        return self.model_copy(update={"overheads": self.overheads.on_nodes(nodes)})

    def with_long_examples(self, handling: LongExamples) -> Self:
        """The job with the examples that a trainer makes of those longer than the cutoff."""
        data, cutoff = self.lengths, self.cutoff
        if data is None or cutoff is None or handling == "cut":
            return self
        made = data.split(cutoff) if handling == "split" else data.without_longer(cutoff)
        examples = max(1, round(made.examples / data.examples * self.examples))
        return self.model_copy(update={"lengths": made, "examples": examples})

    def without(self, set_aside: float | None) -> Self:
        """The job without examples that are evaluated: their share up to 1, or their number.

        A share is rounded up, as by ``train_test_split`` of the package datasets.
        """
        share = set_aside or 0.0
        count = math.ceil(share * self.examples) if share <= 1 else int(share)
        return self.model_copy(update={"examples": max(1, self.examples - count)})

    @property
    def length_error(self) -> float:
        """Relative error of the examples' lengths; 0 where a tokenizer counted them."""
        return 0.0 if self.lengths is None else self.lengths.error or 0.0

    @model_validator(mode="after")
    def _rows_can_be_packed(self) -> Self:
        if self.padding in PACKED and (self.lengths is None or self.cutoff is None):
            raise ValueError("packing needs lengths, and a cutoff (the tokens of a row)")
        if self.padding in PACKED and self.lengths is not None and self.lengths.is_preference:
            raise ValueError(f"packing {NOT_PACKED}")
        return self
