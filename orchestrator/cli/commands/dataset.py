"""``dataset``: counts how long the examples of a data set are, and tells what that comes to."""

import argparse

from orchestrator.cli.options.job import data_workload
from orchestrator.console import print_result, remark
from orchestrator.reporting.dataset_tables import dataset_json, dataset_text, save_histogram

TOLD_EACH = 100_000  # examples


def dataset_command(options: argparse.Namespace) -> int:
    """Counts and tells.

    Raises:
        DataError: the options contradict themselves, or the data cannot be read.
        UnknownModelError: there is no such model.
    """
    workload = data_workload(options, _tell_counted)
    if options.save is not None:
        save_histogram(options.save, workload)
    text = dataset_json(workload) if options.json else dataset_text(workload)
    print_result(text)
    return 0


def _tell_counted(examples: int) -> None:
    if examples % TOLD_EACH == 0:
        remark(f"{examples:,} examples counted")
