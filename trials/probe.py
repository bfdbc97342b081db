"""What a trial and its processes say to each other, a line of JSON each. No torch here."""

from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from trials.observation import Environment, Measurement, Outcome, ParameterCounts
from trials.timing import TimingRule
from trials.workload import Cell

START = "start\n"  # asks the nursery for a child


class Setup(Record):
    """The first line a nursery is given: what its children build, and on which device."""

    cell: Cell
    gpu: Gpu
    seed: int
    threads: int


class Born(Record):
    """The nursery has forked a child."""

    pid: int


class Ended(Record):
    """The nursery's child has ended: its exit code, or less a signal's number."""

    exit_code: int


class Ready(Record):
    """The child's first word: the recipe holds, this is what was built."""

    environment: Environment
    parameters: ParameterCounts


class ProbeRequest(Record):
    """One batch size to try. Without a timing rule only memory is measured."""

    batch_size: int
    timing: TimingRule | None


class ProbeReply(Record):
    """How the probe ended."""

    outcome: Outcome
    detail: str | None = None
    measurement: Measurement | None = None


class Refused(Record):
    """The child's first word when it cannot or must not measure: one line on why."""

    outcome: Outcome
    detail: str
