"""A node far slower than others with the same GPU is told, and what it timed is timed again."""

from made_runs import TWO_CELLS, LineDevice, spec_of, whole_trial
from observations import environment

from fitting.columns import columns_of
from orchestrator.plan import trial_task
from orchestrator.recipe_table import compare_recipes
from orchestrator.step_seconds import timed_steps, visit_spread
from orchestrator.stragglers import stragglers, stragglers_section, stragglers_text
from trials.observation import Observation, standing
from trials.trial import next_ask, run_trial
from trials.workload import Cell

SPEC = spec_of(TWO_CELLS)
SHORT, LONG = SPEC.all_cells()


def timed_on(cell: Cell, host: str, *, times: float) -> list[Observation]:
    """A trial on a node that takes so many times as long."""
    found = []
    for o in whole_trial(cell, SPEC, where=environment(host=host, node_id=host * 4)):
        if o.measurement is None:
            found.append(o)
            continue
        steps = tuple(seconds * times for seconds in o.measurement.step_seconds)
        slower = o.measurement.model_copy(update={"step_seconds": steps})
        found.append(o.model_copy(update={"measurement": slower}))
    return found


def timed_again(seen: list[Observation]) -> list[Observation]:
    """What a trial on the quick node makes of what the slow one timed."""
    done = [o for o in seen if o.cell == LONG]
    task = trial_task(SPEC, SPEC.merged_catalog(), LONG, done)
    task = task.model_copy(update={"slow_nodes": ("slow" * 4,)})
    quick = LineDevice(40, environment(host="quick", node_id="quick" * 4))
    found: list[Observation] = []
    run_trial(task, quick, found.append)
    return found


def test_a_node_ten_times_slower_is_named_with_what_was_timed_on_it() -> None:
    """The cells differ, as in a sweep: no two nodes time one."""
    seen = [*timed_on(SHORT, "quick", times=1), *timed_on(LONG, "slow", times=10)]
    (found,) = stragglers(seen)
    assert (found.host, found.cells, list(found.standing)) == ("slow", (LONG,), [LONG])
    # Its queries are twice as long, and a step of this device takes as long whatever their length.
    assert 4 < found.times < 11
    assert "| slow (slowslow) | " in stragglers_section(seen)
    assert "do not trust what was timed on it alone" in " ".join(stragglers_text(seen))


def test_what_a_slow_node_timed_is_timed_again_and_counts_no_more() -> None:
    """Neither in step times and laws nor in tables; its largest batch is not searched for again."""
    slow = timed_on(LONG, "slow", times=10)
    seen = [*timed_on(SHORT, "quick", times=1), *slow]
    again = timed_again(seen)
    assert {o.purpose for o in again} == {"ladder"}
    assert len({o.key for o in (*seen, *again)}) == len(seen) + len(again)
    every, honest = [*seen, *again], timed_on(LONG, "quick", times=1)

    def told(observations: list[Observation]) -> list[object]:
        mine = [o for o in observations if o.cell == LONG]
        columns = columns_of(observations)
        of_long = columns.timed & (columns.cell == columns.cells.index(LONG))
        return [
            timed_steps(mine, visit_spread(mine)),
            sorted(columns.step_seconds[of_long]),
            compare_recipes(mine),
        ]

    assert told(every) == told([*timed_on(SHORT, "quick", times=1), *honest]) != told(seen)
    (found,) = stragglers(every)
    assert (found.cells, dict(found.standing)) == ((LONG,), {})
    assert "timed again elsewhere, which counts" in " ".join(stragglers_text(every))
    assert [o for o in standing(every) if not o.is_timing] == [o for o in every if not o.is_timing]
    task = trial_task(SPEC, SPEC.merged_catalog(), LONG, every)
    assert next_ask(task, [o for o in every if o.cell == LONG]) is None


def test_of_what_was_timed_again_in_part_the_rest_still_stands_and_is_told() -> None:
    """A budget may be spent, or the other node taken away."""
    seen = [*timed_on(SHORT, "quick", times=1), *timed_on(LONG, "slow", times=10)]
    *again, last = timed_again(seen)
    (found,) = stragglers([*seen, *again])
    assert dict(found.standing) == {LONG: (last.batch_size,)}


def test_nodes_that_differ_by_what_nodes_differ_are_not_accused() -> None:
    """Nor is a lone one, to which nothing can be compared."""
    assert stragglers(timed_on(SHORT, "alone", times=10)) == []
    seen = [*timed_on(SHORT, "quick", times=1), *timed_on(SHORT, "slower", times=2)]
    assert stragglers(seen) == []
    assert stragglers_section(seen) == ""
