"""Start of child processes: imports run without garbage collection, children run with it."""

import subprocess
import sys
from pathlib import Path

import pytest

FORK_SERVER = """\
import gc, sys
from builders.observations import cpu, tiny_cell
from trials.records.model import find_model
from trials.records.messages import Setup
from trials.training.worker import serve_forks

print(__name__, sys.argv[1:], gc.isenabled(), flush=True)
cell = tiny_cell()
setup = Setup(cell=cell, model=find_model(cell.model), gpu=cpu(), threads=1, seed=0)


class Pipe:
    received = iter([setup.model_dump_json(), ""])

    def receive(self):
        return next(self.received)

    def send(self, message, before=b""):
        print(type(message).__name__, flush=True)


def run_child(setup, pipe):
    print(gc.isenabled(), gc.get_freeze_count() > 100_000, flush=True)


serve_forks(Pipe(), Setup, run_child)
"""


@pytest.mark.long
def test_a_fork_server_enables_garbage_collection_before_it_forks(tmp_path: Path) -> None:
    """Without garbage collection a child would hold more memory than fine-tuning does."""
    (tmp_path / "fork_server_program.py").write_text(FORK_SERVER)
    here = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "trials.child_process.bootstrap",
            "fork_server_program",
            "7",
        ],
        env={"PYTHONPATH": f"{tmp_path}:{here}:{here.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = ["__main__ ['7'] False", "ChildStarted", "True True", "Ended"]
    assert done.stdout.splitlines() == said, done.stderr
