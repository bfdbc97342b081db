"""Command ``learn``: fine-tune on a user's data and keep the training curve."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.cli.options.groups import CATALOG, MODEL, RENDERING, add_recipe
from orchestrator.cli.options.table import add_table
from orchestrator.cli.options.value_types import above_zero, count, positive
from orchestrator.console import print_result, remark

OPTIONS = f"""
dataset DATA             a JSON, JSONL, CSV or Parquet file, a folder of them, or a data set of the
                         hub
--model MODEL            {MODEL}
--out DIR                folder of the results, such as a run folder (default: runs/learn)
--gpu KEY                key of 'catalog gpus' (default: this machine's GPU, else cpu)
{CATALOG}
--weights {{random,pretrained}}
                         initial weights (default: pretrained if there are any)
--active-experts N,N     experts per token; one curve for each (default: the model's own number, and
                         all)
--choices FIELD|A,B,…    possible answers: one field with a list, or one field per answer. An
                         example then counts as correct if the right answer is the most likely one
                         (default: if greedy decoding would give the answer)
--held-out SHARE|N       share or number of examples to test on (default: a tenth, or all of
                         --held-out-data or --held-out-split; at most 1000)
--held-out-data DATA     test on this data set
--held-out-split NAME    test on this split
--epochs EPOCHS          largest number of epochs (default: 10)
--batch-size BATCH_SIZE  examples per step (default: 8)
--learning-rate RATE     learning rate (default: 5e-5, as in arXiv 2408.04693; random weights need
                         more)
--schedule {{constant,linear,cosine}}
                         schedule of the learning rate (default: constant). The others reach zero
                         after the last of --epochs, so that every curve levels off there
--warmup-steps N         steps in which the learning rate rises from zero (default: 0)
--patience N             stop after N epochs in a row that are not better than the best one by more
                         than noise (default: 2)
--whole                  train all of --epochs, even without improvement
--seed N                 seed of the split, the weights and the order of examples (default: 0)
--threads N              CPU threads (default: one per core)
--no-checkpoints         save no checkpoints (trained weights and optimizer state, in DIR/learning).
                         An interrupted curve then starts from the beginning
--json                   print all results as JSON
"""


def add_options(commands: Any) -> None:
    """Add the command."""
    learn = commands.add_parser(
        "learn",
        run=run,
        help="fine-tune on a data set, test each epoch, and find when learning stops",
        description="Fine-tune a model on this machine's GPU, or on its CPU without one, and test "
        "it on held-out examples before training and after every epoch. A model with experts "
        "is trained sparse and dense. The last field or message of an example is its answer; the "
        "loss covers only the answer. To resume after the last epoch, run the command again.",
    )
    add_table(
        learn,
        OPTIONS,
        required=["--model"],
        held_out=above_zero,
        epochs=positive,
        batch_size=positive,
        learning_rate=above_zero,
        warmup_steps=count,
        seed=count,
    )
    learn.set_defaults(
        epochs=10,
        batch_size=8,
        learning_rate=5e-5,
        schedule="constant",
        warmup_steps=0,
        patience=2,
        seed=0,
    )
    add_recipe(
        learn,
        method="lora; full for random weights",
        precision="bf16 on a GPU, fp32 on the CPU",
    )
    add_table(learn, RENDERING)


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
