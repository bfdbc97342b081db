"""Configurations in task files: two values changed, and the rest as the user wrote it."""

import re
import subprocess
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.task_scripts import scripts
from builders.trainings import OF_HUGGING_FACE, SPOT, training_of
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.configurations.configuration import Configuration
from orchestrator.configurations.estimate_options import as_recipe
from orchestrator.configurations.read_file import read_configuration, read_configuration_text
from orchestrator.exporting.patched_configuration import patched
from orchestrator.exporting.requirements import AXOLOTL_TORCH
from orchestrator.exporting.task_file import TARGETS, Target, task_file
from orchestrator.exporting.training import ExportError, TrainingJob
from trials.records.model import find_model

AXOLOTL = """\
# of a colleague
base_model: qwen2.5-0.5b   # small
adapter: lora
lora_r: 8
lora_target_linear: true
bf16: true
sequence_len: 256
"""
LLAMA_FACTORY = """\
### model
model_name_or_path: qwen2.5-0.5b
stage: sft
do_train: true
finetuning_type: lora
bf16: true
cutoff_len: 256
"""
TRL = """\
model_name_or_path: qwen2.5-0.5b
use_peft: true  # r: 16
max_length: 256
"""
TRAINERS = {"axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY, "TRL": TRL}
MICRO = {"axolotl": "micro_batch_size"}
EPOCHS = {"axolotl": "num_epochs"}
BATCHES = "micro_batch_size: 2\ngradient_accumulation_steps: 4\nnum_epochs: 3\n"
OFFERS = (SPOT, OF_HUGGING_FACE)


def micro_key(trainer: str) -> str:
    """Key of the micro-batch."""
    return MICRO.get(trainer, "per_device_train_batch_size")


def written(folder: Path, text: str) -> Configuration:
    """Write a configuration and read it."""
    (folder / "mine.yml").write_text(text, "utf-8")
    return read_configuration(folder / "mine.yml")


def training(configuration: Configuration, micro_batch: int, **changed: Any) -> TrainingJob:
    """Training of a configuration in other micro-batches."""
    values = {
        "recipe": as_recipe(configuration),
        "epochs": configuration.options["epochs"],
        "micro_batch": micro_batch,
    }
    return replace(training_of(), **(values | changed))


BatchLines = tuple[list[str], int]


@st.composite
def batch_lines(draw: st.DrawFn, trainer: str) -> BatchLines:
    """Lines of batches and epochs as people write them, and another micro-batch that divides."""
    micro, accumulation = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 6))
    forms = ("{}: {}", "{}:   {}", "{}: {}  # tuned", '{}: "{}"', "{}: !!int {}", "'{}': {}")
    stated = {micro_key(trainer): micro, "gradient_accumulation_steps": accumulation}
    lines = [
        draw(st.sampled_from(forms)).format(name, value)
        for name, value in stated.items()
        if draw(st.booleans())
    ]
    epochs = EPOCHS.get(trainer, "num_train_epochs")
    length = draw(st.sampled_from([f"{epochs}: 2", f"{epochs}: 1.0", "max_steps: 30", "# end"]))
    whole = read_configuration_text("\n".join([TRAINERS[trainer], *lines]), Path("mine.yml"))
    effective_batch = whole.options["effective_batch"]
    divisors = [size for size in range(1, effective_batch + 1) if effective_batch % size == 0]
    return draw(st.permutations([*lines, length, ""])), draw(st.sampled_from(divisors))


@pytest.mark.parametrize("trainer", list(TRAINERS))
@settings(max_examples=30)
@given(data=st.data())
def test_effective_batch_and_epochs_never_change(
    trainer: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nor any other key, any comment or the order of lines, whatever the micro-batch."""
    lines, micro_batch = data.draw(batch_lines(trainer))
    text = TRAINERS[trainer] + "\n".join(lines)
    before = written(tmp_path_factory.mktemp("config"), text)
    after_text = patched(before, training(before, micro_batch), 256).text
    after = read_configuration_text(after_text, Path("mine.yml"))
    assert after.options == {**before.options, "batch_size": micro_batch}
    keys = re.compile(rf"['\"]?({micro_key(trainer)}|gradient_accumulation_steps)['\"]?:")
    rest = [
        [line for line in part.splitlines() if line and not keys.match(line)]
        for part in (text, after_text)
    ]
    assert rest[0] == rest[1]
    comments = [re.findall(r"#.*", part) for part in (text, after_text)]
    assert comments[0] == comments[1]


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (
            "micro_batch_size: 2\ngradient_accumulation_steps: 4",
            ["+micro_batch_size: 4", "+gradient_accumulation_steps: 2"],
        ),
        ("micro_batch_size: 2\nbatch_size: 8", ["+micro_batch_size: 4"]),
        ("gradient_accumulation_steps: 4\nbatch_size: 8", ["+gradient_accumulation_steps: 2"]),
        (
            "gradient_accumulation_steps: 8\nmicro_batch_size:  # one",
            ["+gradient_accumulation_steps: 2", "+micro_batch_size: 4  # one"],
        ),
    ],
)
def test_the_diff_has_the_changed_lines(tmp_path: Path, text: str, changed: list[str]) -> None:
    """A key of axolotl that others decide stays absent; an empty value is filled in."""
    configuration = written(tmp_path, f"{AXOLOTL}num_epochs: 3\n{text}\n")
    diff = patched(configuration, training(configuration, 4), 256).diff
    assert [line for line in diff.splitlines()[2:] if line.startswith("+")] == changed


def test_the_same_batches_leave_the_file_as_it_is(tmp_path: Path) -> None:
    """There is no difference to show."""
    configuration = written(tmp_path, AXOLOTL + BATCHES)
    assert patched(configuration, training(configuration, 2), 256).diff == ""


def test_a_flow_mapping_is_patched_in_place(tmp_path: Path) -> None:
    """YAML that is written as JSON stays one mapping."""
    text = yaml.safe_dump(yaml.safe_load(AXOLOTL + "gradient_accumulation_steps: 8"))
    text = str(yaml.safe_load(text)).replace("True", "true")
    configuration = written(tmp_path, text)
    after = patched(configuration, training(configuration, 4), 256).text
    assert yaml.safe_load(after) == yaml.safe_load(text) | {
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }


def test_a_value_that_other_keys_share_is_one_line(tmp_path: Path) -> None:
    """An alias would change them as well."""
    text = "lora_alpha: &two 2\nmicro_batch_size: *two\ngradient_accumulation_steps: 4\n"
    configuration = written(tmp_path, AXOLOTL + text)
    with pytest.raises(ExportError, match="micro_batch_size, gradient_accumulation_steps cannot"):
        patched(configuration, training(configuration, 4), 256)


def test_a_line_that_would_end_the_file_in_a_script_is_refused(tmp_path: Path) -> None:
    """Bash would run what follows."""
    text = str(yaml.safe_load(AXOLOTL)).replace("True", "true")
    configuration = written(tmp_path, text[:-1] + ", wandb_name: 'a\nCONFIGURATION\nls'}")
    with pytest.raises(ExportError, match="CONFIGURATION"):
        patched(configuration, training(configuration, 1), 256)


@pytest.mark.parametrize(
    ("changed", "seq_len", "word"),
    [
        ({"epochs": 5}, 256, "epochs"),
        ({}, 512, "tokens"),
        ({"recipe": {"lora_rank": 16}}, 256, "lora_rank"),
        ({"recipe": {"method": "full"}}, 256, "method"),
        ({"micro_batch": 3}, 256, "effective batch"),
        ({"model": find_model("qwen3-0.6b")}, 256, "trains qwen2.5-0.5b, and the price is for"),
    ],
)
def test_a_price_for_another_training_is_refused(
    tmp_path: Path, changed: dict[str, Any], seq_len: int, word: str
) -> None:
    """The file would train what the price is not for; each difference has a line."""
    configuration = written(tmp_path, AXOLOTL + BATCHES)
    if "recipe" in changed:
        recipe = as_recipe(configuration).model_copy(update=changed["recipe"])
        changed = {"recipe": recipe}
    with pytest.raises(ExportError) as error:
        patched(configuration, training(configuration, **{"micro_batch": 2} | changed), seq_len)
    (line,) = str(error.value).splitlines()
    assert word in line


def test_a_key_that_the_tasks_own_trainer_refuses_is_refused(tmp_path: Path) -> None:
    """The task would end on the rented machine."""
    configuration = written(tmp_path, f"{TRL}warmup_ratio: 0.1\n")
    with pytest.raises(ExportError, match=r"warmup_ratio: .*renamed to warmup_steps"):
        patched(configuration, training(configuration, 1), 256)


@pytest.mark.parametrize("trainer", list(TRAINERS))
@pytest.mark.parametrize("target", TARGETS)
def test_each_task_starts_the_trainer_itself(tmp_path: Path, trainer: str, target: Target) -> None:
    """Bash accepts the script, which has the file; its data travels where the format allows."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "it's.jsonl").touch()
    key = "dataset: x" if trainer == "LLaMA-Factory" else "datasets: [{path: data/it's.jsonl}]"
    configuration = written(tmp_path, f"{TRAINERS[trainer]}{key}\n")
    same = training(configuration, configuration.options["batch_size"])
    own = patched(configuration, same, 256)
    text = task_file(replace(training_of(placements=OFFERS), configuration=own), target).text
    parts = scripts(target, text)
    for script in parts:
        checked = subprocess.run(
            ["bash", "-n"], input=script, text=True, capture_output=True, check=False
        )
        assert checked.stderr == ""
    commands = {"axolotl": "axolotl train", "LLaMA-Factory": "llamafactory-cli train", "TRL": "trl"}
    assert f"\n{commands[trainer]} " in parts[-1]
    assert all(line in parts[-1].splitlines() for line in own.text.splitlines())
    assert "YOUR_MODEL" not in text
    if target in ("skypilot", "dstack"):
        assert str(tmp_path / "data") in text.partition("run:")[0].partition("commands:")[0]
    else:
        assert "where the job runs" in " ".join(text.replace("\n#", "").split())


@pytest.mark.parametrize("target", TARGETS)
def test_a_model_folder_of_this_machine_travels_or_is_listed(
    tmp_path: Path, target: Target
) -> None:
    """Under the name that the configuration has for it, without data as well."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}", "utf-8")
    configuration = written(tmp_path, AXOLOTL.replace("qwen2.5-0.5b", "./weights"))
    model = training_of().model.model_copy(update={"name": f"{tmp_path}/weights/"})
    same = training(configuration, configuration.options["batch_size"], model=model)
    own = patched(configuration, same, 256)
    assert own.files == {"./weights": tmp_path / "weights"}
    text = task_file(replace(training_of(placements=OFFERS), configuration=own), target).text
    if target in ("skypilot", "dstack"):
        assert str(tmp_path / "weights") in text
        assert "ln -sfn -- /data/0/weights ./weights" in text
    else:
        assert "under these names: ./weights" in text


STARTS = {
    "axolotl": ("axolotl train", "--launcher torchrun -- --nproc_per_node=4"),
    "LLaMA-Factory": ("FORCE_TORCHRUN=1 NPROC_PER_NODE=4 llamafactory-cli train", ""),
    "TRL": ("trl sft", "--multi_gpu --num_machines 1 --num_processes 4 --mixed_precision no"),
}


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_several_gpus_take_the_launcher_of_the_trainer(tmp_path: Path, trainer: str) -> None:
    """Each GPU has the batches of the file, which are patched as for one."""
    lines = f"{micro_key(trainer)}: 2\ngradient_accumulation_steps: 4\n"
    configuration = written(tmp_path, TRAINERS[trainer] + lines)
    recipe = as_recipe(configuration).model_copy(
        update={"effective_batch": 32, "gradient_accumulation": 1}
    )
    several = training(configuration, 4, recipe=recipe, gpus=4, strategy="ddp")
    own = patched(configuration, several, 256)
    assert read_configuration_text(own.text, tmp_path / "x.yml").options["effective_batch"] == 8
    text = task_file(replace(several, configuration=own), "slurm").text
    before, after = STARTS[trainer]
    start = next(line for line in text.splitlines() if line.startswith(before))
    assert after in text.partition(start)[2]
    sharded = replace(several, strategy="fsdp2")
    with pytest.raises(ExportError, match="shares several GPUs by ddp"):
        patched(configuration, sharded, 256)


@pytest.mark.parametrize("trainer", list(TRAINERS))
@pytest.mark.parametrize(("micro_batch", "is_set"), [(2, True), (4, False)])
def test_shards_reduce_gradients_after_every_micro_batch(
    tmp_path: Path, trainer: str, micro_batch: int, *, is_set: bool
) -> None:
    """As the price has it, where several micro-batches are accumulated; other settings stay."""
    key = "fsdp_config: {fsdp_version: 2}" if trainer == "axolotl" else "fsdp: true"
    lines = f"{micro_key(trainer)}: 2\ngradient_accumulation_steps: 2\n{key}\n"
    other = "accelerator_config: {split_batches: true}\n"
    configuration = written(tmp_path, TRAINERS[trainer] + lines + other)
    recipe = as_recipe(configuration).model_copy(
        update={"effective_batch": 16, "gradient_accumulation": 1}
    )
    sharded = training(configuration, micro_batch, recipe=recipe, gpus=4, strategy="fsdp2")
    after = yaml.safe_load(patched(configuration, sharded, 256).text)["accelerator_config"]
    own = {"gradient_accumulation_kwargs": {"sync_each_batch": True}} if is_set else {}
    assert after == {"split_batches": True, **own}


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_shards_on_the_host_start_with_gloo(tmp_path: Path, trainer: str) -> None:
    """It sums the norm of the gradients there; of shards on the GPUs, the price is another."""
    on_host = {
        "axolotl": "fsdp_config: {fsdp_version: 2, offload_params: true}",
        "LLaMA-Factory": "fsdp: full_shard offload",
        "TRL": "fsdp: true\nfsdp_config: {cpu_offload: true}",
    }
    configuration = written(
        tmp_path, f"{TRAINERS[trainer]}{micro_key(trainer)}: 2\n{on_host[trainer]}\n"
    )
    recipe = as_recipe(configuration).model_copy(
        update={"effective_batch": 8, "gradient_accumulation": 1}
    )
    of_gpus = training(configuration, 2, recipe=recipe, gpus=4, strategy="fsdp2")
    with pytest.raises(ExportError, match="has its shards on the host, which the price is not"):
        patched(configuration, of_gpus, 256)
    several = replace(of_gpus, shards_on_host=True)
    own = replace(several, configuration=patched(configuration, several, 256))
    starts = "FSDP_OFFLOAD_PARAMS=true " in task_file(own, "slurm").text
    assert starts is (trainer != "axolotl")


@pytest.mark.parametrize("key", ["abc", ""])
def test_a_log_to_wandb_without_a_key_is_offline(tmp_path: Path, key: str) -> None:
    """With the key of the environment it goes where the configuration says."""
    configuration = written(tmp_path, f"{AXOLOTL}wandb_project: mine\n")
    same = training(configuration, configuration.options["batch_size"])
    own = patched(configuration, same, 256)
    text = task_file(replace(training_of(), configuration=own), "slurm").text
    (line,) = (line for line in text.splitlines() if "WANDB_MODE" in line)
    script = f'unset WANDB_MODE; {line}; echo "${{WANDB_MODE:-as stated}}"'
    shown = subprocess.run(
        ["bash", "-euc", script],
        env={"WANDB_API_KEY": key},
        text=True,
        capture_output=True,
        check=True,
    )
    assert shown.stdout.strip() == ("as stated" if key else "offline")


@pytest.mark.parametrize("target", ["slurm", "hf-jobs"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_pytorch_is_the_same_on_another_day(trainer: str, target: Target, tmp_path: Path) -> None:
    """It is that of the simulated step or that of the image; axolotl replaces the image's."""
    configuration = written(tmp_path, TRAINERS[trainer])
    priced = training(configuration, configuration.options["batch_size"], placements=OFFERS)
    priced = replace(priced, configuration=patched(configuration, priced, 256))
    installed = re.findall(r"pip install (.*)", task_file(priced, target).text)
    pins = re.findall(r"\btorch==\S+", " ".join(installed))
    if target == "hf-jobs" and trainer != "axolotl":
        assert pins == []
    else:
        simulated = metadata.version("torch").partition("+")[0]
        assert pins == [f"torch=={AXOLOTL_TORCH if trainer == 'axolotl' else simulated}"]
    assert ("torchvision" in installed[0]) == (target == "hf-jobs" and trainer == "axolotl")
