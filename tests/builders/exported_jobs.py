"""What an exported job finds where it runs: a small data set, and TRL's commands on the CPU."""

import os
import sys
from pathlib import Path

from builders.data import rows, write_jsonl

COMMANDS = {
    "trl": "-m trl.cli.main",
    "accelerate": "-m accelerate.commands.accelerate_cli",
    "torchrun": "-m torch.distributed.run",
    "python": "",
}


def job_variables(folder: Path, model: Path, options: str = "--use_cpu True") -> dict[str, str]:
    """Variables of a job in a folder, with 24 examples and the commands of its trainer.

    Args:
        folder: an empty folder.
        model: folder of the model.
        options: further options of each command.
    """
    data, commands = folder / "data", folder / "bin"
    data.mkdir()
    commands.mkdir()
    write_jsonl(data / "train.jsonl", [{"text": row["question"]} for row in rows(24)])
    for name, words in COMMANDS.items():
        file = commands / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@" {options}\n', "utf-8")
        file.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MODEL": str(model),
        "DATASET": str(data),
    }
