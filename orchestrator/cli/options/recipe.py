"""Options of a recipe, and of the model it fine-tunes."""

import argparse

from orchestrator.cli.options.value_types import positive

MODEL = "a preset, a hub name, or a folder or file with a config.json"


def add_recipe(command: argparse.ArgumentParser, *, method: str, precision: str) -> None:
    """Add the options of a recipe.

    Args:
        command: parser to add to.
        method: default method, for the help.
        precision: default precision, for the help.
    """
    add = command.add_argument
    add(
        "--method",
        choices=("full", "lora", "qlora"),
        help=f"fine-tuning method (default: {method})",
    )
    add(
        "--recipe",
        metavar="NAME",
        help="start from a named recipe: paper-mixtral or paper-blackmamba",
    )
    add("--lora-rank", type=positive, help="rank of the LoRA adapters (default: 16)")
    add(
        "--lora-targets",
        metavar="A,B",
        help="modules with adapters: attention, experts, router, all-linear, or module names",
    )
    add(
        "--gradient-checkpointing",
        choices=("on", "off"),
        help="recompute activations in the backward pass (default: off)",
    )
    add(
        "--attention",
        choices=("eager", "sdpa", "flash_attention_2"),
        help="attention kernel (default: sdpa)",
    )
    add(
        "--experts",
        choices=("looped", "grouped"),
        help="run experts one after the other or in one grouped kernel (default: looped where "
        "adapters or 4-bit weights need it, else grouped)",
    )
    add(
        "--optimizer",
        metavar="NAME",
        help="for example adamw (the default), adamw_8bit or paged_adamw_8bit",
    )
    add(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        help=f"precision of the computation (default: {precision})",
    )
