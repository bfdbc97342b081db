"""Options that state a recipe, and the recipe they come to."""

from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError

from orchestrator.request import Names, OptionError, validation_lines
from orchestrator.spec.sweep_spec import written_out
from trials.records.recipe import Method, Precision, Recipe

LORA_RANK = 16


def _on_or_off(value: Any) -> Any:
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """Options of a recipe; an absent one is the recipe's default."""

    method: Method | None = None
    recipe: str | None = None
    lora_rank: int | None = None
    lora_targets: Names | None = None
    gradient_checkpointing: Annotated[bool | None, BeforeValidator(_on_or_off)] = None
    attention: str | None = None
    experts: str | None = None
    optimizer: str | None = None
    precision: Precision | None = None


def recipe_of(
    options: RecipeOptions, *, method: Method = "lora", precision: Precision | None = None
) -> Recipe:
    """Resolve options into a recipe.

    Args:
        options: the options.
        method: default where neither a method nor a named recipe is given.
        precision: default, likewise; None for the recipe's own.

    Raises:
        OptionError: there is no such recipe; a line for each reason.
    """
    fields: dict[str, Any] = {}
    if options.recipe is not None:
        try:
            fields = dict(written_out({"named": options.recipe}))  # type: ignore[call-overload]
        except ValueError as error:
            raise OptionError(f"--recipe: {error}") from None
    defaults = {} if fields else {"method": method, "precision": precision}
    given = {f.name: getattr(options, f.name) for f in fields_of(options) if f.name != "recipe"}
    for source in (defaults, given):
        fields |= {name: value for name, value in source.items() if value is not None}
    if fields["method"] != "full":
        fields.setdefault("lora_rank", LORA_RANK)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise OptionError(validation_lines(error)) from None
