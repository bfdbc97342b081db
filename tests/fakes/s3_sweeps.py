"""Sweeps on a real Ray into a bucket of this machine, each from a machine of its own."""

import subprocess
import sys
from pathlib import Path

from fakes.law_prober import LawProber
from fakes.ray_sweeps import environment
from fakes.s3_server import CREDENTIALS, S3Server
from orchestrator.planning.plan import trial_task
from orchestrator.spec.spec_file import parse_spec
from trials.records.observation import Observation
from trials.records.profile import Logged, logged
from trials.run_trial import run_trial


def start_sweep(
    server: S3Server, home: Path, *arguments: str, **variables: str
) -> subprocess.Popen[bytes]:
    """Start a sweep on a machine whose home is also its working directory and has its log."""
    home.mkdir(exist_ok=True)
    more = {"AWS_ENDPOINT_URL": server.url} | variables
    settings = environment(home, **CREDENTIALS, **more)
    settings.pop("XDG_STATE_HOME", None)
    with (home / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "sweep", *arguments],
            env=settings,
            cwd=home,
            stdout=log,
            stderr=log,
        )


def sent(server: S3Server, run: str) -> list[Logged]:
    """The observations in the bucket by now."""
    segments = server.objects(f"{run}/observations/")
    lines = [line for content in segments.values() for line in content.splitlines()]
    return [logged(line) for line in lines]


def undisturbed(text: str) -> list[Observation]:
    """Expected observations of a specification whose batch sizes all fit: its trials alone."""
    spec, observed = parse_spec(text, "small.yaml"), list[Observation]()
    for cell in spec.all_cells():
        task = trial_task(spec, spec.merged_catalog(), cell, [])
        run_trial(task, LawProber(example_bytes=1), observed.append)
    return observed
