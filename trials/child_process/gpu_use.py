"""Use of this machine's GPUs by its PyTorch, found out in a process of its own.

The process that asks stays without PyTorch and without a CUDA context.
"""

import importlib
import subprocess
import sys

from pydantic import ValidationError

from gpu_catalog.record import Record
from trials.child_process.environment import child_environment

TIMEOUT_SECONDS = 300.0  # the first import of PyTorch from a cold disk, and a CUDA context


class GpuUse(Record):
    """Result of a trial of the GPUs by PyTorch.

    Attributes:
        torch: its version.
        cuda: CUDA that it is built with; None for a build without.
        error: first line of the error of a small product in fp32 and bf16; None where both ran on
            each GPU.
        free_bytes: memory that nobody held, of the GPU with the least; absent where there was an
            error.
        total_bytes: memory of that GPU; absent as above.
    """

    torch: str
    cuda: str | None = None
    error: str | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None


def use_of_gpu() -> GpuUse:
    """Try the GPUs in a child process, which the check of a driver may crash or hang."""
    command = [sys.executable, "-m", "trials.child_process.gpu_use"]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=child_environment(),
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return GpuUse(torch="?", cuda="?", error=f"no answer within {TIMEOUT_SECONDS:g} s")
    try:
        return GpuUse.model_validate_json(ended.stdout.splitlines()[-1])
    except (IndexError, ValidationError):
        lines = ended.stderr.splitlines() or [f"it ended with {ended.returncode}"]
        return GpuUse(torch="?", cuda="?", error=lines[-1])


def tried() -> GpuUse:
    """Try the GPUs in this process."""
    torch = importlib.import_module("torch")
    version, cuda = str(torch.__version__), torch.version.cuda
    if cuda is None:
        return GpuUse(torch=version)
    count, number = torch.cuda.device_count(), 0
    readings = []
    try:
        for number in range(max(count, 1)):  # without a GPU the first one's error is the reason
            device = torch.device("cuda", number)
            readings.append(torch.cuda.mem_get_info(device))  # before this process takes its share
            for dtype in (torch.float32, torch.bfloat16):
                matrix = torch.ones(64, 64, dtype=dtype, device=device)
                float((matrix @ matrix).sum())
    except Exception as error:  # noqa: BLE001 - whatever it is keeps the GPU from being used
        lines = str(error).strip().splitlines() or [repr(error)]
        where = f"GPU {number}: " if count > 1 else ""
        return GpuUse(torch=version, cuda=cuda, error=f"{where}{lines[0]}")
    free, total = min(readings, key=lambda reading: reading[0] / reading[1])
    return GpuUse(torch=version, cuda=cuda, free_bytes=free, total_bytes=total)


if __name__ == "__main__":
    sys.stdout.write(tried().model_dump_json() + "\n")
