"""Ranks of a trial on several nodes: a Ray actor on each further node, in the trial's own group."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.scheduling.node_queue import NodeAddress
from trials.child_process.child_prober import ChildProber
from trials.child_process.forked_child import ProbeEnd
from trials.child_process.nodes_prober import NodeProber, NodesProber, ThreadProber, interface_of
from trials.child_process.parent_death import die_with_parent
from trials.records.messages import ProbeRequest, RankPlace
from trials.run_trial import child_prober
from trials.trial import TrialTask

ACTOR_SECONDS = 120.0  # for a worker to start on a node that is up


class NodeLostError(RuntimeError):
    """A further node of a trial was lost, or starts no worker."""


def this_node() -> NodeAddress:
    """The node of this Ray worker."""
    return NodeAddress(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def nodes_of_group() -> frozenset[str]:
    """Ids of the nodes that the placement group of this Ray worker has parts on."""
    group = ray.util.get_current_placement_group()
    if group is None:
        return frozenset()
    return frozenset(ray.util.placement_group_table(group)["bundles_to_node_id"].values())


class RanksOfNode:
    """Prober of the ranks on a further node, as an actor there.

    Args:
        task: input of the trial.
        number: number of the node among those of the trial.
    """

    def __init__(self, task: TrialTask, number: int) -> None:
        self._task = task
        self._number = number
        self._prober: ChildProber | None = None

    def where(self) -> tuple[str, NodeAddress]:
        """Id of the actor, and its node."""
        return ray.get_runtime_context().get_actor_id(), this_node()

    def meet(self, host: str, port: int) -> None:
        """Have the ranks meet those of the other nodes there."""
        interface = interface_of(this_node().address)
        place = RankPlace(node=self._number, interface=interface, host=host, port=port)
        self._prober = child_prober(self._task, place=place)

    def probe(self, request: ProbeRequest, *, fresh: bool) -> ProbeEnd:
        """Answer a probe, as ``Prober`` says."""
        assert self._prober is not None
        die_with_parent(os.getppid())  # with the raylet, while this thread runs
        return self._prober.probe(request, fresh=fresh)

    def interrupt(self) -> None:
        """Have the probe end as failed."""
        assert self._prober is not None
        self._prober.interrupt()


@dataclass(frozen=True, slots=True)
class _FurtherNode(NodeProber):
    """The ranks of a further node, by their actor."""

    actor: Any

    def probe(self, request: ProbeRequest, *, fresh: bool) -> Future[ProbeEnd]:
        begun: Future[ProbeEnd] = self.actor.probe.remote(request, fresh=fresh).future()
        return begun

    def interrupt(self) -> None:
        self.actor.interrupt.remote()

    def close(self) -> None:
        ray.kill(self.actor)


class NodesOfTrial:
    """Nodes of a trial, of which this one is the first.

    Args:
        task: input of the trial.
        resources: those of each part of the placement group of this Ray worker.

    Attributes:
        nodes: all nodes, in the order of the ranks.

    Raises:
        NodeLostError: one of them is gone, or starts no worker.
    """

    def __init__(self, task: TrialTask, resources: Mapping[str, float]) -> None:
        self._task = task
        request = dict(resources)
        options = {"num_cpus": request.pop("CPU"), "num_gpus": request.pop("GPU", 0.0)}
        group = ray.util.get_current_placement_group()
        self._actors = [
            ray.remote(RanksOfNode)
            .options(
                **options,
                resources=request,
                max_concurrency=2,  # an interrupt comes during a probe
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            )
            .remote(task, number)
            for number in range(1, task.cell.nodes)
        ]
        self._addresses = self._located()
        self.nodes = (this_node(), *self._addresses.values())

    def _located(self) -> dict[str, NodeAddress]:
        """Node of each actor, by the actor's id, once all have started."""
        try:
            return dict(ray.get([a.where.remote() for a in self._actors], timeout=ACTOR_SECONDS))
        except (GetTimeoutError, RayActorError):
            raise NodeLostError(
                f"a node of its ranks was lost, or started no worker within {ACTOR_SECONDS:g} s"
            ) from None

    @contextlib.contextmanager
    def prober(self) -> Iterator[NodesProber]:
        """Prober of the trial's ranks on all nodes.

        Raises:
            NodeLostError: a node was lost.
        """
        host = self.nodes[0].address
        with socket.create_server((host, 0)) as meeting, self._losses():
            port = meeting.getsockname()[1]
            ray.get([actor.meet.remote(host, port) for actor in self._actors])
            place = RankPlace(
                node=0,
                interface=interface_of(host),
                host=host,
                port=port,
                listening=meeting.fileno(),
            )
            own = ThreadProber(child_prober(self._task, place=place))
            with NodesProber([own, *map(_FurtherNode, self._actors)]) as prober:
                yield prober

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        """Raise what Ray reports of a lost actor as the loss of its node."""
        try:
            yield
        except RayActorError as error:
            lost = (n.address for a, n in self._addresses.items() if error.actor_id in {None, a})
            name = " or ".join(lost)
            raise NodeLostError(f"node {name} of its ranks, or the worker there, died") from None
