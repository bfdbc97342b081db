"""The job that is priced: its examples, epochs, batches and overheads."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gpu_catalog.record import Record, former_names
from orchestrator.datasets.lengths import DataLengths
from trials.records.recipe import PositiveInt

SECONDS_PER_MINUTE = 60.0
MINUTES_PER_HOUR = 60.0
SECONDS_PER_HOUR = 3600.0
HOURS_PER_DAY = 24.0
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
A_DAY = 1440.0  # minutes
MOST_INTERRUPTIONS = 240.0
MOST_DRIFT = 1.0


class Overheads(Record):
    """What a job takes beside its steps, and how prices move. None was measured: state your own.

    Attributes:
        startup_minutes: from renting to the first step: the node, the image, download of the model,
            loading and quantising it.
        checkpoint_seconds: one checkpoint, while no step runs.
        checkpoint_minutes: of work between two, on demand; a spot job takes the interval that costs
            least.
        interruptions_per_day: of a spot instance. GCP's own figure for preemptible instances is 5
            to 15 % a day; AWS's classes run from under 5 to over 20 % a month.
        price_drift: how far, as a part of it, an on-demand price moves in 30 days (one standard
            deviation).
        spot_price_drift: alike, of a spot price.
    """

    startup_minutes: Annotated[NotNegative, Field(le=A_DAY)] = 10.0
    checkpoint_seconds: Annotated[NotNegative, Field(le=60 * A_DAY)] = 30.0
    checkpoint_minutes: AboveZero = 60.0
    interruptions_per_day: Annotated[NotNegative, Field(le=MOST_INTERRUPTIONS)] = 0.1
    price_drift: Annotated[NotNegative, Field(le=MOST_DRIFT)] = 0.02
    spot_price_drift: Annotated[NotNegative, Field(le=MOST_DRIFT)] = 0.1


NO_OVERHEADS = Overheads(
    startup_minutes=0,
    checkpoint_seconds=0,
    interruptions_per_day=0,
    price_drift=0,
    spot_price_drift=0,
)


Padding = Literal["longest", "grouped", "packed"]

Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class JobTerms(Record):
    """What is stated of a job, whatever its data.

    Attributes:
        examples: training examples; absent for as many as its data has.
        epochs: how often each is seen.
        batch_size: price the job at this batch size; absent for the fastest measured one.
        overheads: what it takes beside its steps.
        padding: what a batch is made of: examples drawn at random, padded to the longest of them
            (``longest``), examples of like lengths (``grouped``), or full rows (``packed``).
        cutoff: tokens that longer examples are cut off at, or of a packed row; absent for no limit.
        pad_to_multiple: what the length of a batch is rounded up to.
    """

    _former = model_validator(mode="before")(former_names(queries="examples"))

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
        examples: training examples.
        lengths: how long they are; absent where each has the full sequence length.
    """

    examples: PositiveInt
    lengths: DataLengths | None = None

    @model_validator(mode="after")
    def _rows_can_be_packed(self) -> Self:
        if self.padding == "packed" and (self.lengths is None or self.cutoff is None):
            raise ValueError("packing needs lengths, and a cutoff: the tokens of a row")
        return self
