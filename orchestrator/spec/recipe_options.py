"""Options that state a recipe, and the recipe they come to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler

from gpu_catalog.record import Record
from gpu_catalog.suggestions import near_or_all
from orchestrator.request import OptionError, names_in, validation_lines
from orchestrator.spec.trainer_defaults import (
    TRL_VERSION,
    RecipeDefaults,
    with_lora_rank,
    with_trl_defaults,
)
from trials.recipes.fields import Loss, Method, Precision
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.recipes.recipe import Recipe, hidden_contradictions

AUTO = "auto"
WORDS: Mapping[object, object] = {"on": True, "off": False, "none": None}

# An option for each field of a recipe; Recipe validates the values.
_RecipeFields: Any = make_dataclass(
    "_RecipeFields",
    [(name, Any, field(default=None)) for name in Recipe.model_fields],
    frozen=True,
    slots=True,
    kw_only=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions(_RecipeFields):  # type: ignore[misc]
    """Options of a recipe: its fields, and where absent ones come from.

    Attributes:
        recipe: name of a recipe, whose fields the others change; ``AUTO`` where an estimate is to
            choose the fields that are not given.
        defaults: source of absent fields; by default TRL. Not for a named recipe.
        recipe_source: configuration of a trainer that states the fields, in words.
        trainer: name of that trainer; TRL without one.
    """

    recipe: str | None = None
    defaults: RecipeDefaults | None = None
    recipe_source: str | None = None
    trainer: str = "TRL"

    @property
    def is_automatic(self) -> bool:
        """Whether an estimate chooses: on request, or where at most a method is given."""
        nothing = self.recipe is None and self.defaults is None
        return self.recipe == AUTO or (nothing and not self.given().keys() - {"method"})

    def given(self) -> dict[str, Any]:
        """Fields of the recipe that were given, as ``Recipe`` takes them."""
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {n: v for n, v in options.items() if n in Recipe.model_fields and v is not None}
        for name in {"lora_targets", "modules_to_save"} & set(values):
            values[name] = names_in(values[name])
        return {n: WORDS.get(v, v) if isinstance(v, str) else v for n, v in values.items()}


# Fields that a recipe derives from others; they are derived anew when a named one is changed.
FILLED_IN = frozenset(
    {"lora_alpha", "lora_dropout", "quantisation", "double_quantisation", "adapter_dtype"}
)


def _stated(recipe: Recipe) -> dict[str, object]:
    """Fields of a recipe without those that follow from the others."""
    fields = recipe.model_dump(exclude_none=True)
    short = {name: value for name, value in fields.items() if name not in FILLED_IN}
    return short if Recipe.model_validate(short) == recipe else fields


def written_out(raw: object) -> object:
    """Fields of a recipe that is a name, or that changes a named one."""
    changes = {} if isinstance(raw, str) else raw
    name = raw if isinstance(raw, str) else raw.get("named") if isinstance(raw, dict) else None
    if name is None or not isinstance(changes, dict):
        return raw
    if not isinstance(name, str):
        raise ValueError(f"named is {name!r}: give the name of one recipe")  # noqa: TRY004 - for pydantic
    if name not in NAMED_RECIPES:
        near = near_or_all(str(name), NAMED_RECIPES)
        raise ValueError(f"unknown recipe {name!r}{near}; or write out the recipe's fields")
    fields = {key: value for key, value in changes.items() if key != "named"}
    return _stated(NAMED_RECIPES[name]) | fields


class AutoRecipe(Record):
    """Recipe of a specification that is chosen for each cell.

    Attributes:
        stated: fields that the choice leaves as they are.
    """

    stated: dict[str, Any]


class OpenCell(Record):
    """Cell whose recipe is chosen.

    Attributes:
        stated: fields of the recipe that the choice leaves as they are.
    """

    gpu: str
    model: str
    stated: dict[str, Any]
    active_experts: int | None
    seq_len: int


class ChosenRecipe(Record):
    """Recipe that was chosen for a cell.

    Attributes:
        reason: why, with the price or the hours.
        runners_up: other recipes that fit, the cheapest first, each with its price or hours.
    """

    cell: OpenCell
    recipe: Recipe
    reason: str
    runners_up: tuple[str, ...]


def recipe_or_auto(raw: object, validated: ValidatorFunctionWrapHandler) -> Recipe | AutoRecipe:
    """Recipe of a specification: written out, a name, a name with changes, or one to choose."""
    if not is_auto(raw):
        recipe: Recipe = validated(written_out(raw))
        return recipe
    stated = {n: v for n, v in raw.items() if n != "named"} if isinstance(raw, dict) else {}
    validated(with_trl_defaults({"method": "lora"} | stated))  # for its mistakes
    return AutoRecipe(stated=stated)


def is_auto(raw: object) -> bool:
    """Whether a recipe of a specification is to be chosen."""
    return raw == AUTO or (isinstance(raw, dict) and raw.get("named") == AUTO)


def recipe_of(
    options: RecipeOptions,
    *,
    method: Method = "lora",
    precision: Precision | None = None,
    loss: Loss | None = None,
    has_bf16: bool = True,
) -> Recipe:
    """Resolve options into a recipe.

    Args:
        options: the options.
        method: default where neither a method nor a named recipe is given.
        precision: default, likewise; None for that of the method.
        loss: default, likewise.
        has_bf16: whether the GPU supports bf16.

    Raises:
        OptionError: there is no such recipe; a line for each reason.
    """
    given = options.given()
    if options.recipe is not None:
        try:
            stated: Any = written_out({"named": options.recipe, **given})
        except ValueError as error:
            raise OptionError(f"--recipe: {error}") from None
        if options.defaults is not None:
            raise OptionError(
                f"--defaults {options.defaults}: {options.recipe} is a complete recipe: leave "
                "--defaults or --recipe out"
            )
    else:
        defaults = {"method": method, "precision": precision, "loss": loss}
        stated = {n: v for n, v in defaults.items() if v is not None} | given
    stated = with_lora_rank(stated)
    if options.recipe is None and options.defaults != "plain":
        stated = with_trl_defaults(stated, has_bf16=has_bf16)
    try:
        return Recipe.model_validate(stated)
    except ValidationError as error:
        lines = [validation_lines(error), *hidden_contradictions(stated)]
        raise OptionError("\n".join(lines)) from None


def recipe_text(options: RecipeOptions, recipe: Recipe) -> str:
    """Say in a line where a resolved recipe comes from, and the recipe."""
    if options.recipe_source is not None:
        return f"Recipe: {options.recipe_source}: {recipe.key}"
    changed = {n: v for n, v in options.given().items() if options.recipe or n != "method"}
    changes = ", ".join(f"{name} {plain(value)}" for name, value in changed.items())
    source = (options.recipe != AUTO and options.recipe) or (
        f"plain defaults for {recipe.method}"
        if options.defaults == "plain"
        else f"TRL {TRL_VERSION}'s defaults for {recipe.method}"
    )
    return f"Recipe: {source}{f', but {changes}' if changes else ''}: {recipe.key}"


def plain(value: object) -> str:
    """Value of an option, as the command line takes it."""
    words = {True: "on", False: "off", None: "none"}
    if isinstance(value, bool) or value is None:
        return words[value]
    return ",".join(value) if isinstance(value, tuple) else str(value)
