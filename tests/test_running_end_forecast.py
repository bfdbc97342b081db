"""Forecast of the end of a sweep: it counts down, and is put off where trials take longer."""

from itertools import pairwise

from benchmarks.end_forecast import errors_at, kept_sweeps, largest_rise

from orchestrator.running.progress import EndedTrials, EndForecast, Pace


def test_the_forecast_counts_down_while_trials_keep_their_pace() -> None:
    """Ten trials of ten seconds and ten results, with a third more or less, one after another."""
    clock, shown = 0.0, []
    forecast = EndForecast(0.0)
    ended = EndedTrials()
    for seconds in (10, 8, 12, 7, 13, 10, 9, 11, 8, 12):
        for result in range(10):
            clock += seconds / 10
            running = [Pace(result + 1, (result + 1) * seconds / 10)]
            left = forecast.seconds_left(clock, 10, ended, running)
            if left is not None:
                shown.append((clock, left))
        ended.add(Pace(10, seconds))
    grown = [after - before for (_, before), (_, after) in pairwise(shown) if after > before]
    assert len(grown) <= 3  # while it has seen few trials, or at the very end
    assert all(abs(at + left - 100) < 25 for at, left in shown)


def test_the_end_of_a_real_sweep_is_forecast_from_its_first_results_on() -> None:
    """Kept sweeps of a laptop: within a quarter at 10 % of the time, and it does not grow."""
    for probes in kept_sweeps().values():
        early, half, late = errors_at(probes).values()
        assert early is not None
        assert half is not None
        assert late is not None
        assert early < 0.25
        assert half < 0.15
        assert late < 0.1
        assert largest_rise(probes) < 0.05


def test_the_forecast_is_put_off_when_trials_take_longer() -> None:
    """Two trials took a second each; the third takes a minute."""
    forecast, ended = EndForecast(0.0), EndedTrials(count=2, results=10, seconds=2.0)
    assert forecast.seconds_left(2.0, 4, ended, []) == 2.0
    late = forecast.seconds_left(60.0, 4, ended, [Pace(1, 58.0)])
    assert late is not None
    assert late > 20
