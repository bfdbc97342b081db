"""A node that is far slower than others with the same GPU is told."""

from made_runs import TWO_CELLS, spec_of, whole_trial
from observations import environment

from orchestrator.stragglers import stragglers, stragglers_section, stragglers_text
from trials.observation import Observation
from trials.workload import Cell

SHORT, LONG = spec_of(TWO_CELLS).all_cells()


def timed_on(cell: Cell, host: str, *, times: float) -> list[Observation]:
    """A trial on a node that takes so many times as long."""
    found = []
    for o in whole_trial(cell, spec_of(TWO_CELLS), where=environment(host=host, node_id=host * 4)):
        if o.measurement is None:
            found.append(o)
            continue
        steps = tuple(seconds * times for seconds in o.measurement.step_seconds)
        slower = o.measurement.model_copy(update={"step_seconds": steps})
        found.append(o.model_copy(update={"measurement": slower}))
    return found


def test_a_node_ten_times_slower_is_named_with_what_was_timed_on_it() -> None:
    """The cells differ, as in a sweep: no two nodes time one."""
    seen = [*timed_on(SHORT, "quick", times=1), *timed_on(LONG, "slow", times=10)]
    (found,) = stragglers(seen)
    assert (found.host, found.cells) == ("slow", (LONG,))
    # Its queries are twice as long, and a step of this device takes as long whatever their length.
    assert 4 < found.times < 11
    assert "| slow (slowslow) | " in stragglers_section(seen)
    assert "do not trust what was timed on it" in " ".join(stragglers_text(seen))


def test_nodes_that_differ_by_what_nodes_differ_are_not_accused() -> None:
    """Nor is a lone one, to which nothing can be compared."""
    assert stragglers(timed_on(SHORT, "alone", times=10)) == []
    seen = [*timed_on(SHORT, "quick", times=1), *timed_on(SHORT, "slower", times=2)]
    assert stragglers(seen) == []
    assert stragglers_section(seen) == ""
