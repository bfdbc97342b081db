"""Command ``dataset``: the lengths of a data set's examples."""

import argparse
from pathlib import Path
from typing import Any

from orchestrator.cli.options.groups import HISTOGRAM, RENDERING
from orchestrator.cli.options.table import add_table
from orchestrator.console import print_result, remark

COUNTED_AT_ONCE = 100_000  # examples between two messages
OPTIONS = f"""
[dataset] DATA           a JSON, JSONL, CSV or Parquet file, a folder of them, a data set of the hub
                         (OWNER/NAME), or one of arXiv 2408.04693: commonsense_15k, math_14k,
                         hellaswag, gsm8k, openorca
{RENDERING}{HISTOGRAM}
--model NAME             count with the tokenizer of this model
--save FILE.csv          write a histogram for --length-histogram
--json                   print all results as JSON
"""


def add_options(commands: Any) -> None:
    """Add the command."""
    dataset = commands.add_parser(
        "dataset",
        run=run,
        help="count the tokens of a data set's examples, and what padding adds",
        description="Count the tokens of a data set's examples with a model's own tokenizer, and "
        "print the tokens per example in batches of 1 to 64, padded or packed.",
    )
    add_table(dataset, OPTIONS, save=Path)


def run(options: argparse.Namespace) -> int:
    """Count and print the lengths.

    Raises:
        DataError: the options contradict themselves, or the data cannot be read.
        UnknownModelError: there is no such model.
    """
    from orchestrator.reporting.dataset_tables import dataset_json, dataset_text, save_histogram
    from orchestrator.request import request_of
    from orchestrator.spec.job_options import JobOptions, data_job

    job = data_job(request_of(JobOptions, vars(options)), options.model, _remark_count)
    if options.save is not None:
        save_histogram(options.save, job)
    print_result(dataset_json(job) if options.json else dataset_text(job))
    return 0


def _remark_count(examples: int) -> None:
    if examples % COUNTED_AT_ONCE == 0:
        remark(f"{examples:,} examples counted")
