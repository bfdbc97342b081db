"""A worker without a model: the real fork server, fork and pipes, memory by a law, real arithmetic.

It starts in a tenth of the time that PyTorch takes, for tests of what happens around trials. A
file named by ``LAW_WORKER_FAULTS`` makes the worker of this node fail: ``hang`` (once), ``sick``,
``slow``, or ``wait``, with which a probe of more than one example does not end.
"""

import os
import time
from functools import partial
from pathlib import Path

import numpy as np
from builders.observations import environment, measurement
from builders.profiles import profile

from trials.records.messages import ProbeReply, ProbeRequest, Setup
from trials.records.observation import Environment, Outcome
from trials.training.serving.fork_loop import Report, run_fork_server, serve
from trials.training.serving.message_pipe import pipe_to_trial

GPU_LIMIT_BYTES = 14_000_000  # of any GPU, as none is there
BYTES_PER_TOKEN = 50_000
DENSE_PROFILE = profile().model_copy(update={"load": None})


class LawWorker:
    """A worker whose peak memory is affine in the tokens of a batch; a step multiplies matrices."""

    def __init__(self, setup: Setup) -> None:
        self._tokens = setup.cell.seq_len
        of_cpu = setup.gpu.usable_memory_bytes if setup.gpu.kind == "cpu" else None
        self._limit_bytes = of_cpu or GPU_LIMIT_BYTES
        self.device = type("Device", (), {"memory_limit_bytes": self._limit_bytes})()

    def environment(self) -> Environment:
        return environment(host=os.uname().nodename)

    def probe(self, request: ProbeRequest, _report: Report) -> ProbeReply:
        faults = os.environ.get("LAW_WORKER_FAULTS")
        fault = Path(faults).read_text(encoding="utf-8").strip() if faults else ""
        if fault == "sick":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        if faults and fault == "hang":
            Path(faults).write_text("", encoding="utf-8")
            time.sleep(3600)
        if fault == "wait" and request.batch_size > 1:
            time.sleep(3600)
        work = 20 if fault == "slow" else 1
        peak = 1_000_000 + BYTES_PER_TOKEN * self._tokens * request.batch_size
        if peak > self._limit_bytes:
            return ProbeReply(
                batch_size=request.batch_size, outcome=Outcome.OUT_OF_MEMORY, detail="by the law"
            )
        steps = tuple(self._step(work * request.batch_size) for _ in range(6))
        return ProbeReply(
            batch_size=request.batch_size,
            outcome=Outcome.FITS,
            measurement=measurement(peak, steps if request.timing is not None else ()),
            profile=None if request.profile is None else DENSE_PROFILE,
        )

    def _step(self, batch_size: int) -> float:
        matrix = np.ones((250, 250))
        began = time.perf_counter()
        for _ in range(batch_size):
            matrix @= np.eye(250)
        return time.perf_counter() - began


if __name__ == "__main__":
    make = partial(serve, make_worker=LawWorker)
    run_fork_server(pipe_to_trial(), Setup, make, lambda *_: None)
