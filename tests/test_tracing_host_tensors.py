"""Counting of a rank's tensors on the host."""

import torch

from trials.simulation.tracing.ranks.host_tensors import HostTensors


def test_a_storage_counts_once_and_until_its_end() -> None:
    """Views share it; the peak stays."""
    host = HostTensors()
    first, second = torch.zeros(300), torch.zeros(100)
    for tensor in (first, first[:10], second):
        host.note(tensor)
    assert (host.live_bytes, host.peak_bytes) == (1600, 1600)
    del first, tensor
    assert (host.live_bytes, host.peak_bytes) == (400, 1600)
    host.close()
    del second
    assert host.live_bytes == 400


def test_pinned_memory_takes_the_next_power_of_two() -> None:
    """Its copy is beside the tensor for a moment, and takes its place."""
    host = HostTensors()
    weights = torch.zeros(300)
    host.pin(weights)
    assert (host.live_bytes, host.peak_bytes) == (2048, 1200 + 2048)
    host.note(weights.view(3, 100))
    assert host.live_bytes == 2048
    host.pin(torch.zeros(256))
    assert (host.live_bytes, host.peak_bytes) == (2048, 2048 + 2 * 1024)
