"""The documentation stays short where it must be, and shows only commands that exist."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from readme_commands import ROOT, mistake, shown_commands

from orchestrator.cli.options.groups import RECIPE
from orchestrator.estimating.choosing.recipe_choice import recipes_to_try
from orchestrator.spec.recipe_options import RecipeOptions
from trials.recipes.fields import Optimizer
from trials.records.model import presets


def test_the_readme_fits_on_150_lines() -> None:
    """A newcomer reads the README whole."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    "command",
    [
        "finetune-cost catalog gpus",
        "python -m orchestrator status runs/my",
        "ray job submit -- python -m orchestrator sweep my.yaml",
        'eval "$(finetune-cost completion bash)"',
        "make check",
        "export AWS_ENDPOINT_URL=https://s3.example.com",
    ],
)
def test_commands_that_exist_are_accepted(command: str) -> None:
    """No false alarm for the kinds of commands that the documentation shows."""
    assert mistake(command) is None


@pytest.mark.parametrize(
    "command",
    [
        "finetune-cost catalogue gpus",
        "finetune-cost status runs/my --no-such-option",
        'eval "$(finetune-cost completion no-such-shell)"',
        "ray job submit -- python -m orchestrator no-such-command",
        "make no-such-target",
        "no-such-program",
    ],
)
def test_commands_that_do_not_exist_are_reported(command: str) -> None:
    """A renamed command or option cannot stay in the documentation."""
    assert mistake(command) is not None


def test_commands_are_those_of_shell_blocks() -> None:
    """Comments and blocks of other languages are no commands; a backslash joins lines."""
    text = "```sh\nmake check   # all\nray \\\n up\n```\n```yaml\nname: my\n```\n"
    assert [" ".join(c.split()) for c in shown_commands(text)] == ["make check", "ray up"]


def test_the_documented_specification_is_accepted(tmp_path: Path) -> None:
    """The example of a sweep can be copied and run."""
    page = (ROOT / "docs" / "how-to" / "own-sweep.md").read_text(encoding="utf-8")
    spec = tmp_path / "my.yaml"
    spec.write_text(page.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    command = [sys.executable, "-m", "orchestrator", "sweep", str(spec), "--dry-run"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_every_page_of_the_navigation_exists() -> None:
    """The site's navigation leads to files."""
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2].splitlines()
    pages = [line.rpartition(": ")[2] for line in lines if line.endswith(".md")]
    places = [Path("docs") / page for page in pages if not page.startswith("project/")]
    places += [Path(page.removeprefix("project/")) for page in pages if page.startswith("project/")]
    assert pages
    # docs/hooks.py makes a page of each notebook.
    missing = [
        p for p in places if not (ROOT / p).is_file() | (ROOT / p.with_suffix(".ipynb")).is_file()
    ]
    assert missing == []


def test_every_field_of_a_specification_is_documented() -> None:
    """The tables of the reference have a meaning beside each field, inherited ones too."""
    program = "import hooks; print(hooks.specification_markdown())"
    command = [sys.executable, "-c", program]
    printed = subprocess.run(
        command, cwd=ROOT / "docs", capture_output=True, text=True, check=True
    ).stdout
    assert [line for line in printed.splitlines() if line.endswith("|  |")] == []
    assert "| `lora_rank` |" in printed


def test_every_preset_is_listed() -> None:
    """A model that is not in the list is not looked for."""
    page = (ROOT / "docs" / "how-to" / "own-model.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^Presets: .*", page, re.MULTILINE)
    assert set(re.findall(r"`([a-z0-9.-]+)`", listed)) >= {*presets()}


def test_every_optimizer_is_listed() -> None:
    """The help and the page of the recipes name each."""
    page = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    _, _, of_option = RECIPE.partition("--optimizer NAME")
    for name in get_args(Optimizer):
        assert f"`{name}`" in page
        assert re.search(rf"\b{name}\b", of_option.partition("\n--")[0])


def tried(axis: str, **options: Any) -> set[str]:
    """Values of an axis that a choice of the recipe tries, but for the model's own."""
    varied: Any = dict  # keeps the changes, in place of the question with them
    groups: Any = recipes_to_try(RecipeOptions(**options), varied)
    values = {changes.get(axis) for group in groups for changes in group}
    return {str(value) for value in values - {None}}


def test_the_table_of_the_choice_has_what_is_tried() -> None:
    """Its second column names each value; the model's own attention is ``sdpa``."""
    page = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    _, section = page.split("## A recipe by choice")
    cells = dict(re.findall(r"^\| ([a-z ]+) \| ([^|]*) \|", section, re.MULTILINE))
    named = {field: set(re.findall(r"`([a-z_0-9]+)`", cell)) for field, cell in cells.items()}
    assert named["method"] == tried("method")
    assert named["attention"] == {"sdpa"} | tried("attention", packing=True)
    assert named["attention"] > tried("attention")
    assert named["loss"] - {"sft"} == tried("loss", defaults="plain", method="lora")
    assert tried("gradient_checkpointing") == {"True", "False"}
    assert cells["gradient checkpointing"] == "on and off"
