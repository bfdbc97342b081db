"""Messages between a trial and its processes, a line of JSON each. No torch here."""

from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from trials.records.cell import Cell
from trials.records.collectives import CollectiveTime
from trials.records.model import Model
from trials.records.observation import Environment, Measurement, Outcome
from trials.records.profile import Profile, ProfileRule
from trials.records.timing_rule import TimingRule


class RankPlace(Record):
    """Place of the ranks of one node among those of several.

    Attributes:
        node: number of the node, from 0.
        interface: its network interface that reaches the other nodes.
        host: address of the first node, at which all ranks meet.
        port: port of it.
        listening: descriptor of the socket that listens there; absent on the other nodes.
    """

    node: int
    interface: str
    host: str
    port: int
    listening: int | None = None


class RankProgress(Record):
    """Progress of one of several ranks.

    Attributes:
        rank: its number.
        begun: collectives that it has begun.
        silent_seconds: time since its last report of them.
    """

    rank: int
    begun: int
    silent_seconds: float


class Setup(Record):
    """Request to a fork server for a child: the model that it builds, and its device.

    Attributes:
        cell: cell to fine-tune.
        model: the model of that name.
        gpu: catalog row of the GPU that runs it, ``cell.device``.
        memory_cap_bytes: usable memory of the smaller GPU that ``gpu`` stands in for; absent
            otherwise.
        seed: seed of weights and tokens.
        threads: CPU threads a step may use.
        build_timeout_seconds: longest time to build the model on several ranks, whose parent ends
            them all, and says which one hangs; absent for one process.
        probe_timeout_seconds: longest time of a probe on several ranks; absent as above.
        place: place of this node's ranks among those of several nodes; absent for one node.
        times_link: whether its ranks, instead, build no model and time their collectives.
    """

    cell: Cell
    model: Model
    gpu: Gpu
    memory_cap_bytes: int | None = None
    seed: int
    threads: int
    build_timeout_seconds: float | None = None
    probe_timeout_seconds: float | None = None
    place: RankPlace | None = None
    times_link: bool = False


class ChildStarted(Record):
    """First message of a child: its process id."""

    pid: int


class Ended(Record):
    """End of a child, reported by the fork server: its exit code, or minus a signal's number."""

    exit_code: int


class Ready(Record):
    """Second message of a child: the model is built and follows its recipe.

    Attributes:
        environment: software and device of the child.
        memory_limit_bytes: device memory that probes may take, as the device reports it.
    """

    environment: Environment
    memory_limit_bytes: int


class ProbeRequest(Record):
    """Request for one probe.

    Attributes:
        batch_size: examples per step.
        timing: when to stop timing; absent to measure memory alone.
        draw: number of the random batch: the same number gives the same tokens.
        lengths: tokens per example of each micro-batch to step through, for memory alone; empty for
            the length of the cell.
        padded: whether each of these micro-batches has padding; empty where none has.
        profile: how to profile the batch size if it fits; absent for no profile.
        times_link: whether to time the collectives of several GPUs instead of any step.
    """

    batch_size: int
    timing: TimingRule | None
    draw: int = 0
    lengths: tuple[int, ...] = ()
    padded: tuple[bool, ...] = ()
    profile: ProfileRule | None = None
    times_link: bool = False

    @property
    def text(self) -> str:
        """Name of what is done, in messages."""
        return "timing the links" if self.times_link else f"batch {self.batch_size}"


LINK_REQUEST = ProbeRequest(batch_size=0, timing=None, times_link=True)


class StepsRun(Record):
    """Progress of a probe of drawn lengths after each step, which outlasts the child."""

    batch_size: int
    measured: Measurement


class ProbeReply(Record):
    """End of the probe of this batch size.

    Attributes:
        collectives: times of the collectives where they were requested.
        waiting: ranks that had not answered at a lost connection or a timeout of several nodes.
    """

    batch_size: int
    outcome: Outcome
    detail: str | None = None
    measurement: Measurement | None = None
    profile: Profile | None = None
    collectives: tuple[CollectiveTime, ...] | None = None
    waiting: tuple[RankProgress, ...] = ()


class Refused(Record):
    """Second message of a child that cannot or must not measure.

    Attributes:
        outcome: outcome of the probe that the child was started for.
        detail: one line on the cause.
        final: whether another attempt is pointless.
        waiting: as in ``ProbeReply``.
    """

    outcome: Outcome
    detail: str
    final: bool = False
    waiting: tuple[RankProgress, ...] = ()
