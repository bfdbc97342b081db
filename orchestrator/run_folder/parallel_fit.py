"""A long log, read and fitted by several processes; a short one is fitted before they start."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fitting.families.fit_family import Each
from fitting.fit import Fits, fit_laws, fit_observations
from fitting.points.observation_columns import Columns, columns_of, joined
from orchestrator.run_folder.observation_log import BadLineError, read_lines
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.local_storage import LocalStorage, lines_of
from orchestrator.storage.run_storage import StoreError
from trials.child_process.parent_death import die_with_parent
from trials.records.log_reader import LineReader

LONG_BYTES = 100 * 2**20  # from here on processes save more than their start takes
PART_BYTES = 64 * 2**20  # read at once: a second or so
MOST_PROCESSES = 8  # each takes some 150 MiB
MOST_AT_ONCE = 64  # items that a process is given at once
SHARES = 64  # into which items are divided, at least

A = TypeVar("A")
B = TypeVar("B")


def fits_of(folder: RunFolder) -> Fits:
    """Every law of a run, the same however many processes find it.

    Raises:
        StoreError: a line of the log cannot be read, or a process was killed.
        ValueError: an observation holds a number that cannot be.
    """
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    place = folder.place
    # Of a bucket most of the time goes into asking for it.
    parts = _parts(place.file) if isinstance(place, LocalStorage) and processes > 1 else []
    if not parts:
        return fit_observations(folder.each_observation())
    try:
        with _in_processes(processes) as each:
            return fit_laws(joined(_columns(parts, each)), each)
    except (BrokenProcessPool, BrokenPipeError):  # the second as it began
        raise StoreError(
            f"{folder.path}: a process that read or fitted its observations was killed: see that "
            "memory is free, and run the same command again"
        ) from None


@dataclass(frozen=True, slots=True)
class _Part:
    """Lines that begin in a range of a file's bytes."""

    file: Path
    start: int
    end: int


def _parts(file: Path) -> list[_Part]:
    """Of a long file; none of a short one, or of none."""
    size = file.stat().st_size if file.is_file() else 0
    if size < LONG_BYTES:
        return []
    return [_Part(file, at, min(at + PART_BYTES, size)) for at in range(0, size, PART_BYTES)]


def _columns(parts: Sequence[_Part], each: Each) -> Iterator[Columns]:
    """The columns of each part."""
    before = 0
    try:
        for columns, lines in each(_read, parts):
            yield columns
            before += lines
    except BadLineError as error:
        raise error.of(parts[0].file, before) from None


def _read(part: _Part) -> tuple[Columns, int]:
    """The columns of a part, and how many lines it has."""
    count = 0

    def counted() -> Iterator[bytes]:
        nonlocal count
        for line in lines_of(part.file, part.start, part.end):
            count += 1
            yield line

    columns = columns_of(read_lines(counted(), LineReader().observation))
    return columns, count


@contextmanager
def _in_processes(count: int) -> Iterator[Each]:
    """What calls functions as ``map`` does, in so many processes. All begin at once."""
    # A fork would take threads' locks along.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        count, mp_context=spawn, initializer=die_with_parent, initargs=(os.getpid(),)
    )

    def each(function: Callable[[A], B], items: Iterable[A], /) -> Iterable[B]:
        every = list(items)
        at_once = min(max(len(every) // SHARES, 1), MOST_AT_ONCE)
        return pool.map(function, every, chunksize=at_once)

    try:
        # Ctrl-C goes to every process of a terminal: this one tells the others, in one line.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):
                pool.submit(os.getpid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield each
    finally:
        pool.shutdown(cancel_futures=True)
