"""Simulated GPUs against the measurements of arXiv 2408.04693, without calibration on them."""

import pytest
from benchmarks.simulated_gpu import (
    BASE,
    GPUS,
    MIXTRAL,
    USD_PER_HOUR,
    Point,
    Simulation,
    paper_points,
)

from trials.simulation.trace_cache import Traces

SPARSE = 0.25
WITHIN = 0.15
# The paper does not say which H100 it ran on; the ratios are those of the SXM form, which is 12 %
# too fast. The PCIe card, of which no kernels were found, is 19 % too slow: the benchmark has both.
FORMS = {name: forms[-1] for name, forms in GPUS.items()}


def sparse_mixtral() -> list[Point]:
    """The points of sparse Mixtral on MATH."""
    series = (MIXTRAL, "math_14k", SPARSE)
    return [p for p in paper_points() if (p.model, p.dataset, p.sparsity) == series]


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """One simulation for all tests, which traces every length in one process."""
    made = Simulation(Traces(tmp_path_factory.mktemp("traces"), workers=1))
    made.prepare([*at_two().values(), *largest().values()])
    return made


def at_two() -> dict[str, Point]:
    """The points with batch size two, which all four GPUs ran."""
    return {p.gpu: p for p in sparse_mixtral() if p.batch_size == 2}


def largest() -> dict[str, Point]:
    """The largest batch size of each GPU for which the paper has a price."""
    points_by_gpu: dict[str, Point] = {}
    for point in sorted(sparse_mixtral(), key=lambda p: p.batch_size):
        points_by_gpu[point.gpu] = point
    return {name: points_by_gpu[name] for name in USD_PER_HOUR}


def test_simulated_speed_ratios_are_within_15_percent(simulation: Simulation) -> None:
    """H100 before A100-80GB, A100-40GB and A40, in the measured order."""
    points = at_two()
    simulated = {name: simulation.step_seconds(p, FORMS[name]) for name, p in points.items()}
    ordered = ["H100-80GB", "A100-80GB", "A100-40GB", "A40"]
    assert sorted(simulated, key=lambda name: simulated[name]) == ordered
    assert sorted(points, key=lambda name: points[name].step_seconds) == ordered
    for name, point in points.items():
        measured = point.step_seconds / points[BASE].step_seconds
        assert simulated[name] / simulated[BASE] == pytest.approx(measured, rel=WITHIN)


def test_the_simulated_cost_order_is_the_measured_one(simulation: Simulation) -> None:
    """Dollars per example at the largest batch sizes and the paper's prices are compared."""
    points = largest()

    def order(seconds: dict[str, float]) -> list[str]:
        usd = {n: USD_PER_HOUR[n] * seconds[n] / points[n].batch_size for n in points}
        return sorted(usd, key=lambda name: usd[name])

    simulated = {n: simulation.step_seconds(p, FORMS[n]) for n, p in points.items()}
    measured = {n: p.step_seconds for n, p in points.items()}
    assert order(simulated) == order(measured) == ["H100-80GB", "A100-80GB", "A40"]
