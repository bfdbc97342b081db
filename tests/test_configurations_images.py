"""Trainers' files of vision-language models, with a stated number of image tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.vision import GEMMA

from orchestrator.cli.main import main
from orchestrator.configurations.configuration import Configuration
from orchestrator.configurations.read_file import read_configuration

AXOLOTL: dict[str, Any] = {
    "base_model": "google/gemma-3-4b-it",
    "processor_type": "AutoProcessor",
    "model_type": "AutoModelForImageTextToText",
    "adapter": "lora",
    "lora_r": 4,
    "lora_target_modules": (
        "model.language_model.layers.[\\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
    ),
    "sequence_len": 32,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "bf16": True,
}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct",
    "image_max_pixels": 262144,
    "video_max_pixels": 16384,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "template": "qwen3_vl_nothink",
    "cutoff_len": 32,
    "per_device_train_batch_size": 1,
    "bf16": True,
}
OF_ADAPTERS = {"adapter", "lora_r", "lora_target_modules"}
FULL = {name: value for name, value in AXOLOTL.items() if name not in OF_ADAPTERS}


def read(folder: Path, values: dict[str, Any]) -> Configuration:
    """The configuration, as it is read from a file."""
    (folder / "vision.yml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return read_configuration(folder / "vision.yml")


@pytest.mark.parametrize("values", [AXOLOTL, FACTORY], ids=["axolotl", "LLaMA-Factory"])
def test_images_need_the_number_of_their_tokens(tmp_path: Path, values: dict[str, Any]) -> None:
    """Without it every refusal says so; with it the file is read, under the name of its model."""
    configuration = read(tmp_path, values)
    assert configuration.refusals
    assert all("--image-tokens N" in line for line in configuration.refusals)
    assert configuration.with_images().refusals == ()


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        (FACTORY | {"freeze_vision_tower": False}, ["freeze_vision_tower"]),
        (FACTORY | {"freeze_vision_tower": True, "freeze_language_model": False}, []),
        (FACTORY | {"freeze_language_model": True}, ["freeze_language_model"]),
        (FACTORY | {"use_audio_in_video": True}, ["use_audio_in_video"]),
        (FULL, ["freeze_mm_modules"]),
        (FULL | {"freeze_mm_modules": False}, ["freeze_mm_modules"]),
        (FULL | {"freeze_mm_modules": True}, []),
        (AXOLOTL | {"freeze_mm_modules": False}, []),
    ],
)
def test_a_tower_that_is_trained_and_other_senses_stay_refused(
    tmp_path: Path, values: dict[str, Any], refused: list[str]
) -> None:
    """By the key of the file; LLaMA-Factory freezes the tower by default, axolotl trains it."""
    lines = read(tmp_path, values).with_images().refusals
    assert [line.split(": ")[1] for line in lines] == refused


def test_a_check_reads_the_file_of_a_vision_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by options."""
    read(tmp_path, AXOLOTL)
    model = tmp_path / "gemma.json"
    model.write_text(json.dumps(GEMMA), encoding="utf-8")
    shared = ["--model-config", str(model), "--image-tokens", "8", "--gpu", "A40", "--json"]
    assert main(["check", "--config", str(tmp_path / "vision.yml"), *shared]) == 0
    by_file = json.loads(capsys.readouterr().out)
    assert (by_file["seq_len"], by_file["batch_size"], by_file["fits"]) == (32, 2, True)
    assert main(["check", "--config", str(tmp_path / "vision.yml"), *shared[:2], *shared[4:]]) == 2
    assert "--image-tokens N" in json.loads(capsys.readouterr().out)["reason"]
