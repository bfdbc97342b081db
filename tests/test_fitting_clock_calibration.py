"""Calibration recovers the constants that steps were made with, and their uncertainty."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders.observations import environment, measurement, observation

from fitting.calibration_points import Point, PointTimelines, measured_points
from fitting.clock_calibration import FITTED, CalibrationError, calibrate
from gpu_catalog.catalog import load_catalog
from orchestrator.cli.main import main
from orchestrator.estimating.calibration_file import calibration_text, known_constants
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.simulation.clock.operators import Operators
from trials.simulation.recording import Column, Kind, OperatorClass
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.timing_model import EfficiencyConstants, step_time
from trials.simulation.trace_cache import Traces

CATALOG = load_catalog()
GPUS = ("A40", "A100-80GB-SXM", "H100-SXM")
TRUTH = EfficiencyConstants(
    product_speed=0.85,
    memory_speed=0.85,
    attention_speed=1.0,
    attention_backward=0.56,
    host_factor=1.0,
)
HOSTS = {"A40": 0.7, "A100-80GB-SXM": 1.5, "H100-SXM": 1.0}


@pytest.fixture(scope="module")
def points() -> list[Point]:
    """Steps of Llama-2-7B made with known constants and 1 % noise, each GPU with its own host."""
    random = np.random.default_rng(0)
    model, made, traces = find_model("llama-2-7b"), [], Traces()
    for key in GPUS:
        gpu = CATALOG.gpu(key)
        for seq_len in (64, 1024):
            recipe = with_defaults(Recipe(method="lora", lora_rank=8), model, gpu)
            cell = Cell(gpu=key, simulated=True, model=model.name, recipe=recipe, seq_len=seq_len)
            simulated = SimulatedCell(cell, model, traces)
            for batch_size in (2, 4, 8):
                true = TRUTH.model_copy(update={"host_factor": HOSTS[key]})
                operators = simulated.operators(batch_size)
                seconds = step_time(operators, gpu, true).seconds * random.normal(1.0, 0.01)
                made.append(Point(gpu, f"host of {key}", operators, seconds))
    return made


@pytest.mark.long
def test_calibration_recovers_the_constants_that_made_the_steps(points: list[Point]) -> None:
    """Constants and host factors return within a few percent; unused constants stay unfitted."""
    calibration = calibrate(points, EfficiencyConstants())
    by_name = {constant.name: constant for constant in calibration.fitted}
    assert by_name["matrix_product"].value == pytest.approx(0.85, rel=0.05)
    assert by_name["memory"].value == pytest.approx(0.85, rel=0.08)
    for key, factor in HOSTS.items():
        host = by_name[f"host_factor of host of {key}"]
        assert host.interval is not None
        assert 0.95 * host.interval.low < factor < 1.05 * host.interval.high
        if key != "A40":
            assert host.value == pytest.approx(factor, rel=0.05)
    # The A40 hardly ever waits for its host, so that factor has a wide interval.
    a40 = by_name["host_factor of host of A40"].interval
    assert a40 is not None
    assert a40.high > 10 * a40.low
    assert not by_name["dequantisation"].fitted
    assert not by_name["scan"].fitted
    assert calibration.mean_error < 0.02
    assert [left.gpu for left in calibration.left_out] == sorted(GPUS)
    assert max(left.mean_error for left in calibration.left_out) < 0.06
    assert 0.02 <= calibration.constants.error < 0.15
    assert calibration.constants.error_above is None
    assert "18 measured steps" in calibration.constants.source


def grouped_products(gpu: str) -> Point:
    """A step of three products of eight experts, two of which are equal."""
    numbers = np.zeros((3, len(Column)))
    numbers[:, Column.FLOPS] = 2.0 * 256 * 64 * 32
    numbers[:, [Column.ROWS, Column.INNER, Column.COLUMNS]] = [32, 64, 32]
    numbers[:, Column.PRODUCTS] = 8, 4, 8
    names = np.full(3, 4 * OperatorClass.GROUPED_PRODUCT)
    operators = Operators(np.full(3, Kind.RUN), names, numbers)
    return Point(CATALOG.gpu(gpu), "one", operators, 1.0)


def test_points_have_the_durations_of_their_steps(points: list[Point]) -> None:
    """Timing equal operators once changes none, also where a GPU has no grouped products."""
    all_points = [*points, *map(grouped_products, GPUS)]
    timelines = PointTimelines(all_points)
    for constants in (EfficiencyConstants(), TRUTH, TRUTH.model_copy(update={"overlapped": False})):
        for point, timeline in zip(all_points, timelines.of(constants), strict=True):
            expected = step_time(point.operators, point.gpu, constants).seconds
            assert timeline.seconds() == pytest.approx(expected, rel=1e-12)


def test_steps_faster_than_the_gpu_give_constants_that_an_estimate_accepts(
    points: list[Point],
) -> None:
    """A mistake in a table makes a large error, not a file that no command reads."""
    fast = [replace(point, seconds=point.seconds / 4) for point in points[::3]]
    constants = calibrate(fast, EfficiencyConstants()).constants
    assert EfficiencyConstants.model_validate_json(constants.model_dump_json()) == constants


def test_few_steps_give_intervals_that_hold_the_true_constants(points: list[Point]) -> None:
    """Eight steps may fit by chance; their intervals still hold every true constant."""
    few = [p for i, p in enumerate(points) if p.gpu.key in {"A40", "H100-SXM"} and i % 3 != 1]
    calibration = {c.name: c for c in calibrate(few, EfficiencyConstants()).fitted}
    for key in ("A40", "H100-SXM"):
        host = calibration[f"host_factor of host of {key}"].interval
        assert host is not None
        assert host.low < HOSTS[key] < host.high
    for name in ("matrix_product", "memory"):
        interval, field = calibration[name].interval, FITTED[name][0]
        assert interval is not None
        assert interval.low < getattr(TRUTH, field) < interval.high
    # Attention takes so little of these steps that the fit may end at its bound, without one.
    interval = calibration["attention"].interval
    assert interval is None or interval.low < TRUTH.attention_speed < interval.high


def test_one_probe_calibrates_only_its_hosts_factor(points: list[Point]) -> None:
    """A single short step sets the host factor; every other constant and the error stay."""
    (probe,) = (
        p
        for p in points
        if p.gpu.key == "A100-80GB-SXM"
        and p.seconds == min(q.seconds for q in points if q.gpu.key == "A100-80GB-SXM")
    )
    calibration = calibrate([probe], TRUTH)
    assert calibration.constants.host_factor == pytest.approx(1.5, rel=0.1)
    assert calibration.constants.product_speed == TRUTH.product_speed
    # A step that it was fitted to does not bound the error elsewhere.
    assert calibration.constants.error is None
    of_another = TRUTH.model_copy(update={"error": 0.3, "error_above": 2.0})
    kept = calibrate([probe], of_another).constants
    assert (kept.error, kept.error_above) == (0.3, 2.0)
    assert "speed of each host" in str(calibration.note)
    assert "another GPU" in calibration_text(calibration)


def test_only_measured_steps_of_gpus_are_taken() -> None:
    """Simulated and CPU steps are not used; without any step left calibration is an error."""
    probes = [observation(8, measurement=measurement(1, (0.1,) * 6))]
    gpus = {gpu.key: gpu for gpu in CATALOG.gpus}
    models = {"llama-tiny": find_model("llama-tiny")}
    assert measured_points(probes, models, gpus, Traces()) == ([], [])
    elsewhere = probes[0].cell.model_copy(update={"gpu": "A40", "model": "of another run"})
    moved = probes[0].model_copy(update={"cell": elsewhere, "environment": environment()})
    points, (reason,) = measured_points([moved], models, gpus, Traces())
    assert points == []
    assert "no specification has its model" in reason
    with pytest.raises(CalibrationError, match="measured step"):
        calibrate([], EfficiencyConstants())


def test_estimate_accepts_calibrated_constants(
    points: list[Point], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of ``calibrate`` is accepted; any other file is an error."""
    path = tmp_path / "constants.json"
    calibration = calibrate(points[:6], EfficiencyConstants())
    path.write_text(calibration.model_dump_json())
    assert known_constants(path) == calibration.constants
    path.write_text("{}")
    arguments = ["estimate", "--model", "llama-tiny", "--seq-len", "16", "--gpu", "A40"]
    assert main([*arguments, "--constants", str(path)]) == 1
    assert "calibrate" in capsys.readouterr().err
