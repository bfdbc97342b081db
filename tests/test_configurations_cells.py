"""Cells of a specification that name a trainer's configuration."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.configurations.cells import spec_text
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.read_file import read_configuration
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.request import request_of
from orchestrator.spec.recipe_options import recipe_of
from orchestrator.spec.spec_file import SpecError, parse_spec
from orchestrator.spec.sweep_spec import SweepSpec
from trials.recipes.recipe import Recipe

AXOLOTL: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 8,
    "lora_target_linear": True,
    "sequence_len": 1024,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
    "max_grad_norm": 0,
}
LLAMA_FACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-7B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "cutoff_len": 512,
    "bf16": True,
}
TRL: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen2.5-7B", "packing": True}
TRAINERS = [AXOLOTL, LLAMA_FACTORY, TRL]
SPEC = """
name: my
gpus: [A40]
cells:
  - config: mine.yml  # my colleague's
WITH
workload: {examples: 5000, epochs: 2}
"""


def spec_of(folder: Path, values: dict[str, Any], keys: str = "") -> SweepSpec:
    """Specification of one configuration, with further keys of its block or of the file."""
    (folder / "mine.yml").write_text(yaml.safe_dump(values), "utf-8")
    (folder / "my.yaml").write_text(SPEC.replace("WITH\n", keys), "utf-8")
    return parse_spec(*spec_text(folder / "my.yaml"))


@pytest.mark.parametrize("values", TRAINERS, ids=["axolotl", "LLaMA-Factory", "TRL"])
@pytest.mark.parametrize("keys", ["", "recipe_defaults: trl\n"])
def test_a_sweep_has_the_recipe_that_an_estimate_has(
    tmp_path: Path, values: dict[str, Any], keys: str
) -> None:
    """Neither the specification's defaults nor its form change the recipe of a configuration."""
    (block,) = spec_of(tmp_path, values, keys).cells
    configuration = read_configuration(tmp_path / "mine.yml")
    options, _ = with_configuration(configuration, {})
    request = request_of(EstimateRequest, options)
    assert block.recipes == (recipe_of(request.recipe),)
    assert block.models == (options["model"],)
    assert block.seq_lens == (configuration.tokens,)


def test_keys_beside_the_configuration_replace_its_own(tmp_path: Path) -> None:
    """One configuration serves several lengths and GPUs."""
    spec = spec_of(tmp_path, AXOLOTL, "    seq_lens: [256, 512]\n    simulated_on: [RTX-4090]\n")
    assert [(cell.gpu, cell.seq_len) for cell in spec.all_cells()] == [
        ("RTX-4090", 256),
        ("RTX-4090", 512),
    ]
    assert all(isinstance(recipe, Recipe) for recipe in spec.cells[0].recipes)


def test_the_text_keeps_its_lines_and_comments(tmp_path: Path) -> None:
    """A run folder keeps a specification that needs no other file, with the user's comments."""
    spec_of(tmp_path, AXOLOTL)
    text, _ = spec_text(tmp_path / "my.yaml")
    before = SPEC.replace("WITH\n", "").splitlines()
    after = text.splitlines()
    assert [i for i, line in enumerate(before) if line != after[i]] == [4]
    assert after[4].endswith("# my colleague's")
    (tmp_path / "mine.yml").unlink()
    assert parse_spec(text, "spec.yaml").cells[0].seq_lens == (1024,)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("mine.yml", "mine.yml: adapter: "),
        ("none.yml", "no such file"),
        ("[mine.yml]", "must be the name of one file"),
        ("{<<: 3}", "must be the name of one file"),
    ],
)
def test_a_mistake_names_its_cell(tmp_path: Path, config: str, reason: str) -> None:
    """A line for each mistake: the file, the line, the cell and the key."""
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(AXOLOTL | {"adapter": "loha"}), "utf-8")
    (tmp_path / "my.yaml").write_text(
        f"name: my\ngpus: [A40]\ncells:\n  - config: {config}\n", "utf-8"
    )
    with pytest.raises(SpecError) as error:
        spec_text(tmp_path / "my.yaml")
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path / 'my.yaml'}:4: cells[0].config: ")
    assert reason in line


def test_each_assumption_has_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the sweep takes from the file, leaves to the specification and assumes is said."""
    caplog.set_level(logging.INFO)
    spec_of(tmp_path, AXOLOTL | {"num_epochs": 3, "lora_mlp_kernel": True})
    used, left, assumed = (record.getMessage() for record in caplog.records)
    assert "lora_r" in used
    assert "num_epochs" not in used
    assert "num_epochs" in left
    assert "lora_mlp_kernel" in assumed
