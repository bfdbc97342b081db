"""Host time of this machine relative to the clock's, for ``host-speed``. No torch here."""

import os
import statistics
import subprocess
import sys
from typing import Annotated

from pydantic import Field, ValidationError

from gpu_catalog.errors import UserError
from gpu_catalog.record import Record
from trials.child_process.environment import child_environment

CHILD = (
    *(sys.executable, "-m", "trials.child_process.bootstrap"),
    "trials.host.dispatched_steps",
)
LIMIT_SECONDS = 300.0
"""Longest time of the child, whose imports alone take a minute on a loaded machine."""
Seconds = Annotated[float, Field(gt=0)]


class HostSpeedError(UserError):
    """The host's time cannot be measured; one line on why."""


class DispatchedSteps(Record):
    """Steps of a small model on the CPU, whose tensors are so small that dispatch takes the time.

    Attributes:
        seconds: processor seconds of each step.
        assumed_seconds: seconds that the clock assumes for the host in this step.
        operators: operators of a step, views among them.
    """

    seconds: tuple[Seconds, ...]
    assumed_seconds: Seconds
    operators: int

    @property
    def host_factor(self) -> float:
        """The fastest step relative to the clock's host: other load only makes steps slower."""
        return min(self.seconds) / self.assumed_seconds

    @property
    def median_factor(self) -> float:
        """The median step relative to the clock's host."""
        return statistics.median(self.seconds) / self.assumed_seconds


def dispatched_steps() -> DispatchedSteps:
    """Time steps in a child process.

    Raises:
        HostSpeedError: the child failed, or took too long.
    """
    try:
        child = subprocess.run(
            CHILD,
            env=child_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise HostSpeedError(f"host-speed: no step was timed in {LIMIT_SECONDS:g} s") from None
    try:
        return DispatchedSteps.model_validate_json(child.stdout.rpartition(os.linesep)[2])
    except ValidationError:
        last = (child.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise HostSpeedError(f"host-speed: the steps ended early: {last}") from None
