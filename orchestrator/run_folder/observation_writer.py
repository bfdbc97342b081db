"""Writer of observations: appended, on disk before the sweep goes on."""

from typing import Self

from pydantic import BaseModel

from orchestrator.run_folder.observation_log import bytes_of
from orchestrator.run_folder.run_folder import RunFolder
from trials.records.profile import Logged


class ObservationWriter:
    """The one writer of a run's observations. A context manager; a second one is refused.

    Raises:
        StoreError: on entering, when another driver is writing.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._log = run.place.log()
        self._written: set[str] = set()

    def __enter__(self) -> Self:
        self._log.open()
        try:
            self._written = {o.key for o in self._run.each_observation()}
            self._written |= {p.key for p in self._run.profiles()}
            self._written |= self._log.recover(self._written)
        except BaseException:
            self._log.close(failed=True)
            raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._log.close(failed=error is not None)

    def append(self, observation: Logged) -> bool:
        """Writes one observation, or profile, so that no crash can lose it.

        Returns:
            Whether it was new: one that is there already is not written again.

        Raises:
            StoreError: the disk would not take it; what was there before is untouched.
        """
        if observation.key in self._written:
            return False
        self._log.append(observation.model_dump_json().encode() + b"\n")
        self._written.add(observation.key)
        return True

    def write(self, name: str, content: BaseModel) -> None:
        """Replaces one file of the run, as ``RunFolder.write``, but waits for no bucket.

        A sweep's trials go on while its bucket is away: the file is there when this is left.

        Raises:
            StoreError: it could not be written; the old one is still there.
        """
        self._log.write(name, bytes_of(content))
