"""Command ``dataset``: the lengths of a data set's examples."""

import argparse

from orchestrator.console import print_result, remark
from orchestrator.reporting.dataset_tables import dataset_json, dataset_text, save_histogram
from orchestrator.request import request_of
from orchestrator.spec.job_options import JobOptions, data_job

COUNTED_AT_ONCE = 100_000  # examples between two messages


def run(options: argparse.Namespace) -> int:
    """Count and print the lengths.

    Raises:
        DataError: the options contradict themselves, or the data cannot be read.
        UnknownModelError: there is no such model.
    """
    job = data_job(request_of(JobOptions, vars(options)), options.model, _remark_count)
    if options.save is not None:
        save_histogram(options.save, job)
    print_result(dataset_json(job) if options.json else dataset_text(job))
    return 0


def _remark_count(examples: int) -> None:
    if examples % COUNTED_AT_ONCE == 0:
        remark(f"{examples:,} examples counted")
