"""Throughput of a cell in a line, as ``status`` and the progress of a sweep show it."""

from builders.observations import measurement, observation

from fitting.families.cell_step_time import StepTimeSource
from orchestrator.planning.throughput import fastest
from trials.records.observation import Outcome


def test_fastest_is_the_best_median_of_the_timed_probes() -> None:
    """One slow step does not hide a fast batch; probes without times do not count."""
    assert fastest([]) is None
    assert fastest([observation(64)]) is None
    observations = [
        observation(1, measurement=measurement(step_seconds=(0.01, 0.01, 5.0))),
        observation(4, measurement=measurement(step_seconds=(0.01, 0.02, 0.03, 0.04))),
        observation(8, measurement=measurement(step_seconds=(0.1,))),
        observation(9, Outcome.OUT_OF_MEMORY),
    ]
    assert fastest(observations) == "160 examples/s"


def test_fastest_is_that_of_a_ranking_and_of_no_lucky_repeat() -> None:
    """The median step over all repeats of a batch size, without one that was timed again."""
    times = ((0.1, 0.1, 0.1), (0.4, 0.4), (0.2, 0.2))
    observations = [
        observation(8, purpose="ladder", repeat=n, measurement=measurement(step_seconds=steps))
        for n, steps in enumerate(times)
    ]
    assert fastest(observations) == "40 examples/s"
    (step,) = (
        StepTimeSource(observations, ()).at(observations[0].cell, "fastest", rows=1000).values()
    )
    assert (step.batch_size, step.seconds) == (8, 0.2)
    quick = measurement(step_seconds=(0.1, 0.1))
    again = observations[1].model_copy(update={"attempt": 2, "measurement": quick})
    assert fastest([*observations, again]) == "80 examples/s"


def test_fastest_excludes_sizes_that_missed_or_thrashed() -> None:
    """A size that missed once does not count, even where it fitted another time."""
    quick = measurement(step_seconds=(0.001,))
    observations = [
        observation(1, measurement=measurement(step_seconds=(0.5,))),
        observation(8, Outcome.THRASHING, measurement=quick),
        observation(8, measurement=quick),
    ]
    assert fastest(observations) == "2 examples/s"
