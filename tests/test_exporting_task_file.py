"""Task files of five formats: offers, variables, and a script that bash accepts."""

import json
import os
import re
import shlex
import subprocess
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.task_scripts import scripts
from builders.trainings import NOWHERE, OF_HUGGING_FACE, SECURE, SPOT, training_of
from packaging.specifiers import SpecifierSet

from gpu_catalog.catalog import load_catalog
from orchestrator.cli.commands.export import configured
from orchestrator.clouds.skypilot import skypilot_instance
from orchestrator.exporting.names import DSTACK_GPUS
from orchestrator.exporting.requirements import AXOLOTL_CCE
from orchestrator.exporting.task_file import TARGETS, Target, task_file, write_task
from orchestrator.exporting.training import ExportError, PatchedConfiguration
from trials.records.model import find_model


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fields", [{}, {"loss": "full-logits"}])
def test_bash_accepts_every_script(target: Target, fields: dict[str, Any]) -> None:
    """The command of the training is in each file, with its variables."""
    text = task_file(training_of(fields, placements=(SPOT, OF_HUGGING_FACE)), target).text
    parts = scripts(target, text)
    for script in parts:
        checked = subprocess.run(
            ["bash", "-n"], input=script, text=True, capture_output=True, check=False
        )
        assert checked.stderr == ""
    assert '--model_name_or_path "$MODEL"' in parts[-1]
    assert {"MODEL", "DATASET", "OUTPUT_BUCKET"} <= set(re.findall(r"[A-Z_]+", text))
    assert "YOUR_DATASET" in text
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) <= 100


def test_a_python_file_trains_the_model_that_it_names(tmp_path: Path) -> None:
    """A preset has the weights of its base model; a model of the command line stays."""
    file = tmp_path / "train.py"
    model = "Qwen/Qwen2.5-0.5B-Instruct"
    file.write_text(
        f'model = AutoModelForCausalLM.from_pretrained("{model}")\nargs = SFTConfig()\n', "utf-8"
    )
    assert configured(training_of(), file, 256).model.weights == model
    other = training_of(model=find_model("smollm3-3b"))
    assert configured(other, file, 256).model == other.model


def test_the_loss_of_axolotls_plugin_has_the_fork_that_it_asks_for() -> None:
    """Without it training ends at its start."""
    own = PatchedConfiguration("c.yml", "axolotl", "0.19", "base_model: x\n", "", {})
    for loss, is_installed in (("cce", True), ("full-logits", False)):
        text = task_file(training_of({"loss": loss}, configuration=own), "skypilot").text
        assert (AXOLOTL_CCE in text) == is_installed


def test_skypilot_has_the_next_offers_in_their_order() -> None:
    """Another provider's market and region stay as chosen; one that it lacks is left out."""
    file = task_file(training_of(), "skypilot")
    task = yaml.safe_load(file.text)
    assert task["resources"]["ordered"] == [
        {"infra": "aws/us-east-1", "instance_type": "g5.xlarge", "use_spot": True},
        {"infra": "lambda", "instance_type": "gpu_8x_a100_80gb_sxm4", "use_spot": False},
    ]
    assert task["envs"]["MODEL"] == "Qwen/Qwen2.5-0.5B"
    assert task["file_mounts"]["/outputs"]["name"] == "${OUTPUT_BUCKET}"
    assert [line.rpartition(": ")[2] for line in file.left_out] == [
        "it has no provider hyperstack",
        "it mounts no bucket on machines of runpod",
    ]


def test_skypilot_trains_in_a_python_that_the_task_brings(tmp_path: Path) -> None:
    """Images of Ubuntu 22.04 have Python 3.10, which TRL does not run on."""
    environment, programs = tmp_path / "training" / "bin", tmp_path / ".local" / "bin"
    for folder, name in ((environment, "pip"), (environment, "trl"), (programs, "uv")):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / name
        file.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}-calls\n', encoding="utf-8")
        file.chmod(0o755)
    task = yaml.safe_load(task_file(training_of(), "skypilot").text)
    variables = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]} | task["envs"]
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-c", script], env=variables, cwd=tmp_path, check=True)
    calls = {name: (tmp_path / f"{name}-calls").read_text("utf-8") for name in ("uv", "pip", "trl")}
    *_, version, place = calls["uv"].split()
    assert place == str(tmp_path / "training")
    assert SpecifierSet(str(metadata.metadata("trl")["Requires-Python"])).contains(version)
    assert calls["pip"].startswith("install trl==")
    assert calls["trl"].startswith("sft ")


@pytest.mark.parametrize(
    ("target", "reason"), [("skypilot", r"driver 535,.* 580 "), ("dstack", "no provider cudo")]
)
def test_a_machine_of_cudo_is_no_choice(target: Target, reason: str) -> None:
    """The driver in SkyPilot's image is older than PyTorch needs; dstack has dropped the cloud."""
    cudo = replace(SPOT, provider="cudo", instance="ice-lake-a40-compute_1x24v48gb")
    file = task_file(training_of(placements=(cudo, SPOT)), target)
    assert file.placements == (SPOT,)
    (line,) = file.left_out
    assert re.search(reason, line)


@pytest.mark.parametrize(
    ("provider", "instance", "name"),
    [
        ("runpod", "1x_A40_SECURE", "1x_A40_SECURE"),
        ("runpod", "NVIDIA A40", None),
        ("nebius", "gpu-h100-sxm 1gpu-16vcpu-200gb", "gpu-h100-sxm_1gpu-16vcpu-200gb"),
        ("gcp", "n1-standard-8", None),
        ("gcp", "a2-highgpu-1g", "a2-highgpu-1g"),
        ("hyperstack", "n3-A100x1", None),
    ],
)
def test_instances_have_the_names_of_skypilot(
    provider: str, instance: str, name: str | None
) -> None:
    """Live prices name some of them in other ways."""
    assert skypilot_instance(provider, instance) == name


def test_three_fallbacks_are_enough() -> None:
    """More would only be more expensive."""
    file = task_file(training_of(placements=(SPOT,) * 9), "skypilot")
    assert len(file.placements) == 4
    assert file.left_out == ()


def test_a_format_without_any_of_the_offers_is_refused() -> None:
    """The lines name the offers, the reason and the formats that take one of them."""
    with pytest.raises(ExportError, match=r"hyperstack.*\n.*: give other --providers"):
        task_file(training_of(placements=(NOWHERE,)), "skypilot")
    with pytest.raises(ExportError, match=r"on its own hardware\n.*: give --to dstack, or other"):
        task_file(training_of(placements=(SECURE,)), "hf-jobs")


@pytest.mark.parametrize("target", TARGETS)
def test_a_card_of_ones_own_is_for_ray_and_slurm(target: Target) -> None:
    """A cloud would start a rented fallback in its place."""
    own = replace(SECURE, provider="own", instance="A40", is_electricity=True)
    training = training_of(placements=(own, SPOT))
    if target in ("ray", "slurm"):
        assert "per hour (electricity of the card alone)" in task_file(training, target).text
    else:
        with pytest.raises(ExportError, match="your own A40"):
            task_file(training, target)


def test_dstack_chooses_within_the_offers() -> None:
    """Lists of all offers, up to the price of the most expensive."""
    task = yaml.safe_load(task_file(training_of(), "dstack").text)
    assert task["backends"] == ["aws", "runpod", "lambda"]
    assert "regions" not in task  # an offer of all regions is among them
    assert task["resources"]["gpu"] == {
        "name": ["A10G", "A40", "A100"],
        "memory": "24GB..",
        "count": "1..8",
    }
    assert (task["spot_policy"], task["max_price"]) == ("auto", 14.0)
    alone = yaml.safe_load(task_file(training_of(placements=(SPOT,)), "dstack").text)
    assert (alone["regions"], alone["spot_policy"]) == (["us-east-1"], "spot")


@pytest.mark.parametrize(
    ("price", "limit"), [(113.9328, 113.9328), (14.0, 14.0), (5.29601, 5.2961), (100 / 3, 33.3334)]
)
def test_the_price_limit_of_dstack_is_not_below_the_price(price: float, limit: float) -> None:
    """It has at most four decimals, rounded up."""
    text = task_file(training_of(placements=(replace(SPOT, usd_per_hour=price),)), "dstack").text
    assert yaml.safe_load(text)["max_price"] == limit


def sbatch_options(text: str) -> dict[str, str]:
    """Options of the lines of a batch script, which end where commands begin."""
    lines = text.splitlines()
    assert lines[0].startswith("#!")
    options: dict[str, str] = {}
    for line in lines[1:]:
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.removeprefix("--").partition("=")
            assert re.fullmatch(r"[a-z-]+", name)
            options[name] = value
    assert text.count("#SBATCH") == len(options)
    return options


def test_slurm_asks_for_the_gpu_and_is_requeued() -> None:
    """The time limit is twice the prediction."""
    options = sbatch_options(task_file(training_of(), "slurm").text)
    assert (options["gpus-per-node"], options["time"]) == ("a10g:1", "20:00:00")
    assert "requeue" in options


def test_several_gpus_are_asked_for_together() -> None:
    """Slurm and Ray give the job as many; a job of the hub has hardware with as many."""
    training = training_of({"effective_batch": 16}, gpus=2, strategy="ddp")
    options = sbatch_options(task_file(training, "slurm").text)
    names = ("gpus-per-node", "cpus-per-task", "mem")
    assert [options[name] for name in names] == ["a10g:2", "16", "128G"]
    text = task_file(training, "ray").text
    assert "--entrypoint-num-gpus 2 " in text
    assert '{"A10G": 2}' in text
    assert "2 x 4 accumulated x 2 GPUs (ddp) = 16 examples" in text
    pair = replace(OF_HUGGING_FACE, instance="a10g-largex2", gpus_per_instance=2)
    text = task_file(replace(training, placements=(SPOT, pair)), "hf-jobs").text
    assert "--flavor a10g-largex2 " in text
    assert "--num_processes 2 " in text


def command_in(text: str, start: str) -> list[str]:
    """Words of a command in a script, its last argument left out."""
    joined = text.replace("\\\n", " ")
    (line,) = [line for line in joined.splitlines() if line.startswith(start)]
    return [*shlex.split(line.partition('"$(')[0])[len(start.split()) :], "script"]


@pytest.mark.parametrize(("high", "limit"), [(15.0, "20:00:00"), (31.2, "32:00:00")])
def test_a_job_may_take_its_whole_interval(high: float, limit: str) -> None:
    """Twice the predicted hours, and longer where the interval ends later."""
    text = task_file(training_of(placements=(replace(SPOT, hours_high=high),)), "slurm").text
    assert f"#SBATCH --time={limit}\n" in text


def test_hugging_faces_own_parser_reads_the_job() -> None:
    """Flavor, limit, variables and the bucket."""
    from huggingface_hub.cli.hf import app  # noqa: PLC0415 - only this needs it

    file = task_file(training_of(placements=(SPOT, OF_HUGGING_FACE)), "hf-jobs")
    text = file.text
    assert [place.provider for place in file.placements] == ["hf-jobs"]
    jobs: Any = app
    for name in ("jobs", "run"):
        jobs = jobs.get_command(jobs.make_context(name, [], resilient_parsing=True), name)
    values = jobs.make_context("run", command_in(text, "hf jobs run")).params
    assert (str(values["flavor"]), values["timeout"]) == ("a10g-large", "20h")
    assert values["volume"] == ("hf://buckets/$OUTPUT_BUCKET:/outputs",)
    assert list(values["secrets"]) == ["HF_TOKEN"]


def test_rays_own_parser_reads_the_job() -> None:
    """The job takes a GPU on a node with that GPU's key."""
    from ray.dashboard.modules.job.cli import submit  # noqa: PLC0415 - only this needs it

    text = task_file(training_of(), "ray").text
    values = submit.make_context("submit", command_in(text, "ray job submit")).params
    assert values["entrypoint_num_gpus"] == 1
    assert json.loads(values["entrypoint_resources"]) == {"A10G": 1}


def test_a_local_data_set_travels_with_the_job(tmp_path: Path) -> None:
    """A name of the hub stays as it is."""
    data = tmp_path / "chats.jsonl"
    data.touch()
    for target in ("skypilot", "dstack"):
        task = yaml.safe_load(task_file(training_of(dataset=str(data)), target).text)
        mounts = task.get("files") or [f"{b}:{a}" for a, b in task["file_mounts"].items()]
        assert f"{data}:/data/chats.jsonl" in mounts
    hub = yaml.safe_load(task_file(training_of(dataset="trl-lib/Capybara"), "skypilot").text)
    assert hub["envs"]["DATASET"] == "trl-lib/Capybara"


def test_a_local_model_is_named_only_where_its_folder_is() -> None:
    """Another machine needs a name on the hub, or a folder of its own."""
    model = find_model("qwen2.5-0.5b").model_copy(update={"weights": "/models/my own"})
    assert "MODEL='/models/my own'\n" in task_file(training_of(model=model), "slurm").text
    task = yaml.safe_load(task_file(training_of(model=model), "skypilot").text)
    assert task["envs"]["MODEL"] == "YOUR_MODEL"


def test_the_command_that_starts_the_file_is_printed(tmp_path: Path) -> None:
    """A file that cannot be written is one line."""
    file = task_file(training_of(), "slurm")
    path = tmp_path / "job.sbatch"
    assert f"sbatch {path}" in write_task(file, path)
    assert path.read_text(encoding="utf-8") == file.text
    with pytest.raises(ExportError, match="written"):
        write_task(file, tmp_path / "no" / "where")


def test_every_gpu_that_is_named_is_in_the_catalog() -> None:
    """Each of them has a name in dstack, but for two that gpuhunt does not know."""
    keys = {gpu.key for gpu in load_catalog().gpus if gpu.kind == "cuda"}
    assert set(DSTACK_GPUS) == keys - {"RTX-4500-Ada", "RTX-5000-Ada"}


def test_a_name_is_one_that_all_formats_accept() -> None:
    """Letters, digits and dashes."""
    model = find_model("qwen2.5-0.5b").model_copy(update={"name": f"./My_Model.v2/{'x' * 90}"})
    task = yaml.safe_load(task_file(training_of(model=model), "skypilot").text)
    assert re.fullmatch(r"finetune-my-model-v2-x+", task["name"])
