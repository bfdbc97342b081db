"""A fork server that one trial leaves to the next: the same process, unless it cannot be."""

from threading import Thread

import psutil
import pytest
from builders.observations import recipe, tiny_cell
from builders.small_probes import SMALL, TOO_LARGE, small_setup

from trials.child_process.child_prober import ChildProber
from trials.child_process.fork_server import ForkServers
from trials.records.messages import Setup
from trials.records.observation import Outcome

SETUP = small_setup(tiny_cell(seq_len=8))


def prober_of(setup: Setup, servers: ForkServers) -> ChildProber:
    """A prober with timeouts long enough for a busy machine."""
    return ChildProber(setup, build_timeout_seconds=120, probe_timeout_seconds=60, servers=servers)


def parent_of_trial(servers: ForkServers, setup: Setup = SETUP) -> psutil.Process:
    """Fork server of a trial that has ended, and whose child was alive to its end."""
    with prober_of(setup, servers) as prober:
        end = prober.probe(SMALL)
        assert (end.outcome, end.detail) == (Outcome.FITS, None)
        assert prober.child_pid is not None
        child = psutil.Process(prober.child_pid)
        parent = child.parent()
    assert parent is not None
    assert not child.is_running()
    return parent


@pytest.mark.long
def test_a_trial_takes_the_fork_server_that_the_last_one_left() -> None:
    """Also for another recipe, and after a trial in its own thread, out of memory or not built.

    Another starts where it is dead or has other threads, whose number is an environment variable;
    one idle process is kept, not two.
    """
    with ForkServers() as servers:
        parents = [parent_of_trial(servers)]
        thread = Thread(target=lambda: parents.append(parent_of_trial(servers)))
        thread.start()
        thread.join()
        with prober_of(SETUP, servers) as prober:
            assert prober.probe(TOO_LARGE).outcome is Outcome.OUT_OF_MEMORY
        check_a_recipe_that_cannot_be_built(servers)
        lora = SETUP.model_copy(update={"cell": tiny_cell(recipe=recipe("lora"), seq_len=8)})
        parents.append(parent_of_trial(servers, lora))
        (first,) = set(parents)
        first.kill()
        first.wait()
        second = parent_of_trial(servers)
        other = parent_of_trial(servers, SETUP.model_copy(update={"threads": 2}))
        assert len({first, second, other}) == 3
        assert not second.is_running()
        assert other.is_running()
    assert not other.is_running()


def check_a_recipe_that_cannot_be_built(servers: ForkServers) -> None:
    """It fails for good with its reason, and without a child."""
    nowhere = tiny_cell(recipe=recipe("lora", lora_targets=("nowhere",)), seq_len=8)
    with prober_of(SETUP.model_copy(update={"cell": nowhere}), servers) as refused:
        ends = [refused.probe(SMALL) for _ in range(2)]
        assert refused.child_pid is None
    for end in ends:
        assert end.outcome is Outcome.FAILED
        assert end.detail is not None
        assert end.detail.startswith("TargetError: ")
        assert "nowhere" in end.detail
        assert end.final
        assert end.environment is None
