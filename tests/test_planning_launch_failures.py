"""Errors of providers that start no node, in plain words."""

import re

import pytest
from fakes.scheduled_cluster import DESK, HEAD, World

from orchestrator.planning.cluster_resources import ClusterResources, FailedLaunch
from orchestrator.planning.launch_failures import in_words, known_meaning, refusals

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
        ("Node Launch Exception (Unsupported): not in your Availability Zone", "no such instance"),
        ("a\nsomething \x1b[31mnew", "^something "),
        ("", "no reason was given"),
    ],
)
def test_a_providers_error_is_a_sentence_with_its_remedy(reason: str, words: str) -> None:
    """An unknown one is shown as it is, without control characters."""
    said = in_words(reason)
    assert re.search(words, said)
    assert "\x1b" not in said


NO_CAPACITY = "An error occurred (InsufficientInstanceCapacity) when calling RunInstances: Sorry"
SETUP = "<1/1> Setting up head node\n  [6/7] Running setup commands\n    (0/2) aws s3 sync ...\n"
NOT_READ = "An error occurred (AccessDenied) when calling the GetObject operation: Access Denied"
NOT_TAGGED = "An error occurred (UnauthorizedOperation) when calling the CreateTags operation"
COMMAND_FAILED = "!!!\nFull traceback: ...\nclick.exceptions.ClickException: Setup command failed."
TRIED = f"create_instances: Attempt failed with {NO_CAPACITY}, retrying.\n"


@pytest.mark.parametrize(
    ("output", "code"),
    [
        (f"{TRIED}Launched 1 nodes\n  Setup command failed: No space left on device", None),
        (f"{TRIED}Launched a new head node\nHead node fetch timed out.", None),
        (f"{SETUP}fatal error: {NOT_READ}\n{COMMAND_FAILED}", None),
        (f"{SETUP}{NOT_READ}\nFull traceback: ClientError: {NOT_TAGGED}", "UnauthorizedOperation"),
        (f"(AuthorizationFailed), ignored\n{SETUP}", None),
        ("An error occurred (AccessDenied) when calling the CreateRole operation", "AccessDenied"),
        (f"{TRIED}botocore.exceptions.EndpointConnectionError: Could not connect", None),
        (f"{TRIED}{VCPUS}", "VcpuLimitExceeded"),
        (f"{TRIED}Failed to launch instances. Max attempts exceeded.\n{NO_CAPACITY}", "Insuffici"),
        ("(AuthFailure)\nQuota 'GPUS' exceeded.", "Quota 'GPUS' exceeded"),
        ("Quota 'GPUS' exceeded.\n(AuthFailure)", "AuthFailure"),
        ("(ZonalAllocationFailed)", "ZonalAllocationFailed"),
        ("Required 'a.b.c' permission for 'projects/x'", "'a.b.c' permission"),
        ("pip: Unsupported wheel; you lack permission for /opt", None),
    ],
)
def test_the_last_error_that_ray_did_not_make_good_is_the_cause(
    output: str, code: str | None
) -> None:
    """What setup commands print is none, though words of a failed download are the provider's."""
    meaning = known_meaning(output)
    assert (meaning is None) is (code is None)
    assert code is None or f" ({code}" in str(meaning)


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
