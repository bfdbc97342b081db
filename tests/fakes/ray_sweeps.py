"""Small sweeps on a real Ray, started as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import Observation

STAND_IN = Path(__file__).parent / "stand_in"
LAW_PATH = os.pathsep.join(map(str, (STAND_IN, *STAND_IN.parents[1:3])))
"""Value of PYTHONPATH with which trials run the law of ``law_worker.py`` in place of a model."""
# The smallest models and lengths: what these tests look at is what happens around the trials.
SPEC = """\
name: small
gpus: [cpu-small]
cells:
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [24, 32, 40]
workload: {examples: 100, epochs: 1}
seed: 3
max_batch_size: 32
timing: {warmup_steps: 0, warmup_seconds: 0.0, max_steps: 6, max_seconds: 0.2}
catalog:
  gpus:
    - key: cpu-small
      kind: cpu
      usable_memory_bytes: 14000000
      source: made for this test
      recorded: 2026-11-20
  offers:
    - {gpu: cpu-small, provider: own, region: here, instance: desk, usd_per_hour: 0.10,
       source: made for this test, recorded: 2026-11-20}
"""
# Of a specification whose name, GPUs and catalog are a test's own.
SMALL_CELL = """\
cells:
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [32]
workload: {examples: 100, epochs: 1}
max_batch_size: 32
timing: {warmup_steps: 0, warmup_seconds: 0.0, max_steps: 6, max_seconds: 0.2}
"""


def environment(home: Path, **more: str) -> dict[str, str]:
    """A user's environment with a home of its own, and this interpreter first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return kept | {"HOME": str(home), "PATH": path, "RAY_ADDRESS": "local"} | more


def two_devices(name: str, small_usd: float, large_usd: float) -> str:
    """A specification with two devices of this machine at these hourly prices."""
    rows = "".join(
        f"    - {{key: {key}, kind: cpu, usable_memory_bytes: {size}, source: test, "
        "recorded: 2026-11-20}\n"
        for key, size in (("small", 14000000), ("large", 16000000))
    )
    offers = "".join(
        f"    - {{gpu: {key}, provider: own, region: here, instance: {key}, usd_per_hour: {usd}, "
        "source: test, recorded: 2026-11-20}\n"
        for key, usd in (("small", small_usd), ("large", large_usd))
    )
    start = f"name: {name}\ngpus: [small, large]\n"
    return f"{start}{SMALL_CELL}catalog:\n  gpus:\n{rows}  offers:\n{offers}"


def ended(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Result of a command that ran in its home folder."""
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        env=environment(home, **variables),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def start_sweep(
    spec: Path, out: Path, home: Path, *more: str, **variables: str
) -> subprocess.Popen[bytes]:
    """Start a sweep on a Ray of its own; its output goes to a file beside the run."""
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "sweep", str(spec), "--out", str(out), *more],
            env=environment(home, **variables),
            cwd=home,
            stdout=log,
            stderr=log,
        )


def observations(out: Path) -> list[Observation]:
    """Observations that are on disk now."""
    return RunFolder(out).observations()
