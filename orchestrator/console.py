"""Output of a command: results on standard output; remarks and log messages on standard error."""

import logging
import os
import re
import shutil
import sys
from contextvars import ContextVar

from gpu_catalog.safe_text import printable
from orchestrator.tables_in_terminal import fitted

BOLD = re.compile(r"\*\*(\S[^*\n]*)\*\*")
PACKAGES = ("gpu_catalog", "trials", "fitting", "orchestrator")


ALL_COLUMNS: ContextVar[bool] = ContextVar("all_columns", default=False)
"""Whether tables have all their columns, however narrow the terminal."""


def print_result(text: str) -> None:
    """Print a result, in Markdown.

    A terminal shows bold text as bold, and tables that are no wider than itself.
    """
    text = printable(text)
    if sys.stdout.isatty():
        if not ALL_COLUMNS.get():
            text = fitted(text, shutil.get_terminal_size().columns)
        shown = r"\1" if os.environ.get("TERM") == "dumb" else "\033[1m\\1\033[0m"
        text = BOLD.sub(shown, text)
    sys.stdout.write(text + "\n")


def remark(text: str) -> None:
    """Print a line beside the results."""
    sys.stderr.write(printable(text) + "\n")


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
