"""Events that the driver receives when Tune aborts all trials, or a trial stops reporting."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders.observations import observation
from builders.runs import TWO_CELLS, spec_of
from fakes.ray_sweeps import environment

from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import trial_task
from orchestrator.ray_backend import trial_relay
from orchestrator.ray_backend.errors import LeaveTuneError, RayEndedError
from orchestrator.ray_backend.trial_relay import TrialRelay, cause_of_death
from orchestrator.ray_backend.tune_runner import first_line
from orchestrator.scheduling.node_queue import Task
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.storage.run_storage import StoreError
from trials.records.cell import Cell
from trials.records.observation import Observation

SPEC = spec_of(TWO_CELLS)
FIRST, SECOND = SPEC.all_cells()
CLUSTER = ClusterResources((Node({"CPU": 2.0}, None, "n1"),))


ORCHESTRATION = Path(__file__).parent / "benchmarks" / "orchestration.py"
# 13,400 were seen, 9,000 of them for its probe; Tune's own record of a trial takes 68,000.
A_SHELL_BYTES = 20_000


class Diary:
    """A listener that records the observations and the ends of trials."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []
        self.ends: list[tuple[Cell, str | None]] = []

    def started(self, task: Task) -> None:
        """Ignore the start of a trial."""

    def observed(self, observation: Observation) -> None:
        self.seen.append(observation)

    def ended(self, cell: Cell, error: str | None) -> None:
        self.ends.append((cell, error))


def relay_to(diary: Diary, is_spent: Callable[[], bool] = lambda: False) -> TrialRelay:
    """A relay for both cells on a machine with two cores."""
    catalog = SPEC.merged_catalog()
    scheduler = Scheduler(
        [FIRST, SECOND],
        lambda cell: trial_task(SPEC, catalog, cell, []),
        {"cpu": {"CPU": 1.0}},
        CLUSTER,
        wait_seconds=60,
        nodes_out={},
        note=lambda _: None,
        is_spent=is_spent,
    )
    return TrialRelay(scheduler, diary, lambda: CLUSTER, lambda _: None)


def trial(cell: Cell) -> SimpleNamespace:
    """A trial as Tune passes it to callbacks."""
    return SimpleNamespace(config={"trial": {"cell": cell.key}}, error_file=None)


def test_started_trials_without_an_end_are_reported_dead() -> None:
    """When memory is low, Ray kills workers and Tune raises for all trials: no trial is lost."""
    diary = Diary()
    relay = relay_to(diary)
    assert [(relay.next_trial() or {})["cell"] for _ in range(2)] == [FIRST.key, SECOND.key]
    relay.on_trial_start(trial=trial(FIRST))
    relay.on_trial_start(trial=trial(SECOND))
    relay.on_trial_complete(trial=trial(FIRST))
    assert relay.all_ended("low on memory") == 1
    assert relay.all_ended("twice") == 0
    assert diary.ends == [(FIRST, None), (SECOND, "low on memory")]
    assert (relay.next_trial() or {})["cell"] == SECOND.key


def reported(cell: Cell) -> dict[str, object]:
    """A probe of a cell as Tune passes it on."""
    return {"observation": observation(1, cell=cell).model_dump_json(), "done": False}


def test_a_spent_budget_ends_each_trial_with_the_probe_that_it_runs() -> None:
    """No probe begins, and none that is paid for is lost."""
    diary = Diary()
    relay = relay_to(diary, lambda: bool(diary.seen))
    for cell in (FIRST, SECOND):
        relay.next_trial()
        relay.on_trial_start(trial=trial(cell))
        assert not relay("", {"nodes": [], "done": False})
    for cell in (FIRST, SECOND):
        assert not relay.stop_all()
        assert relay("", reported(cell))
        relay.on_trial_complete(trial=trial(cell))
    assert relay.stop_all()
    assert [o.cell for o in diary.seen] == [FIRST, SECOND]
    assert diary.ends == [(FIRST, None), (SECOND, None)]


def test_a_silent_worker_is_killed_and_reported_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hung worker cannot time itself out; the driver kills it once."""
    killed: list[object] = []
    monkeypatch.setattr(trial_relay, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(trial_relay, "RAY_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(trial_relay, "kill", killed.append)
    diary = Diary()
    relay = relay_to(diary)
    relay.next_trial()
    hung = trial(FIRST)
    relay.on_trial_start(trial=hung)
    now = relay._scheduler._clock()
    monkeypatch.setattr(relay._scheduler, "_clock", lambda: now + 1500)
    relay.on_step_begin()
    relay.on_step_begin()
    assert killed == [hung]
    relay.on_trial_error(trial=hung)
    assert diary.ends == [(FIRST, "no report within 1320 s")]


def test_a_kill_that_tune_did_not_report_concerns_no_later_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tune stops before it reports that death: the next trial of the cell ends as it ends."""
    monkeypatch.setattr(trial_relay, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(trial_relay, "kill", lambda _: None)
    diary = Diary()
    relay = relay_to(diary)
    relay.next_trial()
    relay.on_trial_start(trial=trial(FIRST))
    now = relay._scheduler._clock()
    monkeypatch.setattr(relay._scheduler, "_clock", lambda: now + 1500)
    relay.on_step_begin()
    relay.all_ended("Ray stopped it")
    assert (relay.next_trial() or {})["cell"] == FIRST.key
    relay.on_trial_start(trial=trial(FIRST))
    relay.on_trial_complete(trial=trial(FIRST))
    assert diary.ends == [(FIRST, "Ray stopped it"), (FIRST, None)]


def test_a_relay_leaves_tune_at_once_when_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next call into Ray, and by no error that Tune would clear up after."""

    def ended() -> None:
        raise RayEndedError("its gcs_server died")

    monkeypatch.setattr(trial_relay, "check_own_ray", ended)
    relay = relay_to(Diary())
    monkeypatch.setattr(relay, "_cluster_now", lambda: pytest.fail("Ray was asked"))
    with pytest.raises(LeaveTuneError) as error:
        relay.on_step_begin()
    assert not isinstance(error.value, Exception)
    assert isinstance(relay.raised, RayEndedError)


def test_a_full_disk_during_scheduling_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler's own error takes precedence over Ray's failure to place trials."""
    monkeypatch.setattr(trial_relay, "CHECK_SECONDS", 0.0)
    relay = relay_to(Diary())

    def full(_: ClusterResources) -> dict[Cell, str]:
        raise StoreError("faults.json: No space left on device")

    monkeypatch.setattr(relay._scheduler, "update", full)
    with pytest.raises(StoreError):
        relay.on_step_begin()
    assert isinstance(relay.raised, StoreError)


def test_a_full_disk_while_saving_nodes_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The offers of new nodes are saved while trials run."""
    monkeypatch.setattr(trial_relay, "CHECK_SECONDS", 0.0)
    relay = relay_to(Diary())

    def full(_: ClusterResources) -> None:
        raise StoreError("rented.json: No space left on device")

    monkeypatch.setattr(relay, "_record_nodes", full)
    with pytest.raises(StoreError):
        relay.on_step_begin()
    assert isinstance(relay.raised, StoreError)


def test_the_callback_pickles_to_nothing() -> None:
    """Tune pickles its callbacks repeatedly and never reads them here."""
    assert pickle.loads(pickle.dumps(relay_to(Diary()))).__dict__ == {}  # noqa: S301 - our own


@pytest.mark.long
def test_an_ended_trial_leaves_little_in_memory() -> None:
    """On a real Ray: a sweep of thousands of trials takes the memory of one of a hundred."""
    done = subprocess.run(
        [sys.executable, ORCHESTRATION, "kept", "100"],
        env=environment(Path.home()),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < A_SHELL_BYTES


NODE_DIED = """\
Failure # 1 (occurred at 2026-11-21_11-40-44)
The actor died unexpectedly before finishing this task.
\tclass_name: TrialOnNode
\tip: 10.0.0.5
The actor died because its node has died. Node Id: ff6c
\tthe actor's node was terminated unexpectedly: health check failed
"""
WORKER_DIED = """\
Failure # 1 (occurred at 2026-11-21_11-40-44)
The actor died unexpectedly before finishing this task.
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. There are causes.
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            NODE_DIED,
            "its node stopped answering: it was switched off, cut off or far too busy",
        ),
        (
            WORKER_DIED,
            "its Ray worker died: its process ended without a word, as when it is killed",
        ),
        (
            WORKER_DIED.replace("End of file", "RPC Error message: Socket closed; rpc_code: 14"),
            "its Ray worker died: its connection to Ray broke",
        ),
        (
            WORKER_DIED.replace("Worker unexpectedly exits with a connection", "Out of gas. A"),
            "its Ray worker died: Out of gas",
        ),
        ("ray.exceptions.RpcError: Socket closed rpc_code: 14\n", "its connection to Ray broke"),
        (
            "ray.exceptions.OwnerDiedError: Failed to retrieve object 00ff. Its owner has died.\n",
            "the process that it reported to died",
        ),
        ("Failure # 1\nTraceback …\nValueError: no such thing\n", "ValueError: no such thing"),
        ("", "its Ray worker or node died"),
    ],
)
def test_the_cause_of_death_is_the_relevant_line_of_rays_error(
    tmp_path: Path, text: str, cause: str
) -> None:
    """Ray's own message fills more than a page."""
    (tmp_path / "error.txt").write_text(text, encoding="utf-8")
    assert cause_of_death(SimpleNamespace(error_file=str(tmp_path / "error.txt"))) == cause


def test_the_reason_is_one_line() -> None:
    """Ray's own reason fills more than a page."""
    error = RuntimeError("Caught unexpected exception: 2 worker(s) were killed\nOOM kill reason: …")
    assert first_line(error) == "2 worker(s) were killed"
    assert first_line(ValueError()) == "ValueError()"
