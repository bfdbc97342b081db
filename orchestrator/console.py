"""What a command says: results on standard output, remarks beside them on standard error."""

import os
import re
import sys

BOLD = re.compile(r"\*\*(\S[^*\n]*)\*\*")


def print_result(text: str) -> None:
    """A result, in Markdown; a terminal shows what is bold in it as bold."""
    if sys.stdout.isatty():
        shown = r"\1" if os.environ.get("TERM") == "dumb" else "\033[1m\\1\033[0m"
        text = BOLD.sub(shown, text)
    sys.stdout.write(text + "\n")


def remark(text: str) -> None:
    """A line beside the results."""
    sys.stderr.write(text + "\n")
