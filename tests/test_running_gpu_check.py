"""The check of a machine's own GPU: which cells it measures, in which order and time."""

import pytest
from builders.observations import observation
from builders.runs import ONE_CELL, spec_of

from gpu_catalog.catalog import load_catalog
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import make_plan, trial_task
from orchestrator.running.gpu_check import (
    GpuCheckError,
    gpu_check_spec_text,
    gpu_of_this_machine,
    in_order_of_value,
    machine_with,
    time_is_left,
)
from orchestrator.scheduling.node_queue import Task
from orchestrator.spec.spec_file import parse_spec
from orchestrator.spec.sweep_spec import SweepSpec
from trials.local_runner import run_trials_here
from trials.recipes.optional_packages import EXTRAS
from trials.records.cell import Cell
from trials.records.observation import Observation, Outcome

CATALOG = load_catalog()


def check_of(key: str, packages: frozenset[str]) -> tuple[SweepSpec, list[Cell]]:
    """The check of a catalog GPU on a machine with some extras."""
    gpu = CATALOG.gpu(key)
    spec = parse_spec(gpu_check_spec_text(gpu, CATALOG), "gpu-check")
    machine = ClusterResources((Node({"CPU": 8.0, key: 1.0}, packages),))
    return spec, in_order_of_value(spec, make_plan(spec, CATALOG, machine, []))


def test_the_most_valuable_cells_come_first_and_each_once() -> None:
    """The GPU's own shorter length comes first, then smaller GPUs, then the longer length."""
    _, cells = check_of("H200-SXM", frozenset(EXTRAS))
    assert [(c.gpu, c.model, c.active_experts, c.seq_len) for c in cells[:5]] == [
        ("H200-SXM", "mixtral-8x7b", 2, 128),
        ("H200-SXM", "mixtral-8x7b", 8, 128),
        ("H200-SXM", "blackmamba-2.8b", 2, 128),
        ("H200-SXM", "llama-2-7b", None, 128),
        ("A40", "mixtral-8x7b", 2, 128),
    ]
    assert {c.capped_on for c in cells if c.gpu in {"A40", "A100-40GB-SXM"}} == {"H200-SXM"}
    under_caps = [c for c in cells if c.capped_on is not None]
    subjects = {(c.gpu, c.model, c.active_experts, c.seq_len) for c in under_caps}
    assert len(subjects) == len(under_caps) == 16


@pytest.mark.parametrize(
    ("packages", "kernels"),
    [
        (frozenset(EXTRAS), {"flash_attention_2", "mamba-ssm"}),
        (frozenset(), {"sdpa", "reference"}),
    ],
)
def test_the_kernels_are_those_the_machine_has(packages: frozenset[str], kernels: set[str]) -> None:
    """Optional kernels are used where they are installed, else PyTorch's; TRL's are PyTorch's."""
    _, cells = check_of("H200-SXM", packages)
    cells = [c for c in cells if c.model != "qwen2.5-0.5b"]
    used = {c.recipe.attention for c in cells} | {c.recipe.mamba for c in cells}
    assert used - {None} == kernels


def test_trls_recipes_and_each_further_axis_are_measured_on_the_gpu_itself() -> None:
    """Without the packages of a recipe, the others are left."""
    own = {}
    for packages in (frozenset(EXTRAS), frozenset[str]()):
        _, cells = check_of("H200-SXM", packages)
        recipes = [c.recipe for c in cells if c.gpu == "H200-SXM" and c.model == "qwen2.5-0.5b"]
        own[len(packages)] = recipes
    every, few = own[len(EXTRAS)], own[0]
    assert [r.method for r in every[:3]] == ["full", "lora", "qlora"]
    assert {r.loss for r in every[:3]} == {"chunked"}
    assert any(r.activation_offloading for r in every)
    assert any(r.liger_kernels for r in every)
    assert any(r.dora for r in every)
    assert {r.task for r in every} == {"sft", "dpo", "kto", "orpo"}
    assert {r.quantisation for r in every} == {None, "nf4", "int8", "fp4"}
    assert {r.optimizer for r in every} > {"torchao_adamw_8bit", "torchao_adamw_4bit"}
    assert {r.compile for r in few} == {None, "model", "layers"}
    assert not any(r.extras for r in few)


def test_a_gpu_stands_in_for_smaller_ones_only() -> None:
    """An A40 has more memory than an A100 of 40 GB, and is no stand-in for itself."""
    spec, _ = check_of("A40", frozenset())
    assert spec.as_if == ("A100-40GB-SXM",)


def test_a_machine_without_a_gpu_is_one_line() -> None:
    """The error comes before any file is written."""
    with pytest.raises(GpuCheckError, match="no NVIDIA GPU: NVML finds none on this machine"):
        gpu_of_this_machine(CATALOG)


def test_the_machine_is_a_cluster_of_one_node() -> None:
    """The same planner serves a machine and a cluster."""
    machine = machine_with(CATALOG.gpu("A40"), cores=4)
    assert machine.trial_resources(CATALOG.gpu("A40")) == {"CPU": 1, "A40": 1}
    assert machine.threads(CATALOG.gpu("A40")) == 4


def test_no_probe_is_begun_that_may_not_end_in_time() -> None:
    """The remaining time must be half as long again as the longest probe."""
    now = [100.0]
    observed: list[Observation] = []
    keep_going = time_is_left(60, observed, clock=lambda: now[0])
    assert keep_going()
    observed.append(observation(1, seconds=20.0))
    now[0] = 129.0
    assert keep_going()
    now[0] = 131.0
    assert not keep_going()


class Diary:
    """A listener that records observations."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.seen: list[Observation] = []

    def started(self, task: Task) -> None:
        self.heard.append(("started", task.cell.key))

    def observed(self, observation: Observation) -> None:
        self.seen.append(observation)

    def ended(self, cell: Cell, error: str | None) -> None:
        assert error is None
        self.heard.append(("ended", cell.key))


@pytest.mark.long
def test_trials_run_here_one_after_another_until_time_is_up() -> None:
    """Trials are real but without Ray, and what they observed is complete."""
    spec = spec_of(ONE_CELL.replace("[16]", "[8, 16]").replace("64", "2"))
    first, second = spec.all_cells()
    catalog = spec.merged_catalog()
    tasks = [trial_task(spec, catalog, cell, []) for cell in (first, second)]
    diary = Diary()
    run_trials_here(tasks, diary, lambda: len(diary.seen) < 2)
    assert diary.heard == [("started", first.key), ("ended", first.key)]
    assert [o.outcome for o in diary.seen] == [Outcome.FITS] * 2
    assert {o.cell for o in diary.seen} == {first}
