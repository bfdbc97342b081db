"""The memory of a trial on a CPU ends where the host's free memory does, in a line."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trials.devices import host_memory
from trials.devices.host_memory import free_bytes

# The child's free memory is told to be little, so that the test takes none of the machine's.
ASKS_FOR_MORE = """
import torch
from trials.devices import host_memory
from trials.records.failure_classification import classify
host_memory.free_bytes = lambda: 256 * 2**20
host_memory.limit_to_free_memory()
torch.empty(64 * 2**20, dtype=torch.uint8).fill_(1)
try:
    torch.empty(2**30, dtype=torch.uint8)
except RuntimeError as error:
    print(*classify(error))
"""


def test_a_request_beyond_the_free_memory_is_an_outcome_of_the_host() -> None:
    """What fits is given; the rest is refused by the allocator, and the process lives on."""
    ended = subprocess.run(
        [sys.executable, "-c", ASKS_FOR_MORE],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.stdout.startswith("HOST_OUT_OF_MEMORY ")
    assert "tried to allocate 1073741824 bytes" in ended.stdout


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of a container may have more memory than the container may use."""
    files = (tmp_path / "memory.max", tmp_path / "absent")
    monkeypatch.setattr(host_memory, "GROUP_LIMITS", files)
    files[0].write_text("1048576\n")
    assert free_bytes() == 2**20
    files[0].write_text("max\n")
    assert 2**20 < free_bytes() <= psutil.virtual_memory().total
