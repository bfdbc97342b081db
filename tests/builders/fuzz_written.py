"""Cluster files and tasks that commands write from hostile prices, and what is wrong with them."""

import contextlib
import io
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from builders.fuzz_inputs import Case, Draw, altered, damaged, json_of, text_of
from builders.hostile_texts import MADE, keys, texts
from builders.runs import ONE_CELL, made_run
from orchestrator.cli.main import main as run_command
from orchestrator.clouds.deployment_request import PROVIDERS
from orchestrator.exporting.task_file import TARGETS

CLUSTER = "cluster file"
WRITTEN = "written"
"""Name of the file that a command writes."""
IN_YAML = (CLUSTER, "skypilot", "dstack")
SPEC = ONE_CELL.replace("[cpu]", "[L4, A40, A100-80GB-PCIe]")
OFFER = {"gpu": "L4", "provider": "aws", "instance": "g6.xlarge", "region": "us-east-1"}
NAMES = ("provider", "instance", "instance", "region")
FIRST_LINES = ("  # x\n", "\n\n", "# \u2028x: 1\n", "---\n", "# \U0001f600\n", "%YAML 1.1\n---\n")
RANKED = """\
catalog:
  gpus:
    - {key: A40x, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
  offers:
    - {gpu: A40x, provider: aws, region: here-1, instance: big, usd_per_hour: 7.2, source: me,
       recorded: 2026-01-31}
    - {gpu: A40x, provider: hf-jobs, region: not stated, instance: a10g, usd_per_hour: 8.2,
       source: me, recorded: 2026-01-31}
"""


def cluster_file(draw: Draw, _log: Any) -> Case:
    """A cluster file by prices or a specification that are more than names and values."""
    offer: Any = OFFER | {"usd_per_hour": 0.001, "note": draw(texts(max_size=20))}
    spec = SPEC.encode()
    part = draw(st.sampled_from(("name", "offer", "specification", "first line")))
    if part == "name":
        offer[draw(st.sampled_from(NAMES))] = draw(texts(max_size=20))
    elif part == "offer":
        offer = altered(draw, offer)
    elif part == "specification":
        spec = damaged(draw, spec)
    else:
        spec = draw(st.sampled_from(FIRST_LINES)).encode() + spec
    provider = draw(st.sampled_from(PROVIDERS))
    job = ("--job",) if provider == "kuberay" and draw(st.booleans()) else ()
    return Case(
        CLUSTER,
        ("deploy", "s.yaml", "--provider", provider, *job, "--prices", "p.yaml", "--out", WRITTEN),
        {"s.yaml": spec, "p.yaml": text_of([offer])},
    )


def task(draw: Draw, _log: Any) -> Case:
    """A task by a ranking in a run folder, which others may write."""
    files = dict(ranked_run())
    ranking = json.loads(files["run/ranking.json"])
    target = draw(st.sampled_from(TARGETS))
    for offer in ranking["offers"]:
        offer["provider"] = {"hf-jobs": "hf-jobs", "dstack": "runpod"}.get(target, "aws")
        offer[draw(st.sampled_from(NAMES))] = draw(texts(max_size=20))
    files["run/ranking.json"] = json_of(ranking)
    return Case("task", ("export", "run", "--to", target, "--out", WRITTEN), files)


@cache
def ranked_run() -> Mapping[str, bytes]:
    """Files of a run with a ranking."""
    with tempfile.TemporaryDirectory() as folder:
        text = ONE_CELL.replace("[cpu]", "[A40x]").replace("fp32}", "fp32, loss: chunked}")
        made_run(Path(folder) / "run", text + RANKED)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run_command(["rank", f"{folder}/run", "--epochs", "5", "--batch-size", "40"])
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def wrong_file(case: Case, folder: Path) -> str | None:
    """Mistake in a file that a command wrote; None where there is none, or no file."""
    path = folder / WRITTEN
    if not path.exists():
        return None
    target = case.arguments[case.arguments.index("--to") + 1] if "--to" in case.arguments else ""
    text = path.read_text(encoding="utf-8")
    if (target or CLUSTER) in IN_YAML:
        try:
            documents = list(yaml.safe_load_all(text))
        except yaml.YAMLError:
            return "unreadable"
        return "injected" if MADE in json.dumps(keys(documents), default=str) else None
    if subprocess.run(["bash", "-n", path], capture_output=True, check=False).returncode:
        return "unreadable"
    only = folder / "only"
    only.mkdir()
    (only / "touch").symlink_to(shutil.which("touch") or "/usr/bin/touch")
    bash = shutil.which("bash") or "/bin/bash"
    subprocess.run(
        [bash, path], cwd=folder, env={"PATH": str(only)}, capture_output=True, check=False
    )
    return "injected" if [*folder.glob(f"{MADE}*")] else None
