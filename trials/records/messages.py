"""What a trial and its processes say to each other, a line of JSON each. No torch here."""

from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from trials.records.cell import Cell
from trials.records.model import Model
from trials.records.observation import Environment, Measurement, Outcome
from trials.records.profile import Profile, ProfileRule
from trials.records.timing_rule import TimingRule

START = "start\n"  # asks the nursery for a child


class Setup(Record):
    """The first line a nursery is given: what its children build, and on which device.

    Attributes:
        cell: what is fine-tuned.
        model: the model of that name.
        gpu: the catalog row of the GPU that runs it, ``cell.device``.
        memory_cap_bytes: usable memory of the smaller GPU it stands in for; absent if it does not.
        seed: weights and tokens are drawn from it.
        threads: CPU threads a step may use.
    """

    cell: Cell
    model: Model
    gpu: Gpu
    memory_cap_bytes: int | None = None
    seed: int
    threads: int


class ChildStarted(Record):
    """The child is there."""

    pid: int


class Ended(Record):
    """The nursery's child has ended: its exit code, or less a signal's number."""

    exit_code: int


class Ready(Record):
    """The child's first word: the recipe holds on this machine.

    Attributes:
        environment: the stack it runs.
        memory_limit_bytes: the device memory that probes are held against, as the device says.
    """

    environment: Environment
    memory_limit_bytes: int


class ProbeRequest(Record):
    """One batch size to try.

    Attributes:
        batch_size: examples per step.
        timing: when to stop timing; absent when only memory is to be measured.
        draw: which of the batches of this size to take: the same number gives the same tokens.
        profile: how to profile it, once it fits; absent when that is not asked for.
    """

    batch_size: int
    timing: TimingRule | None
    draw: int = 0
    profile: ProfileRule | None = None


class ProbeReply(Record):
    """How the probe of this batch size ended."""

    batch_size: int
    outcome: Outcome
    detail: str | None = None
    measurement: Measurement | None = None
    profile: Profile | None = None


class Refused(Record):
    """The child's first word when it cannot or must not measure.

    Attributes:
        outcome: what that says of the batch.
        detail: one line on why.
        final: trying again cannot help.
    """

    outcome: Outcome
    detail: str
    final: bool = False
