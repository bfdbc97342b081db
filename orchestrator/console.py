"""Output of a command: results on standard output; remarks and log messages on standard error."""

import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from gpu_catalog.safe_text import printable
from orchestrator.tables_in_terminal import fitted, wrapped

BOLD = re.compile(r"\*\*(\S[^*\n]*)\*\*")
# Bold text of a recommendation, a paragraph, wins.
WINS = re.compile(r"^(?:[^|\n]*\. )?(?:Rent|Use) (?:[^\n]|\n(?!\n))*", re.MULTILINE)
TOO_TIGHT = "too tight (allocator retries)"
"""Outcome THRASHING in answers and reports, where that word would be taken for swapping."""
FAILS = re.compile(
    r"not even one [a-z ]+ fits(: [A-Z_]+|: out of memory)?|does not fit"
    rf"|{re.escape(TOO_TIGHT)}|\bout of memory\b"
    r"|\b(?:(?:HOST_)?OUT_OF_MEMORY|TIMED_OUT|FAILED|THRASHING)\b"
)
UNSURE = re.compile(
    r"too close to call|may still be the cheapest|\bextrapolated\b|(?<=\)) [!~](?= +\|)"
)
BRIGHT, GREEN, RED, YELLOW = "1", "1;32", "31", "33"
LEAST_ROWS, MOST_ROWS = 4, 12  # of a table that is cut to a screen
JSON_STARTS = ("{", "[")
PACKAGES = ("gpu_catalog", "trials", "fitting", "orchestrator")


ALL_COLUMNS: ContextVar[bool] = ContextVar("all_columns", default=False)
"""Whether tables have all their columns, however narrow the terminal."""


class OutputError(Exception):
    """Standard output takes no more, as on a full disk; one line."""


@contextmanager
def output() -> Iterator[TextIO]:
    """Standard output, to write to.

    Raises:
        OutputError: it takes no more.
        BrokenPipeError: its reader has left.
    """
    try:
        yield sys.stdout
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror}") from None


def print_file(text: str) -> None:
    """Print the content of a file, as it is."""
    with output() as stream:
        stream.write(printable(text) + "\n")


def print_result(text: str) -> None:
    """Print a result, in Markdown or JSON.

    A terminal shows bold text as bold, and tables and sentences that are no wider than itself.
    """
    text = printable(text)
    if sys.stdout.isatty():
        if not ALL_COLUMNS.get() and not text.startswith(JSON_STARTS):
            text = fitted(text, shutil.get_terminal_size().columns)
        text = _styled(text)
    with output() as stream:
        stream.write(text + "\n")


def brief_rows() -> int | None:
    """Rows of a table that a terminal has room for; None elsewhere, or if all are wanted."""
    if not sys.stdout.isatty() or ALL_COLUMNS.get():
        return None
    return min(max(shutil.get_terminal_size().lines // 4, LEAST_ROWS), MOST_ROWS)


def _styled(text: str) -> str:
    """Text with bold and colours; with bold alone where NO_COLOR is set (no-color.org)."""
    if os.environ.get("TERM") == "dumb":
        return BOLD.sub(r"\1", text)
    if not os.environ.get("NO_COLOR"):
        text = WINS.sub(lambda line: BOLD.sub(_code(GREEN), line[0]), text)
        text = FAILS.sub(lambda match: f"\033[{RED}m{match[0]}\033[0m", text)
        text = UNSURE.sub(lambda match: f"\033[{YELLOW}m{match[0]}\033[0m", text)
    return BOLD.sub(_code(BRIGHT), text)


def _code(code: str) -> str:
    """Replacement that shows the first group in a style."""
    return f"\033[{code}m\\1\033[0m"


def remark(text: str) -> None:
    """Print a line beside the results; a terminal breaks it between words."""
    text = printable(text)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(part for line in text.split("\n") for part in wrapped(line, width))
    sys.stderr.write(text + "\n")


class RemarkHandler(logging.Handler):
    """Prints log messages as remarks.

    A ``StreamHandler`` would keep the stream it began with; a live table replaces standard error
    for as long as it is shown.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        remark(self.format(record))


def log_to_stderr() -> None:
    """Print what the packages of this project log from the level INFO on; once per process."""
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        if not any(isinstance(handler, RemarkHandler) for handler in logger.handlers):
            logger.addHandler(RemarkHandler())
