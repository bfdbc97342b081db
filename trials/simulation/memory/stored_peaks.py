"""Peaks of replays on disk, beside the traces that they follow from. Neither torch nor numba."""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from trials.simulation.memory.blocks import AllocatorPeaks
from trials.simulation.trace_cache import write_whole
from trials.simulation.trace_request import simulation_code

MOST_FILES = 10_000
"""Results to keep. Each takes a block of the disk, usually 4 KiB."""
PEAKS = TypeAdapter(tuple[AllocatorPeaks, ...])


class StoredPeaks:
    """Results of replays by the digest of all that they follow from, the code included.

    A result that cannot be read is computed; one that cannot be written is not kept.

    Args:
        traces: folder of the traces; None to keep nothing.
    """

    def __init__(self, traces: Path | None) -> None:
        self._folder = None if traces is None else traces / "replays"
        self._is_bounded = False

    def get(
        self, content: tuple[object, ...], replay: Callable[[], tuple[AllocatorPeaks, ...]]
    ) -> tuple[AllocatorPeaks, ...]:
        """Stored peaks, or those of a replay, which are stored.

        Args:
            content: all that determines the peaks, of types whose ``repr`` does.
            replay: computes the peaks.
        """
        if self._folder is None:
            return replay()
        text = repr((simulation_code(), content))
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        with contextlib.suppress(OSError, ValueError):
            return PEAKS.validate_json(path.read_bytes())
        peaks = replay()
        with contextlib.suppress(OSError):
            self._make_room(self._folder)
            write_whole(path, lambda file: file.write(PEAKS.dump_json(peaks)))
        return peaks

    def _make_room(self, folder: Path) -> None:
        """Remove the older half of too many files, once per process."""
        if self._is_bounded or not folder.exists():
            return
        self._is_bounded = True
        files = list(folder.iterdir())
        if len(files) >= MOST_FILES:
            files.sort(key=lambda file: file.stat().st_mtime)
            for file in files[: len(files) // 2]:
                file.unlink(missing_ok=True)
