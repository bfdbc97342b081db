"""Limit of a process's memory: what the host has free, so that no trial takes a machine down."""

import resource
from pathlib import Path

import psutil

# Limits of the group that a container or a batch system runs processes in: version 2, version 1.
GROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def limit_to_free_memory() -> None:
    """Let this process take no more memory than is free now; a larger request then fails.

    Allocators report the failed request in a line, where the kernel would kill a process, not
    always this one. Only for trials on a CPU: CUDA reserves far more than it uses.
    """
    held = psutil.Process().memory_info().data
    limit = held + free_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def free_bytes() -> int:
    """Memory that the host can give without swapping, within the limit of the process's group."""
    limits = [_limit(file) for file in GROUP_LIMITS]
    return min([psutil.virtual_memory().available, *(size for size in limits if size is not None)])


def _limit(file: Path) -> int | None:
    """Limit of a group in bytes; None without one."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
