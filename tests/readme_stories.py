"""Runs commands of the README that name an example file. Run by `make check`.

They run in their order, on a copy of docs/demo whose models are tiny. What a cloud would start is
not run; the task file for it must be there.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from readme_commands import ROOT, shown_commands

DEMO, MODEL_FOLDER = "docs/demo", "my-model"
CONFIGS = {"qlora.yml": "base_model", "sft.yml": "model_name_or_path"}
"""Configurations of trainers, by their key of the model."""
QUICK = (*CONFIGS, "--save", "--dry-run", "deploy")
"""Parts of the commands that take seconds; others start, measure or simulate much."""
OTHER_PROGRAMS = ("sky",)
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128256,
    "max_position_embeddings": 2048,
}
"""A model that is small, with the vocabulary of Llama 3, by whose rates tokens are counted."""


def story_commands() -> list[list[str]]:
    """Words of the commands, in the order of the README."""
    lines = shown_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    stories = [line for line in lines if any(name in line for name in (*QUICK, *OTHER_PROGRAMS))]
    return [shlex.split(line) for line in stories]


def write_inputs(folder: Path) -> None:
    """Copy the example files, with a tiny model in place of theirs."""
    demo = folder / DEMO
    shutil.copytree(ROOT / DEMO, demo)
    (demo / MODEL_FOLDER / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    for name, key in CONFIGS.items():
        values = yaml.safe_load((demo / name).read_text(encoding="utf-8"))
        text = yaml.safe_dump({**values, key: f"./{MODEL_FOLDER}"})
        (demo / name).write_text(text, encoding="utf-8")


def failure(words: list[str], folder: Path) -> str | None:
    """Reason why a command failed, or None."""
    if words[0] in OTHER_PROGRAMS:
        task = yaml.safe_load((folder / words[-1]).read_text(encoding="utf-8"))
        return None if "axolotl train" in task["run"] else "its file does not start axolotl"
    ended = subprocess.run(
        [sys.executable, "-m", "orchestrator", *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return None if ended.returncode == 0 else f"exit code {ended.returncode}: {ended.stderr}"


def main() -> int:
    """Prints each command that fails; 1 if there is one, or no command."""
    commands, failed = story_commands(), 0
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        for words in commands:
            reason = failure(words, Path(name))
            if reason is not None:
                sys.stderr.write(f"README.md: {shlex.join(words)}: {reason}\n")
                failed += 1
    if not failed:
        sys.stdout.write(f"README.md: {len(commands)} commands with example files ran\n")
    return 1 if failed or not commands else 0


if __name__ == "__main__":
    sys.exit(main())
