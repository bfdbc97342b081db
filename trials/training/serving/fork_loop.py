"""The loop of a fork server and the life of its children, whatever they build. No torch."""

import os
from collections.abc import Callable
from typing import Protocol, TypeVar

from pydantic import ValidationError

from trials.child_process.bootstrap import freeze_garbage_collector
from trials.child_process.parent_death import die_with_parent
from trials.devices.host_memory import limit_to_free_memory
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.failure_classification import classify, is_final
from trials.records.messages import (
    ChildStarted,
    Ended,
    ProbeReply,
    ProbeRequest,
    Ready,
    Refused,
    Setup,
    StepsRun,
)
from trials.records.observation import Environment, Outcome
from trials.training.serving.message_pipe import MessagePipe

S = TypeVar("S", bound=Setup)
Report = Callable[[StepsRun], None]


class ProbeDevice(Protocol):
    """Device of a child."""

    @property
    def memory_limit_bytes(self) -> int:
        """Memory that a batch may take."""


class ProbeWorker(Protocol):
    """Model that a child has built, or a stand-in, ready for probes."""

    @property
    def device(self) -> ProbeDevice:
        """Device that holds it."""

    def environment(self) -> Environment:
        """Software and device of this process."""

    def probe(self, request: ProbeRequest, report: Report) -> ProbeReply:
        """Try a batch size.

        Args:
            request: batch size to try.
            report: called after each step of drawn lengths.
        """


def serve(setup: Setup, pipe: MessagePipe, make_worker: Callable[[Setup], ProbeWorker]) -> None:
    """Build the model and answer probes until one does not fit: the life of a child."""
    try:
        worker = make_worker(setup)
        limit = worker.device.memory_limit_bytes
        pipe.send(Ready(environment=worker.environment(), memory_limit_bytes=limit))
    except Exception as error:  # noqa: BLE001 - every failure of a build is an outcome
        outcome, detail = classify(error)
        pipe.send(Refused(outcome=outcome, detail=detail, final=is_final(error)))
        return
    while line := pipe.receive():
        probe = ProbeRequest.model_validate_json(line)
        try:
            reply = worker.probe(probe, pipe.send)
        except Exception as error:  # noqa: BLE001 - every failure of a probe is an outcome
            outcome, detail = classify(error)
            reply = ProbeReply(batch_size=probe.batch_size, outcome=outcome, detail=detail)
        pipe.send(reply)
        if reply.outcome is not Outcome.FITS:
            return


def run_fork_server(
    pipe: MessagePipe,
    setup_type: type[S],
    run_child: Callable[[S, MessagePipe], None],
    import_libraries: Callable[[Recipe, Parallel | None], None],
) -> None:
    """Import the libraries once, then fork children one after another: the life of a fork server.

    The fork server neither builds a model nor touches a device. Each child starts as clean as a new
    process, without the seconds that importing the libraries takes.

    Args:
        pipe: pipes to the trial.
        setup_type: type of the request for a child.
        run_child: body of a child.
        import_libraries: imports what a recipe and the layout of ranks need.
    """
    while line := pipe.receive():
        try:
            setup = setup_type.model_validate_json(line)
        except ValidationError:
            continue  # a request to a child that ended before it read it
        # These libraries may touch a GPU as they load, and CUDA does not survive a fork.
        if setup.gpu.kind == "cpu":
            import_libraries(setup.cell.recipe, setup.cell.parallel)
        freeze_garbage_collector()
        server = os.getpid()
        child = os.fork()
        if child == 0:
            die_with_parent(server)
            if setup.gpu.kind == "cpu":
                limit_to_free_memory()
            # The child itself reports its start, so that this is its first message.
            pipe.send(ChildStarted(pid=os.getpid()))
            run_child(setup, pipe)
            os._exit(0)  # no exit handlers: those of the libraries belong to the fork server
        _, status = os.waitpid(child, 0)
        # The line break ends a message that the child may have left unfinished.
        pipe.send(Ended(exit_code=os.waitstatus_to_exitcode(status)), before=b"\n")
