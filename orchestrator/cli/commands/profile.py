"""Command ``profile``: where a step's time goes."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from orchestrator.console import print_result
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.reporting.sections.profile_groups import profile_groups
from orchestrator.reporting.sections.profile_section import group_text
from orchestrator.request import request_of
from orchestrator.running.profile_request import ProfileRequest, run_profiles


def run(options: argparse.Namespace) -> int:
    """Profile and print; the exit code is 1 where something could not be profiled."""
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
