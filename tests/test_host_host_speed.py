"""The speed of this machine's host, and estimates that take it."""

import json
from typing import Any

import pytest

import orchestrator
from gpu_catalog.errors import UserError
from orchestrator.cli.main import main
from trials.host.host_speed import DispatchedSteps


def test_the_fastest_step_is_the_hosts_speed() -> None:
    """Other load makes steps slower, never faster."""
    steps = DispatchedSteps(seconds=(0.05, 0.02, 0.03), assumed_seconds=0.01, operators=2000)
    assert (steps.host_factor, steps.median_factor) == (2.0, 3.0)


def test_an_estimate_takes_the_hosts_speed() -> None:
    """A step that the host limits takes as many times as long; the constants' source says so."""
    options: dict[str, Any] = {"method": "full", "seq_len": 32, "batch_size": 2, "gpu": "A40"}
    (plain,) = (row.estimate for row in orchestrator.estimate("llama-tiny", **options))
    (slow,) = (
        row.estimate for row in orchestrator.estimate("llama-tiny", **options, host_speed=3.0)
    )
    assert plain.step_seconds is not None
    assert slow.step_seconds == pytest.approx(3 * plain.step_seconds, rel=0.02)
    assert "multiplied by 3 (--host-speed)" in slow.constants


@pytest.mark.parametrize("speed", [0.01, 21.0])
def test_a_speed_of_no_host_is_refused(speed: float) -> None:
    """The line has the option, the value and what it may be."""
    with pytest.raises(UserError, match=f"--host-speed {speed:g}: must be from 0.05 to 20"):
        orchestrator.estimate("llama-tiny", seq_len=32, gpu="A40", host_speed=speed)


@pytest.mark.long
def test_the_command_prints_the_value_that_estimate_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The child trains; the clock assumes 6.8 us for an operator with a kernel, 2.3 for a view."""
    assert main(["host-speed", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    operators, assumed = shown["operators"], shown["assumed_seconds"]
    kernels = (1e6 * assumed - 2.3 * operators) / (6.8 - 2.3)
    assert 0.3 * operators < kernels < 0.6 * operators
    assert shown["host_speed"] == min(shown["seconds"]) / assumed
