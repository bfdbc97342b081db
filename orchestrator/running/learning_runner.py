"""A run that learns from data in a child process, epoch by epoch."""

import datetime as dt
import logging
from dataclasses import dataclass
from pathlib import Path

from rich.status import Status

from fitting.learning_curves import LearningCurve, attempts, curves, experts_text, is_done
from orchestrator.datasets.training_data import TrainingData
from orchestrator.run_folder.learning_log import LearnedWriter
from orchestrator.running.learning_options import LearningRequest
from orchestrator.running.progress import status_line
from trials.child_process.learning_child import ChildLearner
from trials.records.cell import Cell
from trials.records.learning import Heartbeat, LearnedEpoch, LearnReady, LearnSetup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LearningRun:
    """One curve, trained to its end."""

    request: LearningRequest
    data: TrainingData
    cell: Cell
    key: str
    writer: LearnedWriter

    @property
    def name(self) -> str:
        """Model and active experts, for messages."""
        return f"{self.cell.model}, {experts_text(self.cell)}"

    def run(self, examples: Path) -> None:
        """Train the epochs that are not in the log.

        Raises:
            LearnError: training failed; earlier epochs are kept.
        """
        if any(c.key == self.key and self._is_done(c) for c in curves(self.writer.records)):
            return
        request = self.request
        checkpoint = str(self.writer.checkpoint(self.key)) if request.checkpoints else None
        setup = LearnSetup(
            cell=self.cell,
            model=request.model,
            gpu=request.gpu,
            seed=request.training.seed,
            threads=request.threads,
            training=request.training,
            tokenizer=request.data.tokenizer,
            examples_file=str(examples),
            curve=self.key,
            checkpoint_file=checkpoint,
        )
        with status_line(f"{self.name}: building") as status, ChildLearner(setup) as child:
            self._log_truncated(child.ready)
            epochs, attempt = self._resumed(child.ready)
            while not epochs or not self._is_done(LearningCurve(tuple(epochs))):
                epochs.append(self._epoch(child, len(epochs), attempt, status))

    def _epoch(
        self, child: ChildLearner, number: int, attempt: int, status: Status
    ) -> LearnedEpoch:
        """Train and log one epoch."""

        def listen(beat: Heartbeat) -> None:
            status.update(f"{self.name}: {beat.doing}, {beat.done:,} of {beat.total:,}")

        started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        reply = child.epoch(number, attempt, listen)
        record = LearnedEpoch(
            **reply.model_dump(exclude={"remark"}),
            cell=self.cell,
            training=self.request.training,
            data=self.data.facts,
            attempt=attempt,
            environment=child.ready.environment,
            started_at=started_at,
        )
        self.writer.append(record)
        scores = record.tested
        skipped = f", {record.skipped_steps} steps skipped" if record.skipped_steps else ""
        text = f"held-out loss {scores.loss:.4g}, accuracy {100 * scores.accuracy:.1f} %{skipped}"
        logger.info("%s, epoch %d: %s", self.name, number, text)
        if reply.remark is not None:
            logger.info(reply.remark)
        return record

    def _log_truncated(self, ready: LearnReady) -> None:
        cutoff = self.request.training.cutoff
        if ready.remark is not None:
            logger.info(ready.remark)
        if ready.cut_off:
            text = f"{ready.cut_off:,} examples were truncated to {cutoff} tokens"
            logger.info("%s: %s", self.name, text)
        if ready.left_out:
            text = "examples were skipped: their answers, or all of them if held out, do not fit"
            logger.info("%s: %s %s into %d tokens", self.name, f"{ready.left_out:,}", text, cutoff)

    def _resumed(self, ready: LearnReady) -> tuple[list[LearnedEpoch], int]:
        """Epochs to continue from and their attempt, which is that of the checkpoint."""
        logged = attempts(self.writer.records).get(self.key)
        if logged is None:
            return [], 1
        # Without a checkpoint the latest attempt can continue if it has not been trained.
        attempt = max(logged) if ready.attempt is None else ready.attempt
        epochs = logged.get(attempt, ())
        # A checkpoint may be one epoch ahead of the log: the run was killed between the two.
        if epochs and ready.epoch in {epochs[-1].epoch, epochs[-1].epoch + 1}:
            return list(epochs), attempt
        logger.info("%s: no checkpoint of its last epoch: beginning anew", self.name)
        return [], 1 + max(logged)

    def _is_done(self, curve: LearningCurve) -> bool:
        return is_done(curve, self.request.training, whole=self.request.whole)
