"""Command ``profile``: where a step's time goes."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from orchestrator.cli.options.groups import MODEL, PRICES, add_recipe
from orchestrator.cli.options.table import add_table
from orchestrator.cli.options.value_types import largest_or_size, positive, positives
from orchestrator.console import print_result

MODEL_AND_DEVICE = f"""
--model MODEL            {MODEL}
--device KEY             key of 'catalog gpus' (default: this machine's GPU, else cpu)
"""
ACTIVE_EXPERTS = """
--active-experts N,…     experts per token; several are compared, such as 2,8 (default: the model's
                         own)
"""
MEASURING = f"""
--batch-size N|max       examples per step (default: 1 and the largest that fits)
--max-batch-size MAX_BATCH_SIZE
                         limit of the search for the largest batch (default: 1024)
--weights {{random,pretrained}}
                         initial weights (default: random)
--steps STEPS            number of steps without the profiler, and of steps with it (default: 3)
--training-steps TRAINING_STEPS
                         training steps between the two counts of each expert's tokens (default: 10)
--json                   print all results as JSON
{PRICES}
"""


def add_options(commands: Any) -> None:
    """Add the command."""
    profile = commands.add_parser(
        "profile",
        run=run,
        help="break a step's time down into stages, layers, kernels and experts",
        description="Fine-tune for a few steps under torch.profiler in a child process, and print "
        "where the time went, as arXiv 2408.04693 does in Fig. 4 to 6 and 11.",
    )
    add_table(profile, MODEL_AND_DEVICE, required=["--model"])
    add_recipe(profile, method="lora", precision="bf16")
    add_table(profile, ACTIVE_EXPERTS, active_experts=positives)
    profile.add_argument(
        "--seq-len",
        "--seq-lens",
        dest="seq_lens",
        required=True,
        type=positives,
        metavar="N,…",
        help="tokens per example; several are compared",
    )
    add_table(
        profile,
        MEASURING,
        batch_size=largest_or_size,
        max_batch_size=positive,
        steps=positive,
        training_steps=positive,
    )


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
