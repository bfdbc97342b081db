"""Groups of options that several commands share: job, data, prices, recipe."""

import argparse
from pathlib import Path

from orchestrator.cli.options.offers import add_constraints
from orchestrator.cli.options.value_types import (
    above_zero,
    batch_size,
    epochs,
    not_negative,
    positive,
)


def run_folder(text: str) -> Path | str:
    """A path; an address stays as it is: a path would make one slash of two."""
    return text if "://" in text else Path(text)


def add_overheads(command: argparse.ArgumentParser) -> None:
    """What a job takes beside its steps."""
    add = command.add_argument
    for name, unit in (
        ("startup_minutes", "from renting to the first step"),
        ("checkpoint_seconds", "to write one"),
        ("checkpoint_minutes", "of work between two, on demand"),
        ("interruptions_per_day", "of a spot instance"),
        ("price_drift", "part of it that an on-demand price moves in 30 days"),
        ("spot_price_drift", "part of it that a spot price moves in 30 days"),
    ):
        told = f"{unit} (default: the specification's, else assumed, and said)"
        kind = above_zero if name == "checkpoint_minutes" else not_negative
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=told)


def add_job(command: argparse.ArgumentParser) -> None:
    """Add the options of the job that is priced."""
    add = command.add_argument
    add("--examples", type=positive, metavar="N", help="training examples")
    add("--queries", dest="examples", type=positive, help=argparse.SUPPRESS)  # the former name
    add(
        "--epochs",
        type=epochs,
        metavar="N|auto",
        help="how often each is seen; auto: until learning stops, by what 'learn' kept in the run",
    )
    add(
        "--learned",
        type=Path,
        metavar="FILE",
        help="with --epochs auto: what 'learn' kept elsewhere",
    )
    add_dataset(command)
    add(
        "--batch-size",
        type=batch_size,
        metavar="N|max|fastest",
        help="examples per step, or which of those timed (default: fastest)",
    )
    add_constraints(command)
    add_overheads(command)
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print what ranking.json has")
    shown.add_argument("--csv", action="store_true", help="print what ranking.csv has")


def add_dataset(command: argparse.ArgumentParser) -> None:
    """The data of a job, and what batches are made of."""
    command.add_argument(
        "--dataset", metavar="DATA", help="price these examples instead: as 'dataset' takes them"
    )
    add_data(command)
    add_histogram(command)
    rows = command.add_mutually_exclusive_group()
    rows.add_argument(
        "--packing", action="store_true", help="into full rows of --cutoff tokens, without padding"
    )
    rows.add_argument(
        "--group-by-length",
        action="store_true",
        help="batches of like lengths (default: at random), padded to the longest in each",
    )


def add_prices(command: argparse.ArgumentParser) -> None:
    """Add the options that choose GPUs and prices."""
    command.add_argument(
        "--catalog",
        type=Path,
        metavar="FILE",
        help="GPUs and offers of your own, YAML or TOML, merged over the known ones",
    )
    command.add_argument(
        "--prices",
        action="append",
        metavar="TABLE|FILE",
        help="refreshed (in use once there is one), shipped or paper: that table; FILE, a CSV or "
        "YAML: your own prices, merged over it; may be given several times",
    )


def add_data(command: argparse.ArgumentParser) -> None:
    """How examples are made of a data set, and counted."""
    add = command.add_argument
    add("--text-fields", metavar="A,B", help="an example is these fields, one after the other")
    add(
        "--template",
        metavar="TEXT",
        help="or this, as in 'Question: {question}\\nAnswer: {answer}'",
    )
    add("--chat", metavar="FIELD", help="or these messages, by the tokenizer's chat template")
    add("--tokenizer", metavar="NAME", help="a folder or a hub name (default: the model's own)")
    add("--subset", metavar="NAME", help="which configuration of a hub data set")
    add("--split", metavar="NAME", help="of a folder or a hub data set (default: train)")
    add("--most", type=positive, metavar="N", help="read so many examples, the first ones")
    add("--cutoff", type=positive, metavar="N", help="tokens; longer examples are cut off there")


def add_histogram(command: argparse.ArgumentParser) -> None:
    """Add the option of a histogram of lengths."""
    command.add_argument(
        "--length-histogram",
        metavar="FILE.csv",
        help="instead of a data set: how many examples have so many tokens (tokens, examples)",
    )


def add_recipe(command: argparse.ArgumentParser, *, method: str, precision: str) -> None:
    """How a model is fine-tuned, and what it is when nothing is said."""
    add = command.add_argument
    add("--method", choices=("full", "lora", "qlora"), help=f"default: {method}")
    add("--recipe", metavar="NAME", help="start from a named one: paper-mixtral, paper-blackmamba")
    add("--lora-rank", type=positive, help="default: 16")
    add("--lora-targets", metavar="a,b,c", help="attention, experts, router, all-linear, or names")
    add("--gradient-checkpointing", choices=("on", "off"), help="default: off")
    add("--attention", choices=("eager", "sdpa", "flash_attention_2"))
    add("--experts", choices=("looped", "grouped"))
    add("--optimizer", metavar="NAME", help="adamw (default), adamw_8bit, paged_adamw_8bit, …")
    add("--precision", choices=("bf16", "fp16", "fp32"), help=f"default: {precision}")
