"""The plan: which cells are done, which are to measure, which cannot be had and why."""

import pytest
from made_runs import ONE_CELL, TWO_CELLS, spec_of, whole_trial
from observations import observation

from gpu_catalog.catalog import load_catalog
from orchestrator.plan import ClusterResources, Plan, make_plan, trial_task
from orchestrator.sweep import SweepSpec
from trials.observation import Observation, Outcome

ONE_CORE = ClusterResources(({"CPU": 1.0},))
OWN_ROWS = """\
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 1000000, source: me, recorded: 2026-01-31}
    - {key: lap, kind: cpu, usable_memory_bytes: 1000000, source: me, recorded: 2026-01-31}
"""


def planned(spec: SweepSpec, known: list[Observation], cluster: ClusterResources) -> Plan:
    """The plan of a specification with its own catalog."""
    return make_plan(spec, spec.merged_catalog(), cluster, known)


def test_cell_nobody_measured_is_pending() -> None:
    """In the order written."""
    spec = spec_of(TWO_CELLS)
    plan = planned(spec, [], ONE_CORE)
    assert plan == Plan(complete=(), pending=tuple(spec.all_cells()), skipped=())


def test_cell_is_complete_when_its_last_observation_is_there_and_not_before() -> None:
    """Another cell's observations say nothing of it."""
    spec = spec_of(TWO_CELLS)
    first, second = spec.all_cells()
    known = whole_trial(first, spec)
    assert planned(spec, known[:-1], ONE_CORE).pending == (first, second)
    plan = planned(spec, known, ONE_CORE)
    assert plan == Plan(complete=(first,), pending=(second,), skipped=())


def test_cell_that_not_even_one_query_fits_is_complete() -> None:
    """There is nothing more to learn of it."""
    spec = spec_of()
    known = whole_trial(spec.all_cells()[0], spec, largest=0)
    assert [o.outcome for o in known] == [Outcome.OUT_OF_MEMORY]
    assert planned(spec, known, ONE_CORE).complete == tuple(spec.all_cells())


def test_cell_whose_probes_failed_is_pending_again() -> None:
    """A failure says nothing; the next run tries anew."""
    spec = spec_of()
    (cell,) = spec.all_cells()
    known = [observation(1, Outcome.FAILED, cell=cell, attempt=n) for n in (1, 2, 3)]
    assert planned(spec, known, ONE_CORE).pending == (cell,)


def test_raising_the_batch_limit_makes_a_cell_pending_again() -> None:
    """What stopped at the old limit goes on from there."""
    spec = spec_of()
    (cell,) = spec.all_cells()
    known = whole_trial(cell, spec, largest=1000)
    assert planned(spec, known, ONE_CORE).complete == (cell,)
    wider = spec_of(ONE_CELL.replace("64", "128"))
    assert planned(wider, known, ONE_CORE).pending == (cell,)


def test_cuda_gpu_is_skipped_with_the_reason_even_where_a_node_has_it() -> None:
    """This version measures none; the cells of the cpu go on."""
    spec = spec_of(ONE_CELL.replace("[cpu]", "[A40, cpu]"))
    on_a40, on_cpu = spec.all_cells()
    plan = planned(spec, [], ClusterResources(({"CPU": 8.0, "A40": 1.0},)))
    assert (plan.pending, [skip.cell for skip in plan.skipped]) == ((on_cpu,), [on_a40])
    assert plan.skipped[0].reason.startswith("A40 is a CUDA GPU, and this version measures cpu")


def test_trial_goes_to_the_node_that_carries_its_gpus_key() -> None:
    """A cpu device needs no such node, a CUDA GPU cannot do without."""
    cpu = load_catalog().gpu("cpu")
    a40 = load_catalog().gpu("A40")
    named = ClusterResources(({"CPU": 8.0, "A40": 2.0, "cpu": 1.0},))
    assert named.trial_resources(cpu) == {"CPU": 1, "cpu": 1}
    assert named.trial_resources(a40) == {"CPU": 1, "A40": 1}
    assert ONE_CORE.trial_resources(cpu) == {"CPU": 1}
    for amounts in ({"CPU": 8.0}, {"CPU": 8.0, "A40": 0.5}, {"CPU": 8.0, "GPU": 4.0, "A4": 4.0}):
        assert ClusterResources((amounts,)).trial_resources(a40) is None


def test_pending_cells_take_turns_over_the_gpus() -> None:
    """No GPU waits behind another one's queue, however short its own is."""
    spec = spec_of(
        ONE_CELL.replace("[cpu]", "[desk, cpu, lap]").replace("[16]", "[8, 16, 32]") + OWN_ROWS
    )
    known = [
        o
        for cell in spec.all_cells()
        if (cell.gpu, cell.seq_len) in {("cpu", 8), ("cpu", 16)}
        for o in whole_trial(cell, spec)
    ]
    plan = planned(spec, known, ONE_CORE)
    assert [(cell.gpu, cell.seq_len) for cell in plan.pending] == [
        ("desk", 8), ("cpu", 32), ("lap", 8), ("desk", 16), ("lap", 16), ("desk", 32), ("lap", 32),
    ]  # fmt: skip


def test_trial_knows_the_specification_and_its_own_observations_alone() -> None:
    """It travels to the node as JSON and says the same there."""
    spec = spec_of(TWO_CELLS.replace("max_batch_size: 64", "max_batch_size: 64\nseed: 7"))
    first, second = spec.all_cells()
    known = [*whole_trial(first, spec), *whole_trial(second, spec)]
    task = trial_task(spec, spec.merged_catalog(), second, known)
    assert (task.cell, task.gpu.key, task.seed, task.batch_limit) == (second, "cpu", 7, 64)
    assert task.done == tuple(whole_trial(second, spec))
    assert type(task).model_validate_json(task.model_dump_json()) == task


@pytest.mark.parametrize("cells", [ONE_CELL, TWO_CELLS])
def test_plan_reads_back_from_json_as_it_was(cells: str) -> None:
    """It is kept in the run folder."""
    spec = spec_of(cells.replace("[cpu]", "[cpu, A40]"))
    plan = planned(spec, whole_trial(spec.all_cells()[0], spec), ONE_CORE)
    assert plan.complete
    assert plan.skipped
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
