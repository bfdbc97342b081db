"""Writer of observations: each is on the disk before the sweep continues."""

from typing import Self

from pydantic import BaseModel

from orchestrator.run_folder.observation_log import bytes_of
from orchestrator.run_folder.run_folder import RunFolder
from trials.records.profile import Logged, is_progress


class ObservationWriter:
    """The only writer of a run's observations. A context manager.

    Attributes:
        verdicts: number of verdicts on probes and profiles that it has written.

    Raises:
        StoreError: on entering, when another driver is writing.
    """

    def __init__(self, run: RunFolder) -> None:
        self.verdicts = 0
        self._run = run
        self._log = run.storage.log()
        self._written: set[str] = set()

    def __enter__(self) -> Self:
        self._log.open()
        try:
            self._written = {o.key for o in self._run.each_observation()}
            self._written |= {p.key for p in self._run.profiles()}
            self._written |= {link.key for link in self._run.links()}
            self._written |= self._log.recover(self._written)
        except BaseException:
            self._log.close(failed=True)
            raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._log.close(failed=error is not None)

    def append(self, observation: Logged) -> bool:
        """Write an observation, a profile or the times of a link, durably.

        Returns:
            Whether it was new: a record that the run has is not written again.

        Raises:
            StoreError: the disk refused it; earlier records are untouched.
        """
        if observation.key in self._written:
            return False
        self._log.append(observation.model_dump_json().encode() + b"\n")
        self._written.add(observation.key)
        self.verdicts += is_progress(observation)
        return True

    def write(self, name: str, content: BaseModel) -> None:
        """Replace a file of the run, as ``RunFolder.write``, without waiting for a bucket.

        Trials go on while the bucket does not answer; the file is in it when this writer has
        closed.

        Raises:
            StoreError: it could not be written; the old file is untouched.
        """
        self._log.write(name, bytes_of(content))
