"""Fits of a run: a long log is read and fitted by several processes."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fitting.families.fit_family import Map
from fitting.fit import Fits, fit_laws, fit_observations
from fitting.points.observation_columns import Columns, columns_of, joined
from orchestrator.run_folder.observation_log import read_lines
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.local_storage import LocalStorage, lines_of
from orchestrator.storage.run_storage import StoreError
from trials.child_process.process_pool import process_pool
from trials.records.log_reader import LineReader

LONG_BYTES = 100 * 2**20  # from here on, processes save more time than their start takes
PART_BYTES = 64 * 2**20  # read at once, in about a second
MOST_PROCESSES = 8  # each takes some 150 MiB
MOST_AT_ONCE = 64  # items in a chunk for a process
SHARES = 64  # least number of chunks

A = TypeVar("A")
B = TypeVar("B")


def fits_of(folder: RunFolder) -> Fits:
    """Fit every law of a run; the result does not depend on the number of processes.

    Raises:
        StoreError: a line of the log cannot be read, or a process was killed.
        ValueError: an observation holds an impossible number.
    """
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    storage = folder.storage
    # A log in a bucket takes longer to download than to parse: processes would not help.
    parts = _parts(storage.file) if isinstance(storage, LocalStorage) and processes > 1 else []
    if not parts:
        return fit_observations(folder.each_observation())
    try:
        with process_pool(processes) as pool:
            map_ = _map_of(pool)
            return fit_laws(joined(map_(_read, parts)).without_repeats(), map_)
    except BrokenProcessPool:
        raise StoreError(
            f"{folder.path}: a process that read or fitted its observations was killed: free some "
            "memory, and run the same command again"
        ) from None


@dataclass(frozen=True, slots=True)
class _LineRange:
    """Lines that begin in a range of a file's bytes."""

    file: Path
    start: int
    end: int


def _parts(file: Path) -> list[_LineRange]:
    """Parts of a long file; empty for a short or missing one."""
    size = file.stat().st_size if file.is_file() else 0
    if size < LONG_BYTES:
        return []
    return [_LineRange(file, at, min(at + PART_BYTES, size)) for at in range(0, size, PART_BYTES)]


def _read(part: _LineRange) -> Columns:
    """Columns of a part."""
    lines = lines_of(part.file, part.start, part.end)
    observations = read_lines(part.file, lines, LineReader().observation_or_none, start=part.start)
    return columns_of(observations)


def _map_of(pool: ProcessPoolExecutor) -> Map:
    """A parallel ``map``."""

    def map_(function: Callable[[A], B], items: Iterable[A], /) -> Iterable[B]:
        listed = list(items)
        chunk = min(max(len(listed) // SHARES, 1), MOST_AT_ONCE)
        return pool.map(function, listed, chunksize=chunk)

    return map_
