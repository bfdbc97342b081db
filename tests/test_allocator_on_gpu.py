"""The model of PyTorch's caching allocator against the allocator, on a GPU."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
import torch

from trials.simulation.memory.allocator import replay
from trials.simulation.memory.blocks import AllocatorPeaks

pytestmark = pytest.mark.gpu

LIVE_BYTES = 4 * 2**30

# In a process of its own, so that nothing else is allocated. A segment's address is that of the
# block it was taken for.
STREAM = """
import json
import random
import sys
import torch

seed, live_limit, memory_limit = map(int, sys.argv[1:])
torch.cuda.init()
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.memory_reserved() == 0
if memory_limit:
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(memory_limit / total)
draw = random.Random(seed)
names, sizes, addresses, live = [], [], [], {}
held, segments, failed_at = 0, 0, None
while len(names) < 10_000:
    size = round(2 ** draw.uniform(0, 26))
    name = len(names)
    if live and (draw.random() < 0.45 or held + size > live_limit):
        name = draw.choice(list(live))
        held -= live.pop(name).numel()
        names.append(name)
        sizes.append(-1)
        continue
    names.append(name)
    sizes.append(size)
    try:
        live[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        failed_at = name
        break
    held += size
    made = torch.cuda.memory_stats()["segment.all.allocated"]
    if made > segments:
        addresses.append(live[name].data_ptr())
    assert made - segments <= 1
    segments = made
statistics = torch.cuda.memory_stats()
print(json.dumps({
    "names": names,
    "sizes": sizes,
    "addresses": addresses,
    "peaks": [
        statistics["allocated_bytes.all.peak"],
        statistics["reserved_bytes.all.peak"],
        statistics["num_alloc_retries"],
        failed_at,
    ],
}))
"""


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    """Stop without a GPU; skip where it lacks room for the largest stream."""
    if not torch.cuda.is_available():
        pytest.exit("no NVIDIA GPU: CUDA shows none to PyTorch on this machine", returncode=1)
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * LIVE_BYTES:
        pytest.skip(f"{free} bytes are free on the GPU, and {2 * LIVE_BYTES} may be needed")


@cache
def allocated(
    seed: int, memory_limit: int = 0, settings: str = ""
) -> tuple[list[int], list[int], list[int], AllocatorPeaks]:
    """Names and sizes of a random stream, addresses of its segments, and PyTorch's own peaks."""
    others = {k: v for k, v in os.environ.items() if not k.endswith("_ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(seed), str(LIVE_BYTES), str(memory_limit)],
        env=others | ({"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if "expandable_segments not supported" in done.stderr:
        pytest.skip("PyTorch has no expandable segments on this platform")
    recorded = json.loads(done.stdout)
    return (
        recorded["names"],
        recorded["sizes"],
        recorded["addresses"],
        AllocatorPeaks(*recorded["peaks"]),
    )


@pytest.mark.parametrize("seed", range(5))
def test_replayed_peaks_of_any_stream_equal_pytorchs(seed: int) -> None:
    """Given CUDA's segment addresses, peaks of 10,000 events of up to 64 MiB match to the byte."""
    names, sizes, addresses, theirs = allocated(seed)
    assert len(names) == 10_000
    assert replay(names, sizes, capacity_bytes=None, addresses=addresses) == theirs


@pytest.mark.parametrize("seed", range(5))
def test_peaks_without_segment_addresses_are_within_5_percent(seed: int) -> None:
    """Without segment addresses only ties are resolved differently: both peaks are within 5 %."""
    names, sizes, _, theirs = allocated(seed)
    ours = replay(names, sizes, capacity_bytes=None)
    assert ours.peak_allocated_bytes == pytest.approx(theirs.peak_allocated_bytes, rel=0.05)
    assert ours.peak_reserved_bytes == pytest.approx(theirs.peak_reserved_bytes, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_retries_and_the_failing_event_equal_pytorchs(seed: int) -> None:
    """At 90 % of its peak the replay retries as often as PyTorch and fails at the same event."""
    _, _, _, without_limit = allocated(seed)
    # Segments are of 2 MiB: half of one more leaves the fraction's rounding without effect.
    limit = without_limit.peak_reserved_bytes * 9 // 10 // 2**21 * 2**21 + 2**20
    names, sizes, addresses, theirs = allocated(seed, memory_limit=limit)
    assert theirs.retries > 0
    assert replay(names, sizes, capacity_bytes=limit, addresses=addresses) == theirs


@pytest.mark.parametrize("seed", range(5))
def test_replayed_peaks_of_expandable_segments_equal_pytorchs(seed: int) -> None:
    """With expandable segments each pool is one segment: peaks match exactly without addresses."""
    names, sizes, _, theirs = allocated(seed, settings="expandable_segments:True")
    assert len(names) == 10_000
    assert replay(names, sizes, capacity_bytes=None, expandable_segments=True) == theirs
