"""Task files have the keys and run the commands of their templates alone, whatever the names."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.hostile_texts import INJECTIONS, MADE, keys, texts
from builders.long_cases import long_cases
from builders.task_scripts import scripts
from builders.trainings import OF_HUGGING_FACE, SECURE, SPOT, training_of
from hypothesis import given, settings

from orchestrator.exporting.task_file import TARGETS, Target, task_file
from orchestrator.exporting.training import PatchedConfiguration, TrainingJob

BENIGN = "benign"
OFFERS = {"hf-jobs": OF_HUGGING_FACE, "dstack": SECURE}
CONFIGURATION = PatchedConfiguration(
    name="c.yml", trainer="axolotl", version="0.19", text="base_model: x\n", diff="", files={}
)
# What scripts start; each call is a line with its words as JSON.
STUBS = ("aws", "axolotl", "hf", "pip", "python3", "ray", "scontrol", "srun", "trl")
STUB = f"""#!{sys.executable} -IS
import json, sys
from pathlib import Path
here = Path({{folder!r}})
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv) + "\\n")
if "-m" in sys.argv and "venv" in sys.argv:
    place = Path(sys.argv[-1]) / "bin"
    place.mkdir(parents=True, exist_ok=True)
    (place / "activate").touch()
"""


def training(target: Target, text: str) -> TrainingJob:
    """A training with a text in each place that a task file has for one."""
    offer = OFFERS.get(target, SPOT)
    named = {"hf-jobs": {"instance": text}, "skypilot": {"instance": text.replace(" ", "_")}}
    place = replace(offer, region=text, **named.get(target, {"instance": text}))
    of_data = {"dataset": f"hub/{text}", "subset": text, "split": text, "text_field": text}
    return training_of(placements=(place,), **of_data)


def configured(text: str) -> TrainingJob:
    """A training by a configuration that has a text in it, and as the name of its data."""
    quoted = f"base_model: x\n# {text}\nkey: {json.dumps(text)}\n"
    own = replace(CONFIGURATION, name=text, text=quoted, files={text: Path("/data")})
    return training_of(configuration=own)


@pytest.mark.parametrize("target", ["skypilot", "dstack"])
@settings(max_examples=40)
@given(text=texts())
def test_a_text_adds_no_key(target: Target, text: str) -> None:
    """Its value is the text, and scripts are the same but for it."""
    made = yaml.safe_load(task_file(training(target, text), target).text)
    plain = yaml.safe_load(task_file(training(target, BENIGN), target).text)
    for task in (made, plain):
        task.pop("regions", None)  # a text that is no region stands for all
    assert keys(made) == keys(plain)
    variables = made["env"] if target == "dstack" else [f"DATASET={made['envs']['DATASET']}"]
    assert f"DATASET=hub/{text}" in variables
    own = configured(text)
    made = yaml.safe_load(task_file(own, target).text)
    plain = yaml.safe_load(task_file(configured(BENIGN), target).text)
    mounts = {"skypilot": "file_mounts", "dstack": "files"}[target]
    made.pop(mounts, None)
    plain.pop(mounts, None)
    assert keys(made) == keys(plain)
    assert own.configuration is not None
    assert own.configuration.text in scripts(target, yaml.safe_dump(made))[-1]


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=40)
@given(text=texts())
def test_bash_reads_every_script(target: Target, text: str) -> None:
    """None has an error of syntax, also inside its documents."""
    for script in scripts(target, task_file(training(target, text), target).text):
        checked = subprocess.run(
            ["bash", "-n"], input=script.encode(), capture_output=True, check=False
        )
        assert checked.stderr == b""


def calls(target: Target, text: str, folder: Path) -> list[list[str]]:
    """Commands that the scripts of a task file start, which are stubs."""
    for name in STUBS:
        (folder / name).write_text(STUB.format(folder=str(folder)), encoding="utf-8")
        (folder / name).chmod(0o755)
    task = task_file(training(target, text), target).text
    task = task.replace("/YOUR_SHARED_FOLDER", str(folder)).replace("/tmp/training", str(folder))  # noqa: S108
    variables = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "OUTPUT": str(folder)}
    if target == "skypilot":
        variables |= yaml.safe_load(task)["envs"] | {"OUTPUT": str(folder)}
    if target in {"hf-jobs", "ray"}:
        variables |= {"MODEL": "m", "DATASET": "d"}
    made = scripts(target, task)
    for script in {"skypilot": made[-1:], "hf-jobs": made}.get(target, made[:1]):
        subprocess.run(["bash", "-c", script], env=variables, cwd=folder, check=True)
    lines = (folder / "calls").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def value_of(words: list[str], option: str) -> Any:
    """The word after an option."""
    return words[words.index(option) + 1]


RUN = [text for text in INJECTIONS if text and "\0" not in text]
RUN_BY = ("skypilot", "hf-jobs", "slurm")
QUICK = [*zip(cycle(RUN_BY), RUN, strict=False)]
"""Each text once, in the files of one format or another."""


@pytest.mark.parametrize(
    ("target", "text"),
    [*QUICK, *long_cases(case for case in product(RUN_BY, RUN) if case not in QUICK)],
)
def test_a_text_is_run_by_no_script(target: Target, text: str, tmp_path: Path) -> None:
    """Each is a word of the command that gets it."""
    started = calls(target, text, tmp_path)
    assert not [*tmp_path.rglob(f"{MADE}*")]
    trained = next(words for words in started if Path(words[0]).name == "trl")
    assert value_of(trained, "--dataset_text_field") == text
    assert value_of(trained, "--dataset_config") == text
    if target == "hf-jobs":
        job = next(words for words in started if Path(words[0]).name == "hf")
        assert value_of(job, "--flavor") == text
    else:
        assert value_of(trained, "--dataset_name") == f"hub/{text}"


@pytest.mark.parametrize("text", [f"$(touch {MADE})", f'x\nJOB\n)"\ntouch {MADE}\n'])
def test_ray_gets_a_job_as_one_word(text: str, tmp_path: Path) -> None:
    """The commands of the job run on the cluster."""
    started = calls("ray", text, tmp_path)
    assert not [*tmp_path.rglob(f"{MADE}*")]
    (job,) = (words for words in started if Path(words[0]).name == "ray")
    assert job[-3:-1] == ["bash", "-c"]
    assert json.loads(value_of(job, "--entrypoint-resources")) == {"A10G": 1}
