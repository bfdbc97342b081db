"""Command ``learn``: fine-tune on a user's data and keep the training curve."""

import argparse
import tempfile
from pathlib import Path

from rich.filesize import decimal

from fitting.learning_curves import best, curves
from orchestrator.console import print_result, remark
from orchestrator.datasets.training_data import read_data
from orchestrator.reporting.sections.learning_section import learning_json, learning_section
from orchestrator.request import request_of
from orchestrator.run_folder.file_names import LEARNING
from orchestrator.run_folder.learning_log import LearnedWriter
from orchestrator.running.learning_options import LearnOptions, learning_request
from orchestrator.running.learning_runner import LearningRun
from orchestrator.storage.run_storage import StoreError, output_path
from trials.child_process.learning_child import LearnError, NoStartError
from trials.records.learning import curve_key


def run(options: argparse.Namespace) -> int:
    """Train the curves that are not in the log yet, and print them all.

    Returns:
        0 when every curve is complete, else 1.

    Raises:
        DataError: the options or the data are wrong; a line for each mistake.
        StoreError: the folder cannot be used.
    """
    path = output_path(options.out, "learn")
    if not isinstance(path, Path):
        raise StoreError(f"{path}: 'learn' keeps its results in a local folder: give one as --out")
    request = learning_request(request_of(LearnOptions, vars(options)))
    data = read_data(request.data)
    for line in data.remarks:
        remark(line)
    keys = {cell: curve_key(cell, request.training, data.facts) for cell in request.cells}
    failures = []
    with LearnedWriter(path) as writer, tempfile.TemporaryDirectory() as folder:
        examples = Path(folder) / "examples.jsonl"
        lines = "".join(f"{example.model_dump_json()}\n" for example in data.examples)
        examples.write_text(lines, encoding="utf-8", errors="replace")
        for cell, key in keys.items():
            try:
                LearningRun(request, data, cell, key, writer).run(examples)
            except LearnError as error:
                failures.append(str(error))
                if isinstance(error, NoStartError):
                    break  # the others would not start either
        learned = [curve for curve in curves(writer.records) if curve.key in keys.values()]
    for line in failures:
        remark(line)
    if learned:
        print_result(learning_json(learned) if options.json else learning_section(learned))
        if any(best(curve).is_conclusive for curve in learned):
            remark(f"{writer.path}: 'rank RUN --epochs auto --learned {writer.path}' uses it")
    if writer.state_bytes:
        remark(
            f"{path / LEARNING}: {decimal(writer.state_bytes)} of checkpoints, to resume from with "
            "more --epochs or --patience, or with --whole: delete it when you no longer need it"
        )
    return 1 if failures else 0
