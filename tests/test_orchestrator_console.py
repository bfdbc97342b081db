"""Output of commands: log messages of the library reach standard error."""

import logging

import pytest

from orchestrator.console import log_to_stderr


def test_a_log_message_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Repeated set-up adds no second line; messages of other libraries are not shown."""
    log_to_stderr()
    log_to_stderr()
    logging.getLogger("orchestrator.running.driver").info("%d trials", 3)
    logging.getLogger("orchestrator.running.driver").debug("not shown")
    logging.getLogger("somebody.else").info("not shown")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "3 trials\n")
