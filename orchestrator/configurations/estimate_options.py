"""Options of an estimate: those of a configuration, under those of the command line."""

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.configurations.configuration import Configuration, ConfigurationError
from orchestrator.configurations.key_classes import EARLIER, shown
from orchestrator.model_names import shape_text
from orchestrator.spec.recipe_options import RecipeOptions, recipe_of
from trials.recipes.fields import WITH_DROPOUT
from trials.recipes.mistakes import ADAPTER_FIELDS
from trials.recipes.recipe import Recipe
from trials.records.model import presets

DATA = ("dataset", "length_histogram")
READ_ALONE = "the estimate reads"
BARE = ("ignored", "not read", READ_ALONE, EARLIER)
"""Beginnings of what is said of a key without an assumption."""
ASSUMED = "Assumed for "
OF_DATA = ("dataset", "chat", "text_fields", "most", "others")
QUANTISATION = (
    *("quantisation", "double_quantisation", "kbit_preparation"),
    "quantised_experts",
)
OF_LAYERS = ("trained_layers", "spread_layers")
REPLACED = {
    "gradient_accumulation": ("effective_batch",),
    "model_config": ("model",),
    "dataset": OF_DATA,
    "length_histogram": OF_DATA,
    "examples": ("steps",),
    "epochs": ("steps",),
}
"""Options of a configuration that another option of the command line replaces."""


def with_configuration(
    configuration: Configuration, given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Options of the estimate, and a remark for each option that overrides the file's.

    Args:
        configuration: the configuration, without refusals.
        given: options of the command line; None for those that were not given.

    Raises:
        ConfigurationError: an option does not go with a configuration.
    """
    stated = {
        name: value
        for name, value in given.items()
        if value is not None and (value is not False or name == "packing")
    }
    _check_alone(stated)
    options = dict(configuration.options)
    remarks = [
        f"--{name.replace('_', '-')} {shown(stated[name])} replaces {shown(value)} of "
        f"{configuration.file}"
        for name, value in configuration.options.items()
        if name in stated and stated[name] != value
    ]
    for name, others in REPLACED.items():
        if name in stated:
            if "steps" in others and "steps" in options:
                remarks.append(
                    f"--{name} {shown(stated[name])} replaces max_steps {options['steps']} of "
                    f"{configuration.file}"
                )
            options = {n: v for n, v in options.items() if n not in others}
    options = _of_method(options, stated)
    options |= _lengths(configuration, options | stated, given)
    options["recipe_source"] = f"{configuration.file} ({configuration.trainer})"
    options["trainer"] = configuration.trainer.rpartition(" ")[0]
    remarks += _assumptions(configuration)
    lengths_are_assumed = options.get("cutoff") is None and isinstance(options["seq_len"], int)
    if lengths_are_assumed and not (options | stated).get("packing"):
        remarks.append(
            f"{ASSUMED}lengths: every row has {options['seq_len']} tokens, an upper bound: give "
            "--dataset or --length-histogram"
        )
    if "model" in options and "model" not in stated:
        reads_images = stated.get("image_tokens") is not None
        options["model"] = configuration.model_name if reads_images else configuration.model
        shape = shape_text(str(configuration.options["model"]))
        if shape is not None and options["model"] in presets():
            remarks.append(shape)
    return dict(given) | options | stated, remarks


def assumed_in(remarks: Iterable[str]) -> tuple[str, ...]:
    """Assumptions among remarks, as a list of assumptions has them; others name an option first."""
    return tuple(text.removeprefix(ASSUMED) for text in remarks if not text.startswith("--"))


def as_recipe(configuration: Configuration) -> Recipe:
    """Recipe that a configuration without refusals states."""
    names = {"defaults", *Recipe.model_fields}
    return recipe_of(
        RecipeOptions(**{n: v for n, v in configuration.options.items() if n in names})
    )


def _check_alone(stated: Mapping[str, Any]) -> None:
    wrong = [name for name in ("recipe", "defaults") if name in stated]
    if wrong:
        raise ConfigurationError(f"--config and --{wrong[0]} exclude each other: give one")


def _of_method(options: dict[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Options without the file's fields that another method of the command line excludes."""
    method = stated.get("method", options.get("method"))
    if stated.get("task", "sft") not in WITH_DROPOUT:
        options = options | ({"lora_dropout": 0.0} if options.get("lora_dropout") else {})
    excluded: tuple[str, ...] = ()
    if method != options.get("method"):
        excluded = QUANTISATION if method != "qlora" else ()
        excluded += ADAPTER_FIELDS if method == "full" else ("adapter_dtype", *OF_LAYERS)
    return {name: value for name, value in options.items() if name not in excluded}


def _lengths(
    configuration: Configuration, options: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Length of a row, and how data is cut and padded."""
    tokens, has_data = configuration.tokens, any(options.get(name) for name in DATA)
    if isinstance(options.get("seq_len"), int):
        tokens = options["seq_len"]
    packs = options.get("packing")
    if not has_data:
        lengths: dict[str, Any] = {
            "seq_len": options.get("seq_len") or tokens,
            "pad_to_multiple": given.get("pad_to_multiple"),
            "padding": None,
        }
        if options.get("group_by_length"):
            lengths["group_by_length"] = False  # examples without lengths are all alike
        return lengths
    lengths = {"cutoff": options.get("cutoff") or tokens}
    if packs or configuration.pads_to_limit:
        lengths["seq_len"] = options.get("seq_len") or tokens
    if configuration.pads_to_limit:
        multiple = options.get("pad_to_multiple") or 1
        lengths["pad_to_multiple"] = -(-tokens // multiple) * multiple
    return lengths


def _assumptions(configuration: Configuration) -> list[str]:
    lines = [line for line in configuration.lines if line.key_class == "assumed"]
    return [
        f"{'' if line.meaning.startswith(BARE) else ASSUMED}{line.key}: {line.meaning}"
        for line in lines
    ]
