"""Recipes by the options of a command, and by what a specification leaves out."""

import argparse
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from builders.runs import spec_of
from builders.specifications import altered, mistakes_in

from orchestrator.cli.main import build_parser
from orchestrator.request import OptionError, request_of
from orchestrator.run_folder.run_folder import open_run
from orchestrator.spec.recipe_options import RecipeOptions, recipe_of, recipe_text
from orchestrator.spec.trainer_defaults import trl_defaults
from orchestrator.storage.run_storage import StoreError
from trials.recipes.fields import Method, Optimizer
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.recipes.recipe import Recipe

WRITTEN = "{method: full, precision: fp32}"


def options(**given: Any) -> RecipeOptions:
    """Options as a command line or Python gives them."""
    return request_of(RecipeOptions, given)


@pytest.mark.parametrize("command", ["estimate", "profile", "learn"])
def test_every_field_of_a_recipe_has_an_option_with_its_values(command: str) -> None:
    """Words that an option accepts are those of the field; switches are on and off."""
    parser: argparse.ArgumentParser = build_parser().commands.choices[command]
    actions = {action.dest: action for action in parser._actions}
    assert set(Recipe.model_fields) <= set(actions)
    for name, field in Recipe.model_fields.items():
        choices = {{"on": True, "off": False}.get(c, c) for c in actions[name].choices or ()}
        assert choices in (set(), _words(field.annotation)), name
    assert all(word in str(actions["optimizer"].help) for word in get_args(Optimizer))


def _words(annotation: object) -> set[object]:
    """Values of a literal or a switch, which may be inside another annotation."""
    if annotation is bool:
        return {True, False}
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {word for part in get_args(annotation) for word in _words(part)}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"method": "full"}, "full-bf16-mixed-checkpointed-clip1-chunked"),
        ({"method": "lora"}, "lora-r16-fp32-mixed-load-checkpointed-clip1-chunked"),
        ({"method": "qlora"}, "qlora-r16-bf16-adapters-fp32-mixed-load-checkpointed-clip1-chunked"),
        ({"offload_optimizer": "on"}, "lora-r16-bf16-checkpointed-offloaded-clip1-chunked"),
        ({"method": "qlora", "precision": "fp16"}, "qlora-r16-fp16-checkpointed-clip1-chunked"),
    ],
)
def test_a_recipe_on_the_command_line_has_the_defaults_of_trl(given: Any, key: str) -> None:
    """SFTTrainer checkpoints, clips, loads in fp32 and runs under autocast to bf16."""
    assert recipe_of(options(**given)).key == key


@pytest.mark.parametrize("method", get_args(Method))
def test_on_a_gpu_without_bf16_the_default_is_fp16(method: Method) -> None:
    """A precision that is given stays, so that the GPU is refused."""
    assert recipe_of(options(method=method), has_bf16=False).precision == "fp16"
    stated = options(method=method, precision="bf16")
    assert recipe_of(stated, has_bf16=False).precision == "bf16"


def test_a_given_option_goes_before_any_default() -> None:
    """Each of TRL's defaults can be overridden."""
    recipe = recipe_of(
        options(
            method="qlora",
            precision="bf16-mixed",
            adapter_dtype="fp32",
            gradient_checkpointing="off",
            optimizer="paged_adamw_32bit",
            gradient_accumulation=4,
            max_grad_norm="none",
            loss="full-logits",
            kbit_preparation="on",
            double_quantisation="off",
            lora_rank=8,
            lora_alpha=8,
            lora_dropout=0.1,
            lora_targets="attention",
            modules_to_save="embed_tokens,lm_head",
        )
    )
    assert recipe == Recipe(
        method="qlora",
        precision="bf16-mixed",
        adapter_dtype="fp32",
        optimizer="paged_adamw_32bit",
        gradient_accumulation=4,
        kbit_preparation=True,
        double_quantisation=False,
        lora_rank=8,
        lora_alpha=8,
        lora_dropout=0.1,
        lora_targets=("attention",),
        modules_to_save=("embed_tokens", "lm_head"),
        router_loss="auto",
    )


def test_plain_defaults_are_those_of_the_record() -> None:
    """A recipe of a run from before TRL's defaults can be stated in one option."""
    assert recipe_of(options(defaults="plain")) == Recipe(method="lora", lora_rank=16)


def test_a_named_recipe_has_no_other_defaults() -> None:
    """It stays as it is, but for what is given; defaults for it are refused."""
    assert recipe_of(options(recipe="paper-mixtral")) == NAMED_RECIPES["paper-mixtral"]
    changed = recipe_of(options(recipe="paper-mixtral", attention="sdpa"))
    assert changed == NAMED_RECIPES["paper-mixtral"].model_copy(update={"attention": "sdpa"})
    with pytest.raises(OptionError, match="--defaults"):
        recipe_of(options(recipe="paper-mixtral", defaults="trl"))


def test_mistakes_of_fields_are_reported_at_once() -> None:
    """Each has its option and its remedy."""
    with pytest.raises(OptionError) as error:
        recipe_of(options(max_grad_norm=0, optimizer="adam", lora_rank=0))
    lines = str(error.value).split("\n")
    assert [line.partition(":")[0] for line in lines] == [
        "--lora-rank",
        "--optimizer",
        "--max-grad-norm",
    ]
    assert "none" in lines[2]


def test_contradictions_of_a_recipe_are_reported_at_once() -> None:
    """Each has a line of its own."""
    with pytest.raises(OptionError) as error:
        recipe_of(options(task="reward", loss="liger", lora_dropout=0.1, packing="on"))
    lines = str(error.value).split("\n")
    assert sorted(line.partition(" ")[0] for line in lines) == ["lora_dropout", "loss", "packing"]
    with pytest.raises(OptionError) as error:
        recipe_of(options(method="full", optimizer="adam", lora_rank=4, kbit_preparation="on"))
    lines = str(error.value).split("\n")
    assert [line.split()[0] for line in lines] == ["--optimizer:", "lora_rank", "kbit_preparation"]


def test_the_text_of_a_recipe_names_its_source_and_what_was_given() -> None:
    """The method is part of the source."""
    stated = options(method="qlora", lora_rank=8, double_quantisation="off")
    text = recipe_text(stated, recipe_of(stated))
    assert "TRL 1.16's defaults for qlora, but lora_rank 8, double_quantisation off: " in text
    assert text.endswith(recipe_of(stated).key)


def test_a_specification_may_ask_for_the_defaults_of_trl() -> None:
    """Fields that are written win, also a norm of none; a named recipe stays as it is."""
    text = altered(WRITTEN, "{method: lora, lora_rank: 8}, paper-blackmamba, " + UNCLIPPED)
    spec = spec_of(f"{text}recipe_defaults: trl\n")
    stated = spec.cells[0].recipes
    assert stated == (
        Recipe.model_validate({"method": "lora", "lora_rank": 8} | trl_defaults("lora")),
        NAMED_RECIPES["paper-blackmamba"],
        Recipe(
            method="full",
            precision="fp32",
            gradient_checkpointing=True,
            loss="chunked",
            router_loss="auto",
        ),
    )
    assert not spec.has_plain_recipes


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_method_alone_is_the_same_recipe_as_on_the_command_line(method: Method) -> None:
    """The rank of LoRA is TRL's 16; without TRL's defaults it has to be stated."""
    text = altered(WRITTEN, f"{{method: {method}}}")
    spec = spec_of(f"{text}recipe_defaults: trl\n")
    assert spec.cells[0].recipes == (recipe_of(options(), method=method),)
    (mistake,) = mistakes_in(text)
    assert f"method {method} needs lora_rank" in mistake


UNCLIPPED = "{method: full, precision: fp32, max_grad_norm: null}"


def test_a_specification_without_them_means_what_it_meant() -> None:
    """Absent and plain defaults are the record's; only the absent ones are worth a remark."""
    text = altered(WRITTEN, "{method: lora, lora_rank: 8}")
    absent, plain = spec_of(text), spec_of(f"{text}recipe_defaults: plain\n")
    assert absent.all_cells() == plain.all_cells()
    assert absent.cells[0].recipes == (Recipe(method="lora", lora_rank=8),)
    assert (absent.has_plain_recipes, plain.has_plain_recipes) == (True, False)


def test_an_earlier_run_is_resumed_where_the_defaults_come_to_the_same(tmp_path: Path) -> None:
    """Plain defaults are those of a run from before them; TRL's make other cells."""
    text = altered(WRITTEN, "{method: lora, lora_rank: 8}")
    run = open_run(tmp_path / "run", text, spec_of(text))
    plain, trl = (f"{text}recipe_defaults: {name}\n" for name in ("plain", "trl"))
    again = open_run(tmp_path / "run", plain, spec_of(plain))
    assert again.spec().all_cells() == run.spec().all_cells()
    with pytest.raises(StoreError, match=r"\(cells differ\)"):
        open_run(tmp_path / "run", trl, spec_of(trl))


def test_recipes_are_compared_after_the_defaults() -> None:
    """A default that is written out is a repetition under TRL, and a recipe of its own without."""
    twice = "{method: full}, {method: full, precision: bf16-mixed}"
    text = altered(WRITTEN, twice)
    assert len(spec_of(text).cells[0].recipes) == 2
    (mistake,) = mistakes_in(f"{text}recipe_defaults: trl\n")
    assert "recipes[1]" in mistake


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("{method: full, max_grad_norm: 0}", "max_grad_norm: must be above 0, not 0"),
        ("{method: full, kbit_preparation: true}", "kbit_preparation"),
        ("{method: full, adapter_dtype: bf16}", "adapter_dtype bf16"),
        ("{method: nothing}", "method: must be"),
        ("{method: full, precision: [bf16]}", "precision: must be"),
        ("{method: lora, lora_rank: 8, precision: [bf16]}", "precision: must be"),
    ],
)
@pytest.mark.parametrize("defaults", ["", "recipe_defaults: trl\n"])
def test_a_mistake_in_a_recipe_is_the_same_with_any_defaults(
    recipe: str, words: str, defaults: str
) -> None:
    """One line at the recipe, whatever fills in the rest."""
    (mistake,) = mistakes_in(altered(WRITTEN, recipe) + defaults)
    assert words in mistake


def test_unknown_defaults_are_a_mistake() -> None:
    """The line names the choices."""
    (mistake,) = mistakes_in(altered(WRITTEN, WRITTEN) + "recipe_defaults: axolotl\n")
    assert "recipe_defaults: must be 'trl' or 'plain'" in mistake
