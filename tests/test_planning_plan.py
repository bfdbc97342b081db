"""The plan of a sweep: cells that are complete, pending or skipped, with the reason."""

import pytest
from builders.observations import observation
from builders.runs import ONE_CELL, TWO_CELLS, spec_of, whole_trial
from fakes.law_prober import BUDGET_BYTES, LawProber

from gpu_catalog.catalog import load_catalog
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import Plan, make_plan, trial_task
from orchestrator.spec.spec_file import shipped_specs
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.observation import Observation, Outcome, largest_batch
from trials.run_trial import run_trial

ONE_CORE = ClusterResources((Node({"CPU": 1.0}),))
SMALL = """\
catalog:
  gpus:
    - {key: small, kind: cpu, usable_memory_bytes: 1000000, source: me, recorded: 2026-01-31}
"""
OWN_ROWS = """\
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 1000000, source: me, recorded: 2026-01-31}
    - {key: lap, kind: cpu, usable_memory_bytes: 1000000, source: me, recorded: 2026-01-31}
"""


def planned(spec: SweepSpec, observations: list[Observation], cluster: ClusterResources) -> Plan:
    """Plan a specification with its own catalog."""
    return make_plan(spec, spec.merged_catalog(), cluster, observations)


def test_cell_without_observations_is_pending() -> None:
    """Pending cells keep the order of the specification."""
    spec = spec_of(TWO_CELLS)
    plan = planned(spec, [], ONE_CORE)
    assert plan == Plan(complete=(), pending=tuple(spec.all_cells()), skipped=())


def test_cell_is_complete_only_with_its_last_observation() -> None:
    """Observations of another cell do not count."""
    spec = spec_of(TWO_CELLS)
    first, second = spec.all_cells()
    observations = whole_trial(first, spec)
    assert planned(spec, observations[:-1], ONE_CORE).pending == (first, second)
    plan = planned(spec, observations, ONE_CORE)
    assert plan == Plan(complete=(first,), pending=(second,), skipped=())


def test_cell_where_no_example_fits_is_complete() -> None:
    """A largest batch size of zero is a final result."""
    spec = spec_of()
    observations = whole_trial(spec.all_cells()[0], spec, largest=0)
    assert [o.outcome for o in observations] == [Outcome.OUT_OF_MEMORY]
    assert planned(spec, observations, ONE_CORE).complete == tuple(spec.all_cells())


def test_cell_whose_probes_failed_is_pending_again() -> None:
    """A failure is no verdict, so the next run tries again."""
    spec = spec_of()
    (cell,) = spec.all_cells()
    observations = [observation(1, Outcome.FAILED, cell=cell, attempt=n) for n in (1, 2, 3)]
    assert planned(spec, observations, ONE_CORE).pending == (cell,)


def test_raising_the_batch_limit_makes_a_cell_pending_again() -> None:
    """A search that ended at the old limit continues above it."""
    spec = spec_of()
    (cell,) = spec.all_cells()
    observations = whole_trial(cell, spec, largest=1000)
    assert planned(spec, observations, ONE_CORE).complete == (cell,)
    wider = spec_of(ONE_CELL.replace("64", "128"))
    assert planned(wider, observations, ONE_CORE).pending == (cell,)


def test_gpu_that_no_node_has_is_skipped_with_the_reason() -> None:
    """Ray would wait for such a node forever; the CPU cells are still planned."""
    spec = spec_of(ONE_CELL.replace("[cpu]", "[A40, cpu]"))
    on_a40, on_cpu = spec.all_cells()
    plan = planned(spec, [], ONE_CORE)
    assert (plan.pending, [skip.cell for skip in plan.skipped]) == ((on_cpu,), [on_a40])
    assert "resource 'A40': start one with ray start" in plan.skipped[0].reason
    own = planned(spec, [], ClusterResources((Node({"CPU": 1.0}),), is_own=True))
    assert own.pending == (on_cpu,)
    assert "no node of the cluster" not in own.skipped[0].reason
    assert "simulate it (simulated_on: [A40])" in own.skipped[0].reason
    with_it = ClusterResources((Node({"CPU": 8.0, "A40": 1.0}),))
    assert planned(spec, [], with_it).pending == (on_a40, on_cpu)


FLASH = ONE_CELL.replace("fp32", "bf16, attention: flash_attention_2")


def test_recipe_that_no_node_supports_is_skipped_with_the_reason() -> None:
    """Limits of the device come before those of the node; one suitable node is enough."""
    spec = spec_of(FLASH.replace("[cpu]", "[A40, V100-16GB-SXM, cpu]"))
    bare, equipped = Node({"CPU": 1.0, "A40": 1.0}, frozenset()), frozenset({"flash_attn"})
    plan = planned(spec, [], ClusterResources((bare,)))
    on_a40, on_v100, on_cpu = (skip.reason for skip in plan.skipped)
    assert "flash_attn cannot" in on_a40
    assert "compute capability 8.0" in on_v100
    assert "needs a CUDA GPU" in on_cpu
    both = ClusterResources((bare, Node({"CPU": 1.0, "A40": 1.0}, equipped)))
    assert [cell.gpu for cell in planned(spec, [], both).pending] == ["A40"]


def test_capped_cell_runs_on_the_larger_gpu() -> None:
    """The trial runs there under the smaller GPU's memory limit and has no batch ladder."""
    spec = spec_of(ONE_CELL + "as_if: [small]\n" + SMALL)
    own, capped = spec.all_cells()
    assert (own.gpu, own.capped_on) == ("cpu", None)
    assert (capped.gpu, capped.capped_on) == ("small", "cpu")
    plan = planned(spec, [], ONE_CORE)
    assert plan.pending == (own, capped)
    task = trial_task(spec, spec.merged_catalog(), capped, [])
    assert (task.gpu.key, task.setup.memory_cap_bytes) == ("cpu", 1_000_000)


def test_capped_cell_needs_a_recipe_that_the_smaller_gpu_supports() -> None:
    """A bf16 batch size on a larger GPU would say nothing about a T4."""
    spec = spec_of(ONE_CELL.replace("[cpu]", "[A40]").replace("fp32", "bf16") + "as_if: [T4, L4]\n")
    plan = planned(spec, [], ClusterResources((Node({"CPU": 8.0, "A40": 1.0}),)))
    assert [cell.gpu for cell in plan.pending] == ["A40", "L4"]
    (skip,) = plan.skipped
    assert (skip.cell.gpu, skip.cell.capped_on) == ("T4", "A40")
    assert "use precision: fp16" in skip.reason


def test_cuda_trial_reserves_its_node_and_requests_the_gpu() -> None:
    """Ray hides GPUs from a worker that requests none; a CPU trial leaves other cores free."""
    catalog = load_catalog()
    nodes = ClusterResources((Node({"CPU": 8.0, "A40": 1.0, "GPU": 1.0}), Node({"CPU": 4.0})))
    assert nodes.trial_resources(catalog.gpu("A40")) == {"CPU": 1, "A40": 1, "GPU": 1}
    assert nodes.threads(catalog.gpu("A40")) == 8
    assert nodes.trial_resources(catalog.gpu("cpu")) == {"CPU": 1}
    assert nodes.threads(catalog.gpu("cpu")) == 1


def test_trial_is_placed_by_its_gpu_key() -> None:
    """A CUDA GPU needs a node with its key as a resource; a CPU device does not."""
    cpu = load_catalog().gpu("cpu")
    a40 = load_catalog().gpu("A40")
    named = ClusterResources((Node({"CPU": 8.0, "A40": 2.0, "cpu": 1.0}),))
    assert named.trial_resources(cpu) == {"CPU": 1, "cpu": 1}
    assert named.trial_resources(a40) == {"CPU": 1, "A40": 1}
    assert ONE_CORE.trial_resources(cpu) == {"CPU": 1}
    for amounts in ({"CPU": 8.0}, {"CPU": 8.0, "A40": 0.5}, {"CPU": 8.0, "GPU": 4.0, "A4": 4.0}):
        assert ClusterResources((Node(amounts),)).trial_resources(a40) is None


def test_gpu_that_the_cluster_can_start_a_node_for_is_planned() -> None:
    """The head node lists its node types; a trial requests the resources of that type."""
    spec = spec_of(ONE_CELL.replace("[cpu]", "[A40, H100-SXM]").replace("fp32", "bf16"))
    head = Node({"CPU": 2.0, "scales-to-A40": 4.0})
    plan = planned(spec, [], ClusterResources((head,)))
    assert [cell.gpu for cell in plan.pending] == ["A40"]
    assert [skip.cell.gpu for skip in plan.skipped] == ["H100-SXM"]
    a40 = load_catalog().gpu("A40")
    resources = {"CPU": 1.0, "A40": 1.0, "GPU": 1.0}
    assert ClusterResources((head,)).trial_resources(a40) == resources
    there = Node({"CPU": 8.0, "A40": 1.0, "GPU": 1.0})
    assert ClusterResources((head, there)).threads(a40) == 8


def test_pending_cells_take_turns_over_the_gpus() -> None:
    """A GPU with a short queue does not wait for one with a long queue."""
    spec = spec_of(
        ONE_CELL.replace("[cpu]", "[desk, cpu, lap]").replace("[16]", "[8, 16, 32]") + OWN_ROWS
    )
    observations = [
        o
        for cell in spec.all_cells()
        if (cell.gpu, cell.seq_len) in {("cpu", 8), ("cpu", 16)}
        for o in whole_trial(cell, spec)
    ]
    plan = planned(spec, observations, ONE_CORE)
    assert [(cell.gpu, cell.seq_len) for cell in plan.pending] == [
        ("desk", 8), ("cpu", 32), ("lap", 8), ("desk", 16), ("lap", 16), ("desk", 32), ("lap", 32),
    ]  # fmt: skip


def test_trial_holds_the_specification_and_its_own_observations_only() -> None:
    """A trial travels to its node as JSON and reads back equal."""
    spec = spec_of(TWO_CELLS.replace("max_batch_size: 64", "max_batch_size: 64\nseed: 7"))
    first, second = spec.all_cells()
    of_second = whole_trial(second, spec)
    observations = [*whole_trial(first, spec), *of_second]
    task = trial_task(spec, spec.merged_catalog(), second, observations)
    assert (task.cell, task.gpu.key, task.seed, task.batch_limit) == (second, "cpu", 7, 64)
    assert task.done == tuple(of_second)
    assert type(task).model_validate_json(task.model_dump_json()) == task


@pytest.mark.parametrize("cells", [ONE_CELL, TWO_CELLS])
def test_plan_survives_a_round_trip_through_json(cells: str) -> None:
    """The run folder keeps the plan as JSON."""
    spec = spec_of(cells.replace("[cpu]", "[cpu, A40]"))
    plan = planned(spec, whole_trial(spec.all_cells()[0], spec), ONE_CORE)
    assert plan.complete
    assert plan.skipped
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize("example_bytes", [100, 180, 311, 900])
def test_a_search_after_that_of_another_length_takes_three_probes(example_bytes: int) -> None:
    """It begins where the memory law of the other cell ends, and goes on there when resumed."""
    text = TWO_CELLS.replace("[cpu]", "[desk]").replace("max_batch_size: 64", "max_batch_size: 999")
    spec = spec_of(text + OWN_ROWS.replace("1000000", str(BUDGET_BYTES)))
    catalog = spec.merged_catalog()
    short, long = spec.all_cells()
    run: list[Observation] = []
    run_trial(trial_task(spec, catalog, short, []), LawProber(example_bytes), run.append)
    task = trial_task(spec, catalog, long, run)
    assert task.done == ()
    searched: list[Observation] = []
    run_trial(task, LawProber(2 * example_bytes), searched.append)
    assert largest_batch(searched) is not None
    assert sum(o.purpose == "search" for o in searched) <= 3
    for length in range(len(searched)):
        resumed = searched[:length]
        task = trial_task(spec, catalog, long, [*run, *resumed])
        run_trial(task, LawProber(2 * example_bytes), resumed.append)
        assert [o.key for o in resumed] == [o.key for o in searched]


def test_the_default_sweep_has_two_ranks_and_four_where_a_machine_has_the_cores() -> None:
    """Elsewhere one line says what is missing."""
    spec = spec_of(shipped_specs()["laptop"])
    for cores, skipped in (
        (4.0, []),
        (2.0, [("4xcpu", "4 ranks need a machine with 4 cores; the largest has 2")]),
    ):
        plan = planned(spec, [], ClusterResources((Node({"CPU": cores}),)))
        assert [(skip.cell.devices, skip.reason) for skip in plan.skipped] == skipped
        assert "2xcpu" in {cell.devices for cell in plan.pending}
