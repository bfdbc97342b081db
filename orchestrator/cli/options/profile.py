"""The options of ``profile``."""

import argparse
from collections.abc import Callable
from typing import Any

from orchestrator.cli.options.value_types import largest_or_size


def add_profile(
    commands: Any,
    positive: Callable[[str], int],
    add_recipe: Callable[[argparse.ArgumentParser], None],
    add_prices: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Adds the command."""

    def several(text: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))

    profile = commands.add_parser(
        "profile",
        help="where the time of a step goes: stages, layers, kernels, experts",
        description="Fine-tunes for a few steps under torch.profiler in a child of its own and "
        "says where the time went, as arXiv 2408.04693 does in Fig. 4 to 6 and 11.",
    )
    add = profile.add_argument
    add("--model", required=True, help="a preset, a hub name, a folder or file with a config.json")
    add("--device", metavar="KEY", help="of 'catalog gpus' (default: this machine's GPU, else cpu)")
    add_recipe(profile)
    add(
        "--active-experts",
        type=several,
        metavar="N,…",
        help="for each token, sparse and dense side by side: 2,8 (default: the model's own)",
    )
    add(
        "--seq-len",
        "--seq-lens",
        dest="seq_lens",
        required=True,
        type=several,
        metavar="N,…",
        help="tokens per example; of several, how much depends on them",
    )
    add(
        "--batch-size",
        type=largest_or_size,
        metavar="N|max",
        help="default: 1 and the largest that fits",
    )
    add("--max-batch-size", type=positive, default=1024, help="look no further (default: 1024)")
    add("--weights", choices=("random", "pretrained"), default="random", help="default: random")
    add("--steps", type=positive, default=3, help="plain, and as many profiled (default: 3)")
    add(
        "--training-steps",
        type=positive,
        default=10,
        help="between the two counts of the experts' tokens (default: 10)",
    )
    add("--json", action="store_true", help="all of it, for programs")
    add_prices(profile)
