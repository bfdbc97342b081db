"""Checkpoints of an exported task on their way to a bucket and back."""

import os
import subprocess
import sys
from pathlib import Path

from orchestrator.exporting.training_script import filled

AWS = Path(__file__).resolve().parent / "fakes" / "aws_command.py"
TRAINING = """\
for step in 5 10 15; do
    mkdir -p "$OUTPUT/checkpoint-$step"
    echo $step > "$OUTPUT/checkpoint-$step/model"
    [ $step = 15 ] || echo $step > "$OUTPUT/checkpoint-$step/trainer_state.json"
done
echo done > "$OUTPUT/adapter"
"""


def files_of(folder: Path) -> set[str]:
    """Relative paths of the files in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def run(script: str, folder: Path, output: str, rank: int | None = None) -> set[str]:
    """Files in the output of a script that a task would run with a bucket, on a node's number."""
    command = folder / "bin" / "aws"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {AWS} "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    variables = {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "STORE": str(folder / "store"),
        "OUTPUT_BUCKET": "s3://bucket/run",
        "OUTPUT": str(folder / output),
        "NODE_RANK": str(rank),
    }
    bucket = filled("bucket", script=script, nodes=1 if rank is None else 2)
    text = f"set -euo pipefail\n{bucket}"
    done = subprocess.run(
        ["bash", "-c", text], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return files_of(folder / output)


def test_checkpoints_reach_the_bucket_and_the_last_whole_one_comes_back(tmp_path: Path) -> None:
    """One that was interrupted as it was written is in the bucket without its last file."""
    run(TRAINING, tmp_path, "first")
    assert files_of(tmp_path / "store" / "bucket" / "run") == {
        *("checkpoint-5/model", "checkpoint-5/trainer_state.json"),
        *("checkpoint-10/model", "checkpoint-10/trainer_state.json"),
        *("checkpoint-15/model", "adapter"),
    }
    whole = {"checkpoint-10/model", "checkpoint-10/trainer_state.json"}
    assert run("true", tmp_path, "second") == whole


def test_an_empty_bucket_is_a_first_start(tmp_path: Path) -> None:
    """Nothing comes back, and the training begins."""
    assert run('echo done > "$OUTPUT/adapter"', tmp_path, "first") == {"adapter"}


def test_the_first_of_several_nodes_fills_the_bucket(tmp_path: Path) -> None:
    """The others fetch the checkpoint from there, and keep what they write."""
    assert run(TRAINING, tmp_path, "second", rank=1)
    assert not (tmp_path / "store").exists()
    run(TRAINING, tmp_path, "first", rank=0)
    assert "checkpoint-10/trainer_state.json" in files_of(tmp_path / "store" / "bucket" / "run")
    whole = {"checkpoint-10/model", "checkpoint-10/trainer_state.json"}
    assert run("true", tmp_path, "new", rank=1) == whole
