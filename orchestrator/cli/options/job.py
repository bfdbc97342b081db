"""Options of the job that is priced: its size, its data and its overheads."""

import argparse
from pathlib import Path

from orchestrator.cli.options.data import add_data, add_histogram
from orchestrator.cli.options.offers import add_constraints
from orchestrator.cli.options.value_types import (
    above_zero,
    batch_size,
    epochs,
    not_negative,
    positive,
)

OVERHEADS = (
    ("--startup-minutes", "minutes from renting a node to the first step"),
    ("--checkpoint-seconds", "seconds to write a checkpoint"),
    ("--checkpoint-minutes", "minutes of work between two checkpoints, on demand"),
    ("--interruptions-per-day", "interruptions of a spot instance per day"),
    ("--price-drift", "relative change of an on-demand price in 30 days, one standard deviation"),
    ("--spot-price-drift", "relative change of a spot price in 30 days, one standard deviation"),
)


def add_examples(
    command: argparse.ArgumentParser, text: str = "number of training examples"
) -> None:
    """Add ``--examples``, and ``--queries``, its former name, hidden."""
    command.add_argument("--examples", type=positive, metavar="N", help=text)
    command.add_argument("--queries", dest="examples", type=positive, help=argparse.SUPPRESS)


def add_overheads(command: argparse.ArgumentParser) -> None:
    """Add the overheads of a job: time beside its steps, and price changes."""
    for name, text in OVERHEADS:
        kind = above_zero if name == "--checkpoint-minutes" else not_negative
        default = "default: the specification's value, else an assumed one"
        command.add_argument(name, type=kind, metavar="N", help=f"{text} ({default})")


def add_job(command: argparse.ArgumentParser) -> None:
    """Add the options of the job that a run is ranked for."""
    add = command.add_argument
    add_examples(command)
    add(
        "--epochs",
        type=epochs,
        metavar="N|auto",
        help="number of epochs; auto: until learning stops, by the training curves in the run",
    )
    add(
        "--learned",
        type=Path,
        metavar="FILE",
        help="with --epochs auto: training curves that 'learn' wrote elsewhere",
    )
    add_dataset(command)
    add(
        "--batch-size",
        type=batch_size,
        metavar="N|max|fastest",
        help="examples per step, or the largest or fastest that was timed (default: fastest)",
    )
    add_constraints(command)
    add_overheads(command)
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the content of ranking.json")
    output.add_argument("--csv", action="store_true", help="print the content of ranking.csv")


def add_dataset(command: argparse.ArgumentParser) -> None:
    """Add the data set of a job, and how batches are made of it."""
    command.add_argument(
        "--dataset",
        metavar="DATA",
        help="price the examples of this data set; 'dataset --help' lists what it can be",
    )
    add_data(command)
    add_histogram(command)
    rows = command.add_mutually_exclusive_group()
    rows.add_argument(
        "--packing",
        action="store_true",
        help="pack examples into full rows of --cutoff tokens, without padding",
    )
    rows.add_argument(
        "--group-by-length",
        action="store_true",
        help="batch examples of similar length (default: at random), padded to the longest",
    )
