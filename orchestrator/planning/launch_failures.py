"""Errors of providers that start no node, in plain words: quota, capacity, permission. Pure."""

import re
from collections.abc import Iterable

from gpu_catalog.safe_text import printable
from orchestrator.planning.cluster_resources import FailedLaunch

QUOTA = "the account's quota is used up: request a larger one from the provider"
CAPACITY = "the provider has none to give now: try again later, or in another region or zone"
PERMISSION = (
    "these credentials may not start it: give the head's role, or your account for 'ray up', the "
    "permissions in deploy/README.md"
)
ABSENT = "the region or zone has no such instance: deploy for another --region"
# Patterns of error codes of AWS, Google Cloud and Azure, from their references of errors. Azure has
# one code for a quota and for other refusals, and names the quota in the message. Words of other
# programs, too, need what the provider prints around them.
MEANINGS = {
    QUOTA: r"VcpuLimitExceeded|MaxSpotInstanceCountExceeded|InstanceLimitExceeded"
    r"|[Qq]uotaExceeded|QUOTA_EXCEEDED|quota limit|Quota '\S+' exceeded",
    CAPACITY: r"InsufficientInstanceCapacity|SpotMaxPriceTooLow|capacity-not-available"
    r"|RESOURCE_POOL_EXHAUSTED|does not have enough resources|(?:Zonal)?AllocationFailed"
    r"|OverconstrainedAllocationRequest",
    PERMISSION: r"UnauthorizedOperation|AccessDenied|AuthFailure|AuthorizationFailed"
    r"|PERMISSION_DENIED|(?<=Required )'[\w.]+' permission(?= for )",
    ABSENT: r"SkuNotAvailable|(?<=\()Unsupported(?=\))|InvalidInstanceType",
}
CODES = re.compile("|".join(f"({codes})" for codes in MEANINGS.values()))
# What `ray up` made good: attempts that it repeated, and all that it prints until there is a head.
RETRIED = re.compile(r"Attempt failed with .*, retrying")
STARTED = re.compile(r"Launched (?:\d+ nodes|a new head node)|Setting up head node")
# Commands print the rest, such as errors of a user's own download; Ray's calls end in a traceback.
BY_COMMANDS = re.compile(r"(?<=Setting up head node).*?(?=Full traceback:|\Z)", re.DOTALL)
MOST_CHARACTERS = 300


def refusals(gpu: str, failures: Iterable[FailedLaunch]) -> str:
    """Reasons why no node with a GPU was started, by node type; empty without failures.

    Args:
        gpu: key of the catalog.
        failures: launches that failed, on any GPU; the last of a node type counts.
    """
    last = {failure.node_type: failure.reason for failure in failures if failure.is_of(gpu)}
    return "; ".join(f"{node_type}: {in_words(reason)}" for node_type, reason in last.items())


def known_meaning(text: str) -> str | None:
    """Meaning of the last provider's error in a text, with its code; None if it has none.

    Args:
        text: a provider's error, or the output of `ray up`, where errors that Ray made good do not
            count, nor what commands on the head print.
    """
    unmended = RETRIED.sub("", STARTED.split(BY_COMMANDS.sub("", text))[-1])
    codes = [*CODES.finditer(unmended)]
    if not codes:
        return None
    last = codes[-1]
    meanings = zip(MEANINGS, last.groups(), strict=True)
    return next(f"{meaning} ({code})" for meaning, code in meanings if code)


def in_words(reason: str) -> str:
    """Meaning of a provider's error, with its code; of an unknown one, its own last line."""
    meaning = known_meaning(reason)
    if meaning is not None:
        return meaning
    lines = reason.strip().splitlines() or ["no reason was given"]
    return printable(lines[-1])[:MOST_CHARACTERS]
