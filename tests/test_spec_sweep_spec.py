"""What a sweep comes to: recipes that start from a named one, models that trials can find."""

import json
from pathlib import Path

import pytest
from builders.runs import ONE_CELL, ROUTED, spec_of

from trials.recipes.named_recipes import NAMED_RECIPES


def recipe_key(written: str) -> str:
    """The key of a recipe as a specification comes to it."""
    (cell,) = spec_of(ROUTED.replace("{method: full, precision: fp32}", written)).all_cells()
    return cell.recipe.key


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ("", "qlora-r16-experts+router-bf16-checkpointed-flash_attention_2-looped"),
        (", lora_rank: 64", "qlora-r64-experts+router-bf16-checkpointed-flash_attention_2-looped"),
        (
            ", lora_rank: 64, lora_alpha: 32",
            "qlora-r64-alpha32-experts+router-bf16-checkpointed-flash_attention_2-looped",
        ),
        (", method: lora", "lora-r16-experts+router-bf16-checkpointed-flash_attention_2-looped"),
    ],
)
def test_what_a_named_recipe_fills_in_follows_the_changes(changes: str, key: str) -> None:
    """Alpha is twice the changed rank; nobody is told to drop a field that they did not write."""
    assert recipe_key(f"{{named: paper-mixtral{changes}}}") == key


def test_named_recipe_says_what_it_is() -> None:
    """Spelling one out by its name loses none of its fields."""
    for name, recipe in NAMED_RECIPES.items():
        assert recipe_key(f"{{named: {name}}}") == recipe_key(name)
        assert recipe_key(name).startswith(recipe.method)


@pytest.mark.parametrize("written", ["./mine", "~/mine"])
def test_weights_of_a_folder_are_found_from_any_working_directory(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial does not run where the sweep was started; the model's name stays as written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    config = {"model_type": "llama", "vocab_size": 8, "num_attention_heads": 2}
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = spec_of(ONE_CELL.replace("llama-tiny", written))
    (cell,) = spec.all_cells()
    assert cell.model == written
    assert spec.model(written).weights == str(tmp_path / "mine")
