"""Calibration: constants come back from steps made with them, and doubt where there is cause."""

from pathlib import Path

import numpy as np
import pytest
from builders.observations import measurement, observation

from fitting.calibration_points import Point, measured_points
from fitting.clock_calibration import FITTED, CalibrationError, calibrate
from gpu_catalog.catalog import load_catalog
from orchestrator.cli.main import main
from orchestrator.estimating.calibration_file import calibration_text, known_constants
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.records.recipe import Recipe
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.timing_model import EfficiencyConstants, step_time
from trials.simulation.trace_cache import Traces

CATALOG = load_catalog()
GPUS = ("A40", "A100-80GB-SXM", "H100-SXM")
TRUTH = EfficiencyConstants(
    matrix_product=0.65,
    memory=0.85,
    attention_forward=0.60,
    attention_backward=0.56,
    host_factor=1.0,
)
HOSTS = {"A40": 0.7, "A100-80GB-SXM": 1.5, "H100-SXM": 1.0}


@pytest.fixture(scope="module")
def points() -> list[Point]:
    """Steps of a Llama-2-7B by the true constants, 1 % of noise, each GPU with its own host."""
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


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of this file's traces."""
    patched = pytest.MonkeyPatch()
    patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_constants_come_back_from_steps_made_with_them(points: list[Point]) -> None:
    """Within a few percent, each host's factor among them; what no step needs stays and says so."""
    found = calibrate(points, EfficiencyConstants())
    by_name = {each.name: each for each in found.fitted}
    assert by_name["matrix_product"].value == pytest.approx(0.65, rel=0.05)
    assert by_name["memory"].value == pytest.approx(0.85, rel=0.08)
    for key, factor in HOSTS.items():
        host = by_name[f"host_factor of host of {key}"]
        assert host.interval is not None
        assert 0.95 * host.interval.low < factor < 1.05 * host.interval.high
        if key != "A40":
            assert host.value == pytest.approx(factor, rel=0.05)
    # The A40 hardly ever waits for its host: little is known of that one, and it is said.
    a40 = by_name["host_factor of host of A40"].interval
    assert a40 is not None
    assert a40.high > 10 * a40.low
    assert not by_name["dequantisation"].fitted
    assert not by_name["scan"].fitted
    assert found.mean_error < 0.02
    assert [left.gpu for left in found.left_out] == sorted(GPUS)
    assert max(left.mean_error for left in found.left_out) < 0.06
    assert 0.02 <= found.constants.error < 0.15
    assert found.constants.error_above is None
    assert "18 measured steps" in found.constants.source


def test_few_steps_are_not_sure_of_what_they_hardly_tell(points: list[Point]) -> None:
    """Eight lie on the law by chance, one where an A40's host begins to tell: a faster one does."""
    few = [p for i, p in enumerate(points) if p.gpu.key in {"A40", "H100-SXM"} and i % 3 != 1]
    found = {each.name: each for each in calibrate(few, EfficiencyConstants()).fitted}
    for key in ("A40", "H100-SXM"):
        host = found[f"host_factor of host of {key}"].interval
        assert host is not None
        assert host.low < HOSTS[key] < host.high
    for name in ("matrix_product", "memory", "attention"):
        interval, of = found[name].interval, FITTED[name][0]
        assert interval is not None
        assert interval.low < getattr(TRUTH, of) < interval.high


def test_one_probe_tells_the_speed_of_a_host(points: list[Point]) -> None:
    """A single short step of a machine: its host's factor and no more, and it is said."""
    (probe,) = (
        p
        for p in points
        if p.gpu.key == "A100-80GB-SXM"
        and p.seconds == min(q.seconds for q in points if q.gpu.key == "A100-80GB-SXM")
    )
    found = calibrate([probe], TRUTH)
    assert found.constants.host_factor == pytest.approx(1.5, rel=0.1)
    assert found.constants.matrix_product == TRUTH.matrix_product
    # A step that it was fitted to does not bound the error elsewhere.
    assert found.constants.error >= TRUTH.error
    assert found.constants.error_above == TRUTH.error_above
    assert "speed of each host" in str(found.note)
    assert "error on another GPU is unknown" in calibration_text(found)


def test_only_measured_steps_of_gpus_are_taken() -> None:
    """Neither simulated ones nor a CPU's: with nothing left it is an error of one line."""
    seen = [observation(8, measurement=measurement(1, (0.1,) * 6))]
    gpus = {gpu.key: gpu for gpu in CATALOG.gpus}
    models = {"llama-tiny": find_model("llama-tiny")}
    assert measured_points(seen, models, gpus, Traces()) == ([], [])
    with pytest.raises(CalibrationError, match="measured step"):
        calibrate([], EfficiencyConstants())


def test_calibrated_constants_are_what_estimates_take(
    points: list[Point], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a file; and one that is something else is told in a line."""
    path = tmp_path / "constants.json"
    found = calibrate(points[:6], EfficiencyConstants())
    path.write_text(found.model_dump_json())
    assert known_constants(path) == found.constants
    path.write_text("{}")
    arguments = ["estimate", "--model", "llama-tiny", "--seq-len", "16", "--gpu", "A40"]
    assert main([*arguments, "--constants", str(path)]) == 1
    assert "not what calibrate writes" in capsys.readouterr().err
