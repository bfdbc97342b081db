"""Command ``profile``: where a step's time goes."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from orchestrator.cli.options.prices import add_prices
from orchestrator.cli.options.recipe import MODEL, add_recipe
from orchestrator.cli.options.value_types import largest_or_size, positive, positives
from orchestrator.console import print_result


def add_options(commands: Any) -> None:
    """Add the command."""
    profile = commands.add_parser(
        "profile",
        help="break a step's time down into stages, layers, kernels and experts",
        description="Fine-tunes for a few steps under torch.profiler in a child process and prints "
        "where the time went, as arXiv 2408.04693 does in Fig. 4 to 6 and 11.",
    )
    add = profile.add_argument
    add("--model", required=True, help=MODEL)
    add(
        "--device",
        metavar="KEY",
        help="key of 'catalog gpus' (default: this machine's GPU, else cpu)",
    )
    add_recipe(profile, method="lora", precision="bf16")
    add(
        "--active-experts",
        type=positives,
        metavar="N,…",
        help="experts per token; several are compared, such as 2,8 (default: the model's own)",
    )
    add(
        "--seq-len",
        "--seq-lens",
        dest="seq_lens",
        required=True,
        type=positives,
        metavar="N,…",
        help="tokens per example; several are compared",
    )
    add(
        "--batch-size",
        type=largest_or_size,
        metavar="N|max",
        help="examples per step (default: 1 and the largest that fits)",
    )
    _add_measuring(profile)
    add_prices(profile)
    profile.set_defaults(run_command=run)


def _add_measuring(profile: argparse.ArgumentParser) -> None:
    add = profile.add_argument
    add(
        "--max-batch-size",
        type=positive,
        default=1024,
        help="limit of the search for the largest batch (default: 1024)",
    )
    add(
        "--weights",
        choices=("random", "pretrained"),
        default="random",
        help="initial weights (default: random)",
    )
    add(
        "--steps",
        type=positive,
        default=3,
        help="number of plain steps, and of profiled steps (default: 3)",
    )
    add(
        "--training-steps",
        type=positive,
        default=10,
        help="steps between the two counts of the experts' tokens (default: 10)",
    )
    add("--json", action="store_true", help="print all results as JSON")


def run(options: argparse.Namespace) -> int:
    """Profile and print; the exit code is 1 where something could not be profiled."""
    from orchestrator.pricing.prices_in_use import PriceOptions
    from orchestrator.reporting.sections.profile_groups import profile_groups
    from orchestrator.reporting.sections.profile_section import group_text
    from orchestrator.request import request_of
    from orchestrator.running.profile_request import ProfileRequest, run_profiles

    catalog = request_of(PriceOptions, vars(options)).in_use().catalog
    profiles = run_profiles(request_of(ProfileRequest, vars(options)), catalog)
    groups = profile_groups(profiles.profiled)
    if options.json:
        tables = [asdict(group) for group in groups]
        raw = [profile.model_dump(mode="json") for profile in profiles.profiled]
        print_result(json.dumps({"profiles": raw, "tables": tables}, default=_plain))
    elif groups:
        print_result("\n\n".join(part for group in groups for part in group_text(group)))
    return 0 if profiles.is_complete else 1


def _plain(record: Any) -> Any:
    return record.model_dump(mode="json")
