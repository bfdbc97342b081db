"""``learn``: fine-tunes cells on a data set in child processes, and logs every epoch."""

import argparse
import datetime as dt
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.status import Status

from orchestrator.learn_data import ReadData, read_data
from orchestrator.learn_options import AskedLearning, asked_learning
from orchestrator.learn_store import LearnedWriter
from orchestrator.learn_tables import experts_text, learning_json, learning_section
from orchestrator.learned import Curve, attempts, best, curves, is_done
from orchestrator.output import remark, say
from orchestrator.place import RunPath, StoreError
from orchestrator.store import LEARNING
from trials.learn_child import ChildLearner, LearnError, NoStartError
from trials.learning import Heartbeat, LearnedEpoch, LearnReady, LearnSetup, curve_key
from trials.workload import Cell


def learn_command(options: argparse.Namespace, path: RunPath) -> int:
    """Train the curves that are not in the log yet, and print them all.

    Args:
        options: options of ``learn``.
        path: folder of the log.

    Returns:
        0 when every curve is complete, else 1.

    Raises:
        DataError: the options or the data are wrong; a line for each mistake.
        StoreError: the folder cannot be used.
    """
    if not isinstance(path, Path):
        raise StoreError(f"{path}: 'learn' keeps its results in a local folder: give one as --out")
    request = asked_learning(options)
    data = read_data(request.data)
    for line in data.remarks:
        remark(line)
    keys = {cell: curve_key(cell, request.training, data.facts) for cell in request.cells}
    failures = []
    with LearnedWriter(path) as writer, tempfile.TemporaryDirectory() as folder:
        examples = Path(folder) / "examples.jsonl"
        lines = "".join(f"{example.model_dump_json()}\n" for example in data.queries)
        examples.write_text(lines, encoding="utf-8", errors="replace")
        for cell, key in keys.items():
            try:
                _Learning(request, data, cell, key, writer).run(examples)
            except LearnError as error:
                failures.append(str(error))
                if isinstance(error, NoStartError):
                    break  # the others would not start either
        learned = [curve for curve in curves(writer.records) if curve.key in keys.values()]
    for line in failures:
        remark(line)
    if learned:
        say(learning_json(learned) if options.json else learning_section(learned))
        if any(best(curve).is_conclusive for curve in learned):
            remark(f"{writer.path}: 'rank RUN --epochs auto --learned {writer.path}' goes by it")
    if writer.state_bytes:
        remark(
            f"{path / LEARNING}: {decimal(writer.state_bytes)} of state, to go on from with more "
            "--epochs or --patience, or --whole: delete it when that is not wanted"
        )
    return 1 if failures else 0


@dataclass(frozen=True, slots=True)
class _Learning:
    """One curve, trained to its end."""

    request: AskedLearning
    data: ReadData
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
            queries_file=str(examples),
            curve=self.key,
            checkpoint_file=checkpoint,
        )
        console = Console(stderr=True)
        with console.status(f"{self.name}: building") as status, ChildLearner(setup) as child:
            self._remark_ready(child.ready)
            epochs, attempt = self._resumed(child.ready)
            while not epochs or not self._is_done(Curve(tuple(epochs))):
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
        remark(
            f"{self.name}, epoch {number}: held-out loss {scores.loss:.4g}, accuracy "
            f"{100 * scores.accuracy:.1f} %{skipped}"
        )
        if reply.remark is not None:
            remark(reply.remark)
        return record

    def _remark_ready(self, ready: LearnReady) -> None:
        cutoff = self.request.training.cutoff
        if ready.remark is not None:
            remark(ready.remark)
        if ready.cut_off:
            remark(f"{self.name}: {ready.cut_off:,} examples were truncated to {cutoff} tokens")
        if ready.left_out:
            remark(
                f"{self.name}: {ready.left_out:,} examples were skipped: their answers, or all of "
                f"them if held out, do not fit into {cutoff} tokens"
            )

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
        remark(f"{self.name}: no checkpoint of its last epoch: beginning anew")
        return [], 1 + max(logged)

    def _is_done(self, curve: Curve) -> bool:
        return is_done(curve, self.request.training, whole=self.request.whole)
