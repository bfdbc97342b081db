"""Errors of providers that start no node, in plain words: quota, capacity, permission. Pure."""

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
# Error codes of AWS, Google Cloud and Azure, from their references of errors. A quota comes first:
# Azure has one code for it and for other refusals, and names it in the message.
MEANINGS = {
    **dict.fromkeys(("VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"), QUOTA),
    **dict.fromkeys(("InstanceLimitExceeded", "QuotaExceeded", "quotaExceeded"), QUOTA),
    **dict.fromkeys(("QUOTA_EXCEEDED", "quota limit", "Quota '"), QUOTA),
    **dict.fromkeys(("InsufficientInstanceCapacity", "SpotMaxPriceTooLow"), CAPACITY),
    **dict.fromkeys(("capacity-not-available", "RESOURCE_POOL_EXHAUSTED"), CAPACITY),
    **dict.fromkeys(("does not have enough resources", "AllocationFailed"), CAPACITY),
    **dict.fromkeys(("OverconstrainedAllocationRequest", "ZonalAllocationFailed"), CAPACITY),
    **dict.fromkeys(("UnauthorizedOperation", "AccessDenied", "AuthFailure"), PERMISSION),
    **dict.fromkeys(("AuthorizationFailed", "PERMISSION_DENIED", "permission for"), PERMISSION),
    **dict.fromkeys(("SkuNotAvailable", "Unsupported", "InvalidInstanceType"), ABSENT),
}
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
    """Meaning of the first provider's error in a text, with its code; None if it has none."""
    return next((f"{meaning} ({code})" for code, meaning in MEANINGS.items() if code in text), None)


def in_words(reason: str) -> str:
    """Meaning of a provider's error, with its code; of an unknown one, its own last line."""
    meaning = known_meaning(reason)
    if meaning is not None:
        return meaning
    lines = reason.strip().splitlines() or ["no reason was given"]
    return printable(lines[-1])[:MOST_CHARACTERS]
