"""Why points did not give a fit, and what to measure so that they do, in plain words."""

from dataclasses import dataclass

import numpy as np

from fitting.numerics.least_squares import Solution, Status
from fitting.points.fit_points import LadderTimings, Limits, Peaks
from fitting.points.step_time_rows import StepTimes


@dataclass(frozen=True, slots=True)
class FitFailure:
    """The reason there is no fit, and the remedy."""

    reason: str
    remedy: str


def refusal_of_times(points: LadderTimings, solution: Solution) -> FitFailure:
    """What keeps a law of time from being fitted to the ladder of one group."""
    count, parameters = len(points.batch_size), solution.parameter_count
    if solution.status is Status.NO_DATA:
        return _nothing_timed(parameters)
    if solution.status is Status.TOO_FEW_POINTS:
        sizes = len(np.unique(points.batch_size))
        return FitFailure(
            f"{_counted(count, 'point')} over {_counted(sizes, 'batch size')} cannot carry "
            f"{parameters} parameters and show their error",
            f"measure at least {parameters + 1} points, among them two batch sizes",
        )
    return FitFailure(
        f"the batch sizes and sparsities measured tell only {solution.rank} of {parameters} "
        "parameters apart",
        "measure two different batch sizes at the same sparsity",
    )


def refusal_of_family(points: StepTimes) -> FitFailure:
    """What keeps every form of a family's law from being fitted."""
    count, sizes = len(points), len(np.unique(points.batch_size))
    if count == 0:
        return _nothing_timed(parameters=2)
    return FitFailure(
        f"{_counted(count, 'point')} over {_counted(sizes, 'batch size')} on "
        f"{_counted(len(np.unique(points.gpu)), 'GPU')} cannot carry a floor and a slope and show "
        "their error",
        "measure at least 3 points on one GPU, among them two batch sizes at the same sparsity",
    )


def refusal_of_limits(points: Limits, solution: Solution) -> FitFailure:
    """What keeps Eq. 1 from being fitted to the largest batches of one group."""
    count, parameters = len(points.largest_batch), solution.parameter_count
    second = ", and over two sparsities" if parameters > 1 else ""
    if solution.status is Status.NO_DATA:
        return FitFailure(
            f"none of {_counted(points.cells_seen, 'cell')} has a largest batch, of at least 1, "
            "that device memory set",
            "let the search finish, with a batch limit high enough for memory to run out first",
        )
    if solution.status is Status.TOO_FEW_POINTS:
        return FitFailure(
            f"each cell gives one point, and {_counted(count, 'point')} cannot carry "
            f"{_counted(parameters, 'parameter')} and show the error",
            f"find the largest batch of at least {parameters + 1} cells: two sequence lengths or "
            f"GPUs are needed{second}",
        )
    if solution.status is Status.RANK_DEFICIENT:
        return FitFailure(
            f"every cell has sparsity {points.sparsity[0]:g}, and at one sparsity c0 and c1 cannot "
            "be told apart",
            "measure a second sparsity: the same model with another number of active experts",
        )
    return FitFailure(
        "the iteration stopped before a minimum",
        "find the largest batch of more cells, farther apart in sequence length and sparsity",
    )


def refusal_of_peaks(points: Peaks, solution: Solution) -> FitFailure:
    """What keeps memory affine in tokens from being fitted to the peaks of one group."""
    count = len(points.tokens)
    if solution.status is Status.NO_DATA:
        return FitFailure(
            "no probe fits",
            "shorten the examples, lighten the recipe or take a GPU with more memory",
        )
    if solution.status is Status.TOO_FEW_POINTS:
        return FitFailure(
            f"{_counted(count, 'point')} cannot carry {solution.parameter_count} parameters and "
            "show their error",
            "probe at least 3 batch sizes or sequence lengths that fit",
        )
    return FitFailure(
        f"every step had {points.tokens[0]:g} tokens: what the model holds and what tokens add "
        "cannot be told apart",
        "probe another batch size",
    )


def _nothing_timed(parameters: int) -> FitFailure:
    return FitFailure(
        "no ladder probe that fits was timed",
        f"time at least {parameters + 1} ladder probes over two batch sizes; if not even one "
        "example fits, shorten it, lighten the recipe or take a GPU with more memory",
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
