"""Errors of providers that start no node, in plain words."""

import re

import pytest
from fakes.scheduled_cluster import DESK, HEAD, World

from orchestrator.planning.cluster_resources import ClusterResources, FailedLaunch
from orchestrator.planning.launch_failures import in_words, refusals

# As the providers' documents and Ray's providers have them.
VCPUS = (
    "Node Launch Exception (VcpuLimitExceeded): You have requested more vCPU capacity than your "
    "current vCPU limit of 0 allows"
)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (VCPUS, "quota is used up: .* \\(VcpuLimitExceeded\\)"),
        (
            "An error occurred (UnauthorizedOperation): You are not authorized",
            "give the head's role",
        ),
        ("(InsufficientInstanceCapacity) We currently do not have sufficient", "none to give now"),
        ("ZONE_RESOURCE_POOL_EXHAUSTED: The zone 'us-central1-a' does not have", "none to give"),
        ("Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally.", "quota is used up"),
        ("Required 'compute.instances.create' permission for 'projects/x'", "give the head's role"),
        ("(QuotaExceeded) Operation could not be completed", "quota is used up"),
        ("(SkuNotAvailable) The requested size", "no such instance"),
        ("a\nsomething \x1b[31mnew", "^something "),
        ("", "no reason was given"),
    ],
)
def test_a_providers_error_is_a_sentence_with_its_remedy(reason: str, words: str) -> None:
    """An unknown one is shown as it is, without control characters."""
    said = in_words(reason)
    assert re.search(words, said)
    assert "\x1b" not in said


def test_only_the_types_of_the_gpu_are_named_and_their_last_errors() -> None:
    """Node types are named after GPUs, in lower case."""
    failures = [
        FailedLaunch("a100-80gb-sxm-spot", "(SpotMaxPriceTooLow)"),
        FailedLaunch("a100-80gb-sxm-spot", VCPUS),
        FailedLaunch("a100-40gb-sxm-spot", "(SkuNotAvailable)"),
        FailedLaunch("a100-80gb-sxm", "made of clay"),
    ]
    said = refusals("A100-80GB-SXM", failures)
    spot, group = said.split("; ")
    assert spot.startswith("a100-80gb-sxm-spot: the account's quota")
    assert group == "a100-80gb-sxm: made of clay"
    assert refusals("H100-SXM", failures) == ""


def test_the_wait_for_a_node_ends_with_the_providers_reason() -> None:
    """Whoever waited twenty minutes reads why, and not where it might be written."""
    cluster = ClusterResources((HEAD,), (FailedLaunch("desk-spot", VCPUS),))
    world = World(DESK[:1], HEAD)
    world.placed()
    for _ in range(2):
        world.scheduler.update(cluster)
        world.now += 601
    world.scheduler.update(cluster)
    (reason,) = world.scheduler.no_node.values()
    assert reason.startswith(
        "no node with desk came within 10 minutes (--wait-for-nodes): desk-spot"
    )
    assert reason.endswith("(VcpuLimitExceeded)")
