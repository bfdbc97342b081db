"""Reasons why points give no fit, each with the measurements that would give one."""

from dataclasses import dataclass

import numpy as np

from fitting.numerics.least_squares import Solution, Status
from fitting.points.fit_points import LadderTimings, Limits, Peaks
from fitting.points.step_time_rows import StepTimes


@dataclass(frozen=True, slots=True)
class FitFailure:
    """Reason why there is no fit, and its remedy."""

    reason: str
    remedy: str


def ladder_fit_failure(points: LadderTimings, solution: Solution) -> FitFailure:
    """Reason why the ladder of one group gives no law of time."""
    count, parameters = len(points.batch_size), solution.parameter_count
    if solution.status is Status.NO_DATA:
        return _nothing_timed(parameters)
    if solution.status is Status.TOO_FEW_POINTS:
        sizes = len(np.unique(points.batch_size))
        return FitFailure(
            f"{_counted(count, 'point')} over {_counted(sizes, 'batch size')}: too few to fit "
            f"{parameters} parameters and estimate their errors",
            f"measure at least {parameters + 1} points, among them two batch sizes",
        )
    return FitFailure(
        f"the measured batch sizes and sparsities identify only {solution.rank} of {parameters} "
        "parameters",
        "measure two different batch sizes at the same sparsity",
    )


def family_fit_failure(points: StepTimes) -> FitFailure:
    """Reason why no form of a family's law can be fitted."""
    count, sizes = len(points), len(np.unique(points.batch_size))
    if count == 0:
        return _nothing_timed(parameters=2)
    return FitFailure(
        f"{_counted(count, 'point')} over {_counted(sizes, 'batch size')} on "
        f"{_counted(len(np.unique(points.gpu)), 'GPU')}: too few to fit a floor and a slope and "
        "estimate their errors",
        "measure at least 3 points on one GPU, among them two batch sizes at the same sparsity",
    )


def largest_batch_fit_failure(points: Limits, solution: Solution) -> FitFailure:
    """Reason why the largest batches of one group do not give Eq. 1."""
    count, parameters = len(points.largest_batch), solution.parameter_count
    second = " and over two sparsities" if parameters > 1 else ""
    if solution.status is Status.NO_DATA:
        return FitFailure(
            f"none of {_counted(points.cell_count, 'cell')} has a largest batch of 1 or more that "
            "device memory limits",
            "let the search finish, with a batch limit high enough for memory to run out first",
        )
    if solution.status is Status.TOO_FEW_POINTS:
        return FitFailure(
            f"each cell gives one point: {_counted(count, 'point')} cannot determine "
            f"{_counted(parameters, 'parameter')} and the error",
            f"find the largest batch of at least {parameters + 1} cells over two sequence lengths "
            f"or GPUs{second}",
        )
    if solution.status is Status.RANK_DEFICIENT:
        return FitFailure(
            f"every cell has sparsity {points.sparsity[0]:g}: one sparsity does not identify both "
            "c0 and c1",
            "measure a second sparsity: the same model with another number of active experts",
        )
    return FitFailure(
        "the iteration stopped before a minimum",
        "find the largest batch of more cells, farther apart in sequence length and sparsity",
    )


def peak_fit_failure(points: Peaks, solution: Solution) -> FitFailure:
    """Reason why the peaks of one group do not give memory affine in tokens."""
    count = len(points.tokens)
    if solution.status is Status.NO_DATA:
        return FitFailure(
            "no probe fits",
            "shorten the examples, lighten the recipe or take a GPU with more memory",
        )
    if solution.status is Status.TOO_FEW_POINTS:
        return FitFailure(
            f"{_counted(count, 'point')} cannot determine {solution.parameter_count} parameters "
            "and their errors",
            "probe at least 3 batch sizes or sequence lengths that fit",
        )
    return FitFailure(
        f"every step had {points.tokens[0]:g} tokens: one number of tokens does not separate the "
        "model's memory from that of the tokens",
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
