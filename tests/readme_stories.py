"""Runs the commands of the README that take a configuration. Run by `make check`.

They run in their order, in a folder with a small configuration of axolotl and a few chats. What a
cloud would start is not run; the task file for it must be there.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from readme_commands import ROOT, shown_commands

CONFIG = "qlora.yml"
OTHER_PROGRAMS = ("sky",)
TRAINING = """\
base_model: ./model
load_in_4bit: true
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
bf16: true
gradient_checkpointing: true
"""


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
    stories = [line for line in lines if CONFIG in line or line.startswith(OTHER_PROGRAMS)]
    return [shlex.split(line) for line in stories]


def write_inputs(folder: Path) -> None:
    """Write the configuration, a model and the chats."""
    (folder / CONFIG).write_text(TRAINING, encoding="utf-8")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    chats = (
        {
            "messages": [
                {"role": role, "content": "a few words " * n} for role in ("user", "assistant")
            ]
        }
        for n in (2, 5, 9, 14)
    )
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)) + "\n", "utf-8")


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
        sys.stdout.write(f"README.md: {len(commands)} commands with a configuration ran\n")
    return 1 if failed or not commands else 0


if __name__ == "__main__":
    sys.exit(main())
