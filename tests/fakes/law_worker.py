"""A worker without a model: the real fork server, fork and pipes, memory by a law, real arithmetic.

It starts in a tenth of the time that PyTorch takes, for tests of what happens around trials. A
file named by ``LAW_WORKER_FAULTS`` makes the worker of this node fail: ``hang`` (once), ``sick`` or
``slow``.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
from builders.observations import environment, measurement

from trials.records.messages import ProbeReply, ProbeRequest, Setup
from trials.records.observation import Environment, Outcome
from trials.training import worker

LIMIT_BYTES = 14_000_000
BYTES_PER_TOKEN = 50_000


class LawWorker:
    """A worker whose peak memory is affine in the tokens of a batch; a step multiplies matrices."""

    def __init__(self, setup: Setup) -> None:
        self._tokens = setup.cell.seq_len
        self.device = type("Device", (), {"memory_limit_bytes": LIMIT_BYTES})()

    def environment(self) -> Environment:
        return environment(host=os.uname().nodename)

    def probe(self, request: ProbeRequest, _report: worker.Report) -> ProbeReply:
        faults = os.environ.get("LAW_WORKER_FAULTS")
        fault = Path(faults).read_text(encoding="utf-8").strip() if faults else ""
        if fault == "sick":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        if faults and fault == "hang":
            Path(faults).write_text("", encoding="utf-8")
            time.sleep(3600)
        work = 20 if fault == "slow" else 1
        peak = 1_000_000 + BYTES_PER_TOKEN * self._tokens * request.batch_size
        if peak > LIMIT_BYTES:
            return ProbeReply(
                batch_size=request.batch_size, outcome=Outcome.OUT_OF_MEMORY, detail="by the law"
            )
        steps = tuple(self._step(work * request.batch_size) for _ in range(6))
        return ProbeReply(
            batch_size=request.batch_size,
            outcome=Outcome.FITS,
            measurement=measurement(peak, steps if request.timing is not None else ()),
        )

    def _step(self, batch_size: int) -> float:
        matrix = np.ones((250, 250))
        began = time.perf_counter()
        for _ in range(batch_size):
            matrix @= np.eye(250)
        return time.perf_counter() - began


if __name__ == "__main__":
    worker.die_with_parent(int(sys.argv[1]))
    worker.Worker = LawWorker  # type: ignore[assignment, misc]
    worker.import_libraries = lambda *_: None
    replies = os.dup(1)
    os.dup2(2, 1)
    worker.serve_probes(worker.MessagePipe(os.dup(0), replies))
