"""What the driver hears when Tune gives up on everything at once, or a trial says nothing more."""

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders.runs import TWO_CELLS, spec_of
from fakes.ray_sweeps import environment

from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import trial_task
from orchestrator.ray_backend import trial_relay
from orchestrator.ray_backend.trial_relay import TrialRelay, cause_of_death
from orchestrator.ray_backend.tune_runner import first_line
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
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.ends: list[tuple[Cell, str | None]] = []

    def started(self, cell: Cell) -> None:
        """Heard, and not kept."""

    def observed(self, observation: Observation) -> None:
        """As above."""

    def ended(self, cell: Cell, error: str | None) -> None:
        self.ends.append((cell, error))


def relay_to(diary: Diary) -> TrialRelay:
    """Of both cells, on a machine with two cores."""
    catalog = SPEC.merged_catalog()
    scheduler = Scheduler(
        [FIRST, SECOND],
        lambda cell: trial_task(SPEC, catalog, cell, []),
        {"cpu": {"CPU": 1.0}},
        CLUSTER,
        wait_seconds=60,
        nodes_out={},
        note=lambda _: None,
    )
    return TrialRelay(scheduler, diary, lambda: CLUSTER, lambda _: None)


def trial(cell: Cell) -> SimpleNamespace:
    """As Tune hands it to its callbacks."""
    return SimpleNamespace(config={"trial": {"cell": cell.key}})


def test_trials_that_began_and_did_not_end_are_told_to_have_died() -> None:
    """Ray kills workers where memory runs low, and Tune raises for all trials: none is lost."""
    diary = Diary()
    relay = relay_to(diary)
    assert [(relay.next_trial() or {})["cell"] for _ in range(2)] == [FIRST.key, SECOND.key]
    relay.started(trial(FIRST))
    relay.started(trial(SECOND))
    relay.ended(trial(FIRST), None)
    assert relay.all_ended("low on memory") == 1
    assert relay.all_ended("twice") == 0
    assert diary.ends == [(FIRST, None), (SECOND, "low on memory")]
    assert (relay.next_trial() or {})["cell"] == SECOND.key


def test_a_worker_that_says_nothing_any_more_is_killed_and_told_to_have_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own clock is no help where it hangs itself; it is killed once."""
    killed: list[object] = []
    monkeypatch.setattr(trial_relay, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(trial_relay, "kill", killed.append)
    diary = Diary()
    relay = relay_to(diary)
    relay.next_trial()
    hung = trial(FIRST)
    relay.started(hung)
    now = relay._scheduler._clock()
    monkeypatch.setattr(relay._scheduler, "_clock", lambda: now + 1500)
    relay.check_cluster()
    relay.check_cluster()
    assert killed == [hung]
    relay.ended(hung, "its Ray worker died")
    assert diary.ends == [(FIRST, "no report within 1320 s")]


def test_a_full_disk_while_looking_at_the_cluster_is_told_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not as Ray's failure to place trials: what the scheduler raises comes first."""
    monkeypatch.setattr(trial_relay, "CHECK_SECONDS", 0.0)
    relay = relay_to(Diary())

    def full(_: ClusterResources) -> dict[Cell, str]:
        raise StoreError("faults.json: No space left on device")

    monkeypatch.setattr(relay._scheduler, "update", full)
    with pytest.raises(StoreError):
        relay.check_cluster()
    assert isinstance(relay.raised, StoreError)


def test_a_full_disk_while_nodes_are_written_down_is_told_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What new nodes are rented as is kept while trials run."""
    monkeypatch.setattr(trial_relay, "CHECK_SECONDS", 0.0)
    relay = relay_to(Diary())

    def full(_: ClusterResources) -> None:
        raise StoreError("rented.json: No space left on device")

    monkeypatch.setattr(relay, "_record_nodes", full)
    with pytest.raises(StoreError):
        relay.check_cluster()
    assert isinstance(relay.raised, StoreError)


def test_nothing_of_it_is_pickled() -> None:
    """Tune pickles its callbacks again and again, and never reads them here."""
    assert pickle.loads(pickle.dumps(relay_to(Diary()))).__dict__ == {}  # noqa: S301 - our own


def test_a_trial_that_is_over_leaves_next_to_nothing_in_memory() -> None:
    """A sweep of thousands runs in the memory of one of a hundred: on a real Ray."""
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
\tclass_name: ImplicitFunc
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
    ("text", "told"),
    [
        (
            NODE_DIED,
            "its node was terminated unexpectedly: health check failed",
        ),
        (
            WORKER_DIED,
            "its Ray worker died: Worker unexpectedly exits with a connection error code 2",
        ),
        ("Failure # 1\nTraceback …\nValueError: no such thing\n", "ValueError: no such thing"),
        ("", "its Ray worker or node died"),
    ],
)
def test_a_death_is_told_in_the_words_that_matter(tmp_path: Path, text: str, told: str) -> None:
    """Ray's own run over a page."""
    (tmp_path / "error.txt").write_text(text, encoding="utf-8")
    assert cause_of_death(SimpleNamespace(error_file=str(tmp_path / "error.txt"))) == told


def test_the_reason_is_one_line() -> None:
    """Ray's runs over a page."""
    error = RuntimeError("Caught unexpected exception: 2 worker(s) were killed\nOOM kill reason: …")
    assert first_line(error) == "2 worker(s) were killed"
    assert first_line(ValueError()) == "ValueError()"
