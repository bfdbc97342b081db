"""Options of a data set: how examples are rendered, read and counted."""

import argparse

from orchestrator.cli.options.value_types import positive


def add_data(command: argparse.ArgumentParser) -> None:
    """Add the rendering of examples, the part that is read, and the tokenizer."""
    add = command.add_argument
    add(
        "--text-fields",
        metavar="A,B",
        help="build each example from these fields, one after the other",
    )
    add(
        "--template",
        metavar="TEXT",
        help="or from a text with fields, such as 'Question: {question}\\nAnswer: {answer}'",
    )
    add(
        "--chat",
        metavar="FIELD",
        help="or from a field of messages, by the tokenizer's chat template",
    )
    add("--tokenizer", metavar="NAME", help="a folder or a hub name (default: the model's own)")
    add("--subset", metavar="NAME", help="configuration of a hub data set")
    add("--split", metavar="NAME", help="split of a folder or a hub data set (default: train)")
    add("--most", type=positive, metavar="N", help="read only the first N examples")
    add("--cutoff", type=positive, metavar="N", help="truncate examples to N tokens")


def add_histogram(command: argparse.ArgumentParser) -> None:
    """Add the histogram that stands in for a data set."""
    command.add_argument(
        "--length-histogram",
        metavar="FILE.csv",
        help="use a histogram in place of a data set: columns tokens and examples",
    )
