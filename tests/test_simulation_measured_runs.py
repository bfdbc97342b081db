"""Simulated memory and time, compared with runs that a GPU has measured (docs/accuracy.md)."""

import statistics
import sys
from pathlib import Path

import pytest

from gpu_catalog.catalog import load_catalog

BENCHMARKS = Path(__file__).parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from gpu_runs import FOLDER, observations_of, predictions, runs_on  # noqa: E402 - its folder is no package

MODELS = {"qwen3-1.7b", "qwen2.5-0.5b"}  # the quickest to trace of those whose step the GPU limits


def test_memory_and_time_are_those_that_a_gpu_measured() -> None:
    """On an H100: memory in use within 0.3 %, reserved within 4 %, steps that it limits 10 %."""
    gpu = load_catalog().gpu("H100-SXM")
    measured = observations_of(FOLDER / "measured-H100-SXM.jsonl")
    timed = {(o.cell.key, o.batch_size): o for o in measured if o.is_timing}
    runs = [run for run in runs_on(gpu, simulated=True) if run.model.name in MODELS]
    compared = [p for p in predictions(gpu, runs) if (p.run, p.batch) in timed]
    assert len(compared) == 4
    for prediction in compared:
        observation = timed[prediction.run, prediction.batch]
        memory, steps = observation.memory, observation.measurement
        assert memory is not None
        assert memory.peak_reserved_bytes is not None
        assert steps is not None
        gib = (memory.peak_allocated_bytes / 2**30, memory.peak_reserved_bytes / 2**30)
        assert prediction.allocated_gib == pytest.approx(gib[0], rel=0.003)
        assert prediction.reserved_gib == pytest.approx(gib[1], rel=0.04)
        step_ms = 1e3 * statistics.median(steps.step_seconds)
        if prediction.device_ms > 0.8 * step_ms:  # the host does not limit it
            assert prediction.step_ms == pytest.approx(step_ms, rel=0.1)
