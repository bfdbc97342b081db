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
(BASE_FORM,) = GPUS[BASE]


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


def test_measured_speed_ratios_are_within_15_percent_of_the_simulated(
    simulation: Simulation,
) -> None:
    """So is the range of both H100 where the paper does not say which one it ran on.

    The SXM alone is 12 % too fast; the PCIe card, of which no kernels were found, 19 % too slow.
    """
    points = at_two()
    base = simulation.step_seconds(points[BASE], BASE_FORM)
    for name, point in points.items():
        measured = point.step_seconds / points[BASE].step_seconds
        ratios = [simulation.step_seconds(point, form) / base for form in GPUS[name]]
        assert min(ratios) * (1 - WITHIN) <= measured <= max(ratios) * (1 + WITHIN)


@pytest.mark.parametrize("form", GPUS["H100-80GB"])
def test_the_simulated_order_is_the_measured_one(simulation: Simulation, form: str) -> None:
    """By the time of a step, and by the paper's prices at the largest batch sizes."""
    forms = {name: one for name, (one, *_) in GPUS.items()} | {"H100-80GB": form}
    points = at_two()
    simulated = {name: simulation.step_seconds(p, forms[name]) for name, p in points.items()}
    ordered = ["H100-80GB", "A100-80GB", "A100-40GB", "A40"]
    assert sorted(simulated, key=lambda name: simulated[name]) == ordered
    assert sorted(points, key=lambda name: points[name].step_seconds) == ordered

    def order(seconds: dict[str, float]) -> list[str]:
        usd = {n: USD_PER_HOUR[n] * seconds[n] / priced[n].batch_size for n in priced}
        return sorted(usd, key=lambda name: usd[name])

    priced = largest()
    at_largest = {n: simulation.step_seconds(p, forms[n]) for n, p in priced.items()}
    measured = {n: p.step_seconds for n, p in priced.items()}
    assert order(measured) == ["H100-80GB", "A100-80GB", "A40"]
    assert order(at_largest) == order(measured)
