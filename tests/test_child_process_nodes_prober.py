"""Real ranks on two nodes of one machine, as one trial has them: every way one of them can end."""

import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest
from builders.gangs import gang_cell, gone_within, ranks_of, seconds_to_end
from builders.long_cases import long_cases
from builders.observations import environment, measurement
from builders.small_probes import BUDGET_BYTES, ENDLESS, SMALL, TIMED, TOO_LARGE, small_setup

from trials.child_process.child_prober import ChildProber
from trials.child_process.forked_child import ProbeEnd
from trials.child_process.nodes_prober import NodesProber, ThreadProber, interface_of, joint_end
from trials.records.messages import LINK_REQUEST, RankPlace, RankProgress
from trials.records.observation import Outcome

COLLECTIVES = {"all-gather", "reduce-scatter", "all-reduce"}
HANG_SECONDS = 25  # several times what a probe takes where other tests run
SOON_SECONDS = 5.0  # some hundredths of a second where a core is free
SETUP = small_setup(gang_cell(gpus=4, seq_len=8, nodes=2))


class Nodes:
    """Probers of two nodes, whose ranks meet at a socket of the first."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        meeting = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.probers = []
        for node in (0, 1):
            place = RankPlace(
                node=node,
                interface=interface_of("127.0.0.1"),
                host="127.0.0.1",
                port=meeting.getsockname()[1],
                listening=None if node else meeting.fileno(),
            )
            prober = ChildProber(
                SETUP.model_copy(update={"place": place}),
                build_timeout_seconds=300,
                probe_timeout_seconds=HANG_SECONDS,
            )
            self.probers.append(prober)
        self.prober = stack.enter_context(NodesProber([ThreadProber(p) for p in self.probers]))

    def ranks(self, node: int) -> list[psutil.Process]:
        """Living ranks of a node, in their order."""
        parent = self.probers[node].child_pid
        assert parent is not None
        return ranks_of(parent)

    @property
    def every(self) -> list[psutil.Process]:
        """Living ranks of both nodes."""
        return [*self.ranks(0), *self.ranks(1)]


@pytest.fixture(scope="module")
def shared() -> Iterator[Nodes]:
    """The nodes that the tests of this file share."""
    with ExitStack() as stack:
        yield Nodes(stack)


@pytest.fixture
def nodes(shared: Nodes) -> Nodes:
    """The shared nodes, with living ranks that have answered."""
    end = shared.prober.probe(SMALL)
    assert (end.outcome, end.detail) == (Outcome.FITS, None)
    return shared


def test_a_fit_records_the_ranks_of_all_nodes(nodes: Nodes) -> None:
    """The step is that of the slowest rank, memory the largest, and each keeps its number."""
    before = nodes.every
    end = nodes.prober.probe(TIMED)
    assert end.measurement is not None
    readings = end.measurement.ranks
    assert [reading.rank for reading in readings] == [0, 1, 2, 3]
    steps = zip(*(reading.step_seconds for reading in readings), strict=True)
    assert end.measurement.step_seconds == tuple(max(step) for step in steps)
    assert end.measurement.memory is not None
    assert end.measurement.memory.peak_allocated_bytes == max(
        reading.peak_allocated_bytes for reading in readings
    )
    assert end.memory_limit_bytes == BUDGET_BYTES
    assert end.environment is not None
    assert nodes.every == before  # and they stay for the next probe


def test_lack_of_memory_on_any_node_is_the_verdict(nodes: Nodes) -> None:
    """One rank is named, and those of both nodes end."""
    before = nodes.every
    end = nodes.prober.probe(TOO_LARGE)
    assert end.outcome is Outcome.OUT_OF_MEMORY
    assert end.detail is not None
    assert end.detail.startswith("rank ")
    assert gone_within(before, SOON_SECONDS)


def test_links_are_timed_by_ranks_without_a_model_on_all_nodes(nodes: Nodes) -> None:
    """They are others than those that train, which end first; none is left."""
    before = nodes.every
    end = nodes.prober.probe(LINK_REQUEST)
    assert (end.outcome, end.detail, end.measurement) == (Outcome.FITS, None, None)
    assert {time.collective for time in end.collectives or ()} == COLLECTIVES
    assert gone_within(before, SOON_SECONDS)
    assert [prober.child_pid for prober in nodes.probers] == [None, None]


@pytest.mark.long
def test_an_interrupt_that_comes_too_late_harms_no_further_probe(nodes: Nodes) -> None:
    """The children have ended by themselves, and their fork servers wait."""
    assert nodes.prober.probe(TOO_LARGE).outcome is Outcome.OUT_OF_MEMORY
    for prober in nodes.probers:
        prober.interrupt()
    assert nodes.prober.probe(SMALL).outcome is Outcome.FITS


@pytest.mark.parametrize("node", [1, *long_cases([0])])
def test_a_killed_rank_ends_those_of_the_other_node_and_costs_the_probe_alone(
    nodes: Nodes, node: int
) -> None:
    """The end names that rank within a second, and the next probe fits."""
    before, victim = nodes.every, nodes.ranks(node)[1]
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(seconds_to_end, victim, before)
        end = nodes.prober.probe(ENDLESS)
    rank = 2 * node + 1
    assert (end.outcome, end.detail) == (
        Outcome.FAILED,
        f"rank {rank}: the child was killed by SIGKILL",
    )
    assert killing.result() < SOON_SECONDS
    assert nodes.prober.probe(SMALL).outcome is Outcome.FITS


@pytest.mark.long
def test_the_parent_of_a_nodes_ranks_may_be_killed_as_well(nodes: Nodes) -> None:
    """The end names the node, and no rank of either is left."""
    before = nodes.every
    parent = before[2].parent()
    assert parent is not None
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(seconds_to_end, parent, before)
        end = nodes.prober.probe(ENDLESS)
    assert (end.outcome, end.detail) == (
        Outcome.FAILED,
        "node 1: the child was killed by SIGKILL",
    )
    assert killing.result() < SOON_SECONDS
    assert nodes.prober.probe(SMALL).outcome is Outcome.FITS


@pytest.mark.long
def test_a_rank_that_hangs_is_named_on_whichever_node(nodes: Nodes) -> None:
    """Its own node knows that it reports no more, the other one that its ranks waited."""
    before, victim = nodes.every, nodes.ranks(1)[0]
    with ThreadPoolExecutor(1) as thread:
        stopping = thread.submit(seconds_to_end, victim, before, signal.SIGSTOP)
        end = nodes.prober.probe(ENDLESS)
    assert (end.outcome, end.detail) == (
        Outcome.TIMED_OUT,
        f"no answer within {HANG_SECONDS} s, batch 1: rank 2 hung, the others waited",
    )
    assert stopping.result() < HANG_SECONDS + SOON_SECONDS


@pytest.mark.long
def test_all_processes_end_with_the_prober_in_the_middle_of_a_probe(nodes: Nodes) -> None:
    """As when another node is lost: the wait for its ranks is over, and so are these."""
    before = nodes.every
    begun = [n.probe(ENDLESS, fresh=False) for n in nodes.prober._nodes]
    nodes.stack.close()
    assert gone_within(before, SOON_SECONDS)
    assert all(future.done() for future in begun)


LOST = "gloo/transport: connection closed by peer"


def test_a_lost_connection_is_explained_by_another_nodes_end() -> None:
    """Whichever came first; alone it stands for itself."""
    echo = ProbeEnd(Outcome.FAILED, f"rank 0: {LOST}")
    killed = ProbeEnd(Outcome.FAILED, "rank 2: the child was killed by SIGKILL")
    assert joint_end([echo, killed], [0, 1]).detail == killed.detail
    assert joint_end([echo, killed], [0]).detail == echo.detail  # the other was interrupted


def test_a_timeout_weighs_the_ranks_that_other_nodes_lost() -> None:
    """A rank that waited lost its connection as the hanging one was ended."""
    waited = RankProgress(rank=0, begun=9, silent_seconds=0.1)
    stopped = RankProgress(rank=1, begun=9, silent_seconds=8.0)
    echo = ProbeEnd(Outcome.FAILED, f"rank 0: {LOST}", waiting=(waited,))
    late = ProbeEnd(
        Outcome.TIMED_OUT,
        "no answer within 9 s, batch 2: no rank is behind the others",
        waiting=(stopped,),
    )
    end = joint_end([echo, late], [0, 1])
    assert end.outcome is Outcome.TIMED_OUT
    assert end.detail == "no answer within 9 s, batch 2: rank 1 hung, the others waited"


def test_nodes_with_different_software_measure_nothing() -> None:
    """Their step would be that of no stack; the end says what differs, and is final."""
    ends = [
        ProbeEnd(
            Outcome.FITS,
            None,
            measurement(),
            environment().model_copy(update={"versions": (("driver", driver), ("torch", torch))}),
        )
        for driver, torch in (("1", "2.12"), ("2", "2.12"), ("1", "2.11"))
    ]
    assert joint_end(ends[:2], [0, 1]).outcome is Outcome.FITS  # drivers may differ
    end = joint_end([ends[0], ends[2]], [0, 1])
    assert (end.outcome, end.final) == (Outcome.FAILED, True)
    assert end.detail == (
        "nodes 0 and 1 differ in software: torch 2.11, torch 2.12: make them the same"
    )


def test_an_address_of_another_machine_has_no_interface() -> None:
    """The error says which address it was."""
    with pytest.raises(OSError, match=r"no network interface of this machine has 192\.0\.2\.1"):
        interface_of("192.0.2.1")
