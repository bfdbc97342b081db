"""Simulated trials run in several processes, and a process that is killed loses only its own."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.simulated_groups import group_trials

from trials import local_runner
from trials.local_runner import KilledError, _simulated


def test_trials_are_recorded_as_they_end_and_a_killed_process_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later group that has ended does not wait for an earlier one that runs."""
    monkeypatch.setattr(local_runner, "_group_trials", group_trials)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    groups: Any = [tmp_path / "recorded", "later"]
    traces: Any = SimpleNamespace(on_disk=None)
    constants: Any = None
    recorded: list[Any] = []

    def simulate() -> None:
        for task, _ in _simulated(groups, traces, constants):
            recorded.append(task)
            (tmp_path / "recorded").touch()

    with pytest.raises(KilledError):
        simulate()
    assert recorded == ["later"]
