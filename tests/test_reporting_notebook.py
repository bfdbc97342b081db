"""A run in a notebook: pandas frames of what it observed, fitted and ranked."""

from pathlib import Path

import pandas as pd
import pytest
from builders.runs import TWO_CELLS, made_run

import orchestrator
from orchestrator.storage.run_storage import StoreError


def test_a_run_is_loaded_as_frames(tmp_path: Path) -> None:
    """Probes have their cells, steps their probes, and the ranking equals its CSV."""
    folder = made_run(tmp_path / "run", TWO_CELLS, measured=2)
    before = {path.name for path in folder.path.iterdir()}  # type: ignore[union-attr]
    run = orchestrator.load_run(tmp_path / "run")
    observations = run.observations
    assert len(observations) == len(folder.observations())
    timed = observations[observations["examples_per_second"].notna()]
    # made_runs: 10 ms a step and 1 ms an example.
    expected = timed["batch"] / (0.010 + 0.001 * timed["batch"])
    assert timed["examples_per_second"].tolist() == pytest.approx(expected.tolist())
    assert sorted(timed["seq_len"].unique()) == [16, 32]
    assert set(run.ranking["largest_batch"]) == {40}
    medians = run.steps.groupby("observation")["seconds"].median()
    assert medians.tolist() == pytest.approx(
        observations.loc[medians.index, "step_seconds"].tolist()
    )
    for _, job in run.ranking.groupby("seq_len"):
        assert job["rank"].tolist() == sorted(job["rank"])
        assert job["usd"].is_monotonic_increasing
    assert {"t0", "k"} <= set(run.coefficients["parameter"])
    assert run.candidates["chosen"].sum() == len(run.laws) == 1
    memory = run.fits[run.fits["law"] == "memory_affine"]
    assert memory["parameter"].tolist() == ["m0", "m"]
    assert all(isinstance(frame, pd.DataFrame) for frame in (run.laws, run.fits))
    assert {path.name for path in folder.path.iterdir()} == before  # type: ignore[union-attr]


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    """The message is that of the commands."""
    with pytest.raises(StoreError, match="no such run folder"):
        orchestrator.load_run(str(tmp_path / "none"))
