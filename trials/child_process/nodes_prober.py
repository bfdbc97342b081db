"""Probes of ranks on several nodes: the ranks of each have a prober, and all of them must fit."""

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Protocol, Self

import psutil

from trials.child_process.child_prober import ChildProber
from trials.child_process.forked_child import ProbeEnd
from trials.child_process.rank_verdict import (
    GRACE_SECONDS,
    hanging_line,
    is_echo,
    measurement_of_ranks,
)
from trials.records.messages import ProbeRequest
from trials.records.observation import Environment, Outcome

# A node answers a lost connection after the grace of its own ranks, or a timeout a little later.
NODES_GRACE_SECONDS = 2 * GRACE_SECONDS
INTERRUPT_SECONDS = 1.0  # before an interrupt that came too early is repeated


class NodeProber(Protocol):
    """Prober of the ranks of one node, which may be another one than this."""

    def probe(self, request: ProbeRequest, *, fresh: bool) -> Future[ProbeEnd]:
        """Begin a probe; arguments as of ``Prober``.

        Returns:
            Its end; an exception where the node is lost.
        """

    def interrupt(self) -> None:
        """Have the probe that was begun end as failed."""

    def close(self) -> None:
        """End all processes on the node."""


class ThreadProber:
    """Prober of the ranks of this node, in a thread.

    Args:
        prober: of these ranks.
    """

    def __init__(self, prober: ChildProber) -> None:
        self._prober = prober
        # Its only thread lives as long as the processes that it starts: they end with it.
        self._thread = ThreadPoolExecutor(1)
        self._begun: list[Future[ProbeEnd]] = []

    def probe(self, request: ProbeRequest, *, fresh: bool) -> Future[ProbeEnd]:
        """As the protocol says."""
        self._begun = [self._thread.submit(self._prober.probe, request, fresh=fresh)]
        return self._begun[0]

    def interrupt(self) -> None:
        """As the protocol says."""
        self._prober.interrupt()

    def close(self) -> None:
        """As the protocol says."""
        _interrupt([self] * len(self._begun), self._begun)
        self._thread.submit(self._prober.close).result()
        self._thread.shutdown()


class NodesProber:
    """Answers probes by the ranks of several nodes. A context manager that ends them on exit.

    A rank that runs out of memory, crashes or hangs ends those of all nodes.

    Args:
        nodes: probers of the nodes, in the order of the ranks.
    """

    def __init__(self, nodes: Sequence[NodeProber]) -> None:
        self._nodes = nodes
        self._is_broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self._nodes:
            node.close()

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        """Try one batch size on all ranks, as ``Prober`` says.

        Raises:
            Exception: of a node that is lost, once its loss is known.
        """
        is_fresh, self._is_broken = fresh or self._is_broken, True
        begun = [node.probe(request, fresh=is_fresh) for node in self._nodes]
        own = _own_ends(begun)
        _interrupt(self._nodes, begun)
        end = joint_end([future.result() for future in begun], own)
        self._is_broken = end.outcome is not Outcome.FITS
        return end


def _own_ends(begun: Sequence[Future[ProbeEnd]]) -> list[int]:
    """Numbers of the nodes whose probes have ended, when no other end is worth waiting for."""
    deadline: float | None = None
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        pending = [future for future in begun if not future.done()]
        is_late = not wait(pending, left, FIRST_COMPLETED).done
        own = [number for number, future in enumerate(begun) if future.done()]
        ends = [begun[number].result() for number in own]
        if is_late or len(own) == len(begun) or any(map(_is_certain, ends)):
            return own
        if deadline is None and any(end.outcome is not Outcome.FITS for end in ends):
            deadline = time.monotonic() + NODES_GRACE_SECONDS


def _interrupt(nodes: Sequence[NodeProber], begun: Sequence[Future[ProbeEnd]]) -> None:
    """Interrupt the probes that have not ended, until they have; or until their node is lost.

    One that just starts a process has nothing to kill yet, hence the repetition.
    """
    while pending := [n for n, future in zip(nodes, begun, strict=True) if not future.done()]:
        for node in pending:
            node.interrupt()
        wait(begun, INTERRUPT_SECONDS)


def _is_certain(end: ProbeEnd) -> bool:
    """Whether an end has its cause on its own node."""
    if end.measurement is not None or end.outcome in {Outcome.FITS, Outcome.TIMED_OUT}:
        return False
    return not is_echo(end.outcome, end.detail or "")


def joint_end(ends: Sequence[ProbeEnd], own: Sequence[int]) -> ProbeEnd:
    """End of a probe on several nodes.

    Args:
        ends: end on each node, in the order of the ranks.
        own: numbers of the nodes whose end was not an interrupt.
    """
    limits = [end.memory_limit_bytes for end in ends if end.memory_limit_bytes is not None]
    environments = [end.environment for end in ends if end.environment is not None]
    end = _of_different_software(environments) or _decisive(ends, own)
    return replace(
        end,
        environment=environments[0] if environments else None,
        memory_limit_bytes=min(limits, default=None),
        waiting=(),
    )


def _of_different_software(environments: Sequence[Environment]) -> ProbeEnd | None:
    """End of a probe whose nodes have different stacks; None where they are the same.

    Such a measurement would represent no stack.
    """
    for node, environment in enumerate(environments):
        if environment.software != environments[0].software:
            versions = {*environment.versions} ^ {*environments[0].versions}
            listed = ", ".join(sorted(f"{name} {version}" for name, version in versions))
            text = f"nodes 0 and {node} differ in software: {listed or 'the allocator settings'}"
            return ProbeEnd(Outcome.FAILED, f"{text}: make them the same", final=True)
    return None


def _decisive(ends: Sequence[ProbeEnd], own: Sequence[int]) -> ProbeEnd:
    """The end that explains the others, without what all nodes have in common."""
    misses = [number for number in own if ends[number].outcome is not Outcome.FITS]
    if not misses or any(ends[number].measurement is not None for number in misses):
        measured = [end.measurement for end in ends if end.measurement is not None]
        end = ends[misses[0]] if misses else ends[0]
        if not measured:  # but collectives
            return end
        return replace(end, measurement=measurement_of_ranks(measured))
    for number in misses:
        if _is_certain(ends[number]):
            end = ends[number]
            is_named = (end.detail or "").startswith("rank ")
            return end if is_named else replace(end, detail=f"node {number}: {end.detail}")
    waiting = [rank for number in misses for rank in ends[number].waiting]
    late = [ends[number] for number in misses if ends[number].outcome is Outcome.TIMED_OUT]
    if late and waiting:
        text = (late[0].detail or "").partition(": ")[0]
        return replace(late[0], detail=hanging_line(text, waiting))
    return (late or [ends[number] for number in misses])[0]


def interface_of(address: str) -> str:
    """Network interface of this machine that has an address.

    Raises:
        OSError: none has.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise OSError(f"no network interface of this machine has {address}, its address by Ray")
