"""Command ``learn``: fine-tune on a user's data and keep the training curve."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.cli.options.data import add_data
from orchestrator.cli.options.prices import add_catalog
from orchestrator.cli.options.recipe import MODEL, add_recipe
from orchestrator.cli.options.value_types import above_zero, count, positive
from orchestrator.console import print_result, remark

EPOCHS, BATCH_SIZE, PATIENCE = 10, 8, 2


def add_options(commands: Any) -> None:
    """Add the command."""
    learn = commands.add_parser(
        "learn",
        help="fine-tune on a data set, test each epoch, and find when learning stops",
        description="Fine-tunes a model on this machine, on its GPU or else its CPU, and tests it "
        "on held-out examples before and after every epoch. A model with experts is trained sparse "
        "and dense. The last field or message of an example is its answer, the only part with a "
        "loss. A second run resumes after the last epoch.",
    )
    add = learn.add_argument
    add(
        "dataset",
        metavar="DATA",
        help="a JSON, JSONL, CSV or Parquet file, a folder of them, or a data set of the hub",
    )
    add("--model", required=True, help=MODEL)
    add("--out", metavar="DIR", help="a run folder, or any other (default: runs/learn)")
    add(
        "--gpu", metavar="KEY", help="key of 'catalog gpus' (default: this machine's GPU, else cpu)"
    )
    add_catalog(learn)
    add(
        "--weights",
        choices=("random", "pretrained"),
        help="initial weights (default: pretrained where there are any)",
    )
    add(
        "--active-experts",
        metavar="N,N",
        help="experts per token, one curve each (default: the model's own, and all)",
    )
    _add_testing(learn)
    _add_training(learn)
    add("--threads", type=positive, metavar="N", help="CPU threads (default: one per core)")
    add(
        "--no-checkpoints",
        action="store_true",
        help="save no checkpoints (trained weights and optimizer state, in DIR/learning); an "
        "interrupted curve then starts again from the beginning",
    )
    add("--json", action="store_true", help="print all results as JSON")
    add_recipe(
        learn,
        method="lora; full for random weights",
        precision="bf16 on a GPU, fp32 on the CPU",
    )
    add_data(learn)
    learn.set_defaults(run_command=run)


def _add_testing(learn: argparse.ArgumentParser) -> None:
    add = learn.add_argument
    add(
        "--choices",
        metavar="FIELD|A,B,…",
        help="possible answers: one field with a list of them, or a field each; accuracy is then "
        "that of the likeliest choice (default: accuracy of the answers' tokens)",
    )
    add(
        "--held-out",
        type=above_zero,
        metavar="SHARE|N",
        help="examples to test with (default: a tenth, or all of --held-out-data or "
        "--held-out-split; at most 1000)",
    )
    add("--held-out-data", metavar="DATA", help="test with this data set")
    add("--held-out-split", metavar="NAME", help="test with this split")


def _add_training(learn: argparse.ArgumentParser) -> None:
    add = learn.add_argument
    add("--epochs", type=positive, default=EPOCHS, help=f"most epochs (default: {EPOCHS})")
    add(
        "--batch-size",
        type=positive,
        default=BATCH_SIZE,
        help=f"examples per step (default: {BATCH_SIZE})",
    )
    add(
        "--learning-rate",
        type=above_zero,
        default=5e-5,
        metavar="RATE",
        help="default: 5e-5, as in arXiv 2408.04693; random weights need more",
    )
    add(
        "--schedule",
        choices=("constant", "linear", "cosine"),
        default="constant",
        help="schedule of the learning rate (default: constant); the others reach zero at the last "
        "of --epochs, where every curve then levels off",
    )
    add(
        "--warmup-steps",
        type=count,
        default=0,
        metavar="N",
        help="steps in which the learning rate rises (default: 0)",
    )
    add(
        "--patience",
        type=positive,
        default=PATIENCE,
        metavar="N",
        help="learning has stopped after N epochs in a row that improve on the best one by no more "
        f"than noise (default: {PATIENCE})",
    )
    add("--whole", action="store_true", help="train all of --epochs, even if learning stops")
    add(
        "--seed",
        type=count,
        default=0,
        metavar="N",
        help="seed of the split, the weights and the order of examples (default: 0)",
    )


def run(options: argparse.Namespace) -> int:
    """Train the curves that are not in the log yet, and print them all.

    Returns:
        0 when every curve is complete, else 1.

    Raises:
        DataError: the options or the data are wrong; a line for each mistake.
        StoreError: the folder cannot be used.
    """
    from rich.filesize import decimal

    from fitting.learning_curves import best, curves
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
