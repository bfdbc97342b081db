"""``learn``: fine-tunes cells on a data set in children, and keeps every epoch's test."""

import argparse
import datetime as dt
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.status import Status

from gpu_catalog.record import Record
from orchestrator.learn_data import ReadData, read_data
from orchestrator.learn_options import AskedLearning, asked_learning
from orchestrator.learn_store import LearnedWriter
from orchestrator.learn_tables import (
    best_rows,
    curve_rows,
    experts_text,
    learning_section,
    sparse_against_dense,
)
from orchestrator.learned import STOP_RULE, Curve, attempts, best, curves, is_done
from orchestrator.output import remark, say
from orchestrator.place import RunPath, StoreError
from orchestrator.store import LEARNING
from trials.learn_child import ChildLearner, LearnError, NoStartError
from trials.learning import Heartbeat, LearnedEpoch, LearnReady, LearnSetup, curve_key
from trials.workload import Cell


def learn_command(options: argparse.Namespace, path: RunPath) -> int:
    """Learns what is asked for and not known yet, and tells the curves.

    Args:
        options: those of ``learn``.
        path: the folder.

    Returns:
        0 when every curve is whole, else 1.

    Raises:
        DataError: the options or the data are wrong; a line for each mistake.
        StoreError: the folder cannot be used.
    """
    if not isinstance(path, Path):
        raise StoreError(f"{path}: 'learn' keeps its results in a local folder: give one as --out")
    asked = asked_learning(options)
    data = read_data(asked.data)
    for line in data.remarks:
        remark(line)
    keys = [curve_key(cell, asked.training, data.facts) for cell in asked.cells]
    failures = []
    with LearnedWriter(path) as writer, tempfile.TemporaryDirectory() as folder:
        queries = Path(folder) / "queries.jsonl"
        queries.write_text(
            "".join(f"{query.model_dump_json()}\n" for query in data.queries),
            encoding="utf-8",
            errors="replace",
        )
        for cell, key in zip(asked.cells, keys, strict=True):
            try:
                _Learning(asked, data, cell, key, writer).run(queries)
            except LearnError as error:
                failures.append(str(error))
                if isinstance(error, NoStartError):
                    break  # the others would not start either
        known = [curve for curve in curves(writer.records) if curve.key in keys]
    for line in failures:
        remark(line)
    if known:
        say(_as_json(known) if options.json else learning_section(known))
        if any(each.is_told for each in map(best, known)):
            remark(f"{writer.path}: 'rank RUN --epochs auto --learned {writer.path}' goes by it")
    if writer.state_bytes:
        remark(
            f"{path / LEARNING}: {decimal(writer.state_bytes)} of state, to go on from with more "
            "--epochs or --patience, or --whole: delete it when that is not wanted"
        )
    return 1 if failures else 0


class _Learning:
    """One curve, learnt to its end."""

    def __init__(
        self,
        asked: AskedLearning,
        data: ReadData,
        cell: Cell,
        key: str,
        writer: LearnedWriter,
    ) -> None:
        self._asked = asked
        self._data = data
        self._cell = cell
        self._key = key
        self._writer = writer

    def run(self, queries: Path) -> None:
        """Learns what is left of it.

        Raises:
            LearnError: it came to nothing; what was learnt is kept.
        """
        known = next((c for c in curves(self._writer.records) if c.key == self._key), None)
        if known is not None and self._is_done(known):
            return
        checkpoint = self._writer.checkpoint(self._key) if self._asked.checkpoints else None
        setup = LearnSetup(
            cell=self._cell,
            model=self._asked.model,
            gpu=self._asked.gpu,
            seed=self._asked.training.seed,
            threads=self._asked.threads,
            training=self._asked.training,
            tokenizer=self._asked.data.tokenizer,
            queries_file=str(queries),
            curve=self._key,
            checkpoint_file=None if checkpoint is None else str(checkpoint),
        )
        console = Console(stderr=True)
        with console.status(f"{self._name}: building") as status, ChildLearner(setup) as child:
            self._learn(child, status)

    def _learn(self, child: ChildLearner, status: Status) -> None:
        self._tell_ready(child.ready)
        epochs, attempt = self._begun(child.ready)
        while not epochs or not self._is_done(Curve(tuple(epochs))):
            number = len(epochs)
            started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
            reply = child.epoch(number, attempt, lambda beat: status.update(self._doing(beat)))
            assert reply.tested is not None  # else it has raised
            record = LearnedEpoch(
                cell=self._cell,
                training=self._asked.training,
                data=self._data.facts,
                attempt=attempt,
                epoch=number,
                train_loss=reply.train_loss,
                steps=reply.steps,
                skipped_steps=reply.skipped_steps,
                tested=reply.tested,
                environment=child.ready.environment,
                started_at=started_at,
            )
            self._writer.append(record)
            epochs.append(record)
            self._tell(record, reply.remark)

    def _tell_ready(self, ready: LearnReady) -> None:
        if ready.remark is not None:
            remark(ready.remark)
        if ready.cut_off:
            remark(f"{self._name}: {ready.cut_off:,} queries were cut off at {self._cutoff} tokens")
        if ready.left_out:
            remark(
                f"{self._name}: {ready.left_out:,} queries were left out: their answers, or held "
                f"out all of them, are beyond {self._cutoff} tokens"
            )

    def _begun(self, ready: LearnReady) -> tuple[list[LearnedEpoch], int]:
        """What of the curve is learnt, and which attempt goes on with it: that of the state."""
        known = attempts(self._writer.records).get(self._key)
        if known is None:
            return [], 1
        # Without a state the latest can go on if it was never trained.
        attempt = max(known) if ready.attempt is None else ready.attempt
        epochs = known.get(attempt, ())
        # A state may be one ahead of what is recorded: it was killed between the two.
        if epochs and ready.epoch in {epochs[-1].epoch, epochs[-1].epoch + 1}:
            return list(epochs), attempt
        remark(f"{self._name}: no state of its last epoch was kept: beginning anew")
        return [], 1 + max(known)

    def _is_done(self, curve: Curve) -> bool:
        return is_done(curve, self._asked.training, whole=self._asked.whole)

    @property
    def _cutoff(self) -> int:
        return self._asked.training.cutoff

    @property
    def _name(self) -> str:
        return f"{self._cell.model}, {experts_text(self._cell)}"

    def _doing(self, beat: Heartbeat) -> str:
        return f"{self._name}: {beat.doing}, {beat.done:,} of {beat.total:,}"

    def _tell(self, record: LearnedEpoch, note: str | None) -> None:
        tested = record.tested
        skipped = f", {record.skipped_steps} steps skipped" if record.skipped_steps else ""
        remark(
            f"{self._name}, epoch {record.epoch}: held-out loss {tested.loss:.4g}, accuracy "
            f"{100 * tested.accuracy:.1f} %{skipped}"
        )
        if note is not None:
            remark(note)


def _as_json(found: Sequence[Curve]) -> str:
    """All of it, for programs."""
    parts: dict[str, Sequence[Record]] = {
        "curves": curve_rows(found),
        "stops": best_rows(found),
        "sparse_against_dense": sparse_against_dense(found),
    }
    told = {name: [row.model_dump(mode="json") for row in rows] for name, rows in parts.items()}
    return json.dumps(told | {"rule": STOP_RULE})
