"""Notice of a cloud that this node will be taken away: Ray is told to drain it (``node-notice``).

Each cloud's metadata service tells it to the machine itself, and to nobody else:

- AWS: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- Google: cloud.google.com/compute/docs/instances/create-use-preemptible and
  cloud.google.com/compute/docs/gpus/gpu-host-maintenance
- Azure: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

import contextlib
import datetime as dt
import email.utils
import http.client
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.console import remark

METADATA = "http://169.254.169.254"  # of all three, from their own machines alone
POLL_SECONDS = 5.0  # as AWS advises
ANSWER_SECONDS = 10.0
DRAIN_SECONDS = 60.0
# Google tells that, and not when; its documentation does.
PREEMPTED_SECONDS = 30
MAINTENANCE_SECONDS = 3600  # of a machine with a GPU
NO_ANSWER = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)
TAKEN_AWAY = {"Preempt", "Terminate", "Reboot", "Redeploy"}  # a freeze of seconds is none


@dataclass(frozen=True, slots=True)
class Notice:
    """That this machine will be taken away.

    Attributes:
        reason: one line.
        seconds: until then.
    """

    reason: str
    seconds: int


def wait_for_notice(
    provider: str,
    base: str = METADATA,
    node_id: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when there was notice, and Ray drains this node.

    Args:
        provider: aws, gcp or azure.
        base: address of the metadata service.
        node_id: of Ray's node; absent for the one on this machine.
        sleep: waits some seconds.
    """
    is_silent = False
    while True:
        try:
            found = notice(provider, base)
        except NO_ANSWER as error:
            if not is_silent:
                remark(f"{base}: no answer of {provider}'s metadata service ({error}): going on")
            is_silent = True
        else:
            is_silent = False
            if found is not None and _drain(found, node_id):
                return
        sleep(POLL_SECONDS)


def notice(provider: str, base: str = METADATA) -> Notice | None:
    """What the metadata service tells, or None.

    Raises:
        OSError: it does not answer.
        HTTPException: it breaks off.
        ValueError: it answers otherwise than it is documented to.
        LookupError: likewise.
        TypeError: likewise.
    """
    return _NOTICES[provider](base)


def _drain(found: Notice, node_id: str | None) -> bool:
    """Whether Ray has agreed to place nothing more on this node."""
    remark(f"{found.reason}, in {found.seconds} seconds: Ray is told to drain this node")
    command = [
        *("ray", "drain-node", "--reason=DRAIN_NODE_REASON_PREEMPTION"),
        f"--reason-message={found.reason}",
        f"--deadline-remaining-seconds={found.seconds}",
        *([f"--node-id={node_id}"] if node_id is not None else _own_node()),
    ]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=DRAIN_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        remark(f"ray drain-node: {error}: tried again")
        return False
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines() or [f"ended with {ended.returncode}"]
        remark(f"ray drain-node: {lines[-1]}: tried again")
    return ended.returncode == 0


def _own_node() -> list[str]:
    """How to name the node of this machine, by the process it is: a driver of Ray's takes long."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = file.read_bytes().decode(errors="replace").split("\0")
            flags = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
            if words[0].endswith("/raylet") and {"node_id", "gcs-address"} <= flags.keys():
                return [f"--node-id={flags['node_id']}", f"--address={flags['gcs-address']}"]
    return []


def _aws(base: str) -> Notice | None:
    """By version 2 of the service, the only one that nodes of ours are let use."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _answer(f"{base}/latest/api/token", lifetime, method="PUT")
    if token is None:
        raise LookupError("/latest/api/token: not found")
    told = _answer(
        f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}
    )
    if told is None:  # as long as nothing is to happen
        return None
    action = json.loads(told)
    left = _seconds_until(dt.datetime.fromisoformat(action["time"]))
    return Notice(f"AWS takes this spot instance away ({action['action']})", left)


def _gcp(base: str) -> Notice | None:
    instance, flavor = f"{base}/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
    if _answer(f"{instance}/preempted", flavor) == "TRUE":
        return Notice("Google takes this spot machine away", PREEMPTED_SECONDS)
    if _answer(f"{instance}/maintenance-event", flavor) == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("Google ends this machine to mend its host", MAINTENANCE_SECONDS)
    return None


def _azure(base: str) -> Notice | None:
    mine = {"Metadata": "true"}
    told = _answer(f"{base}/metadata/scheduledevents?api-version=2020-07-01", mine)
    events = [] if told is None else json.loads(told)["Events"]
    for event in (e for e in events if e["EventType"] in TAKEN_AWAY):
        # Machines of one availability set hear of each other's.
        name = f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        if _answer(name, mine) in event["Resources"]:
            begins = event["NotBefore"]  # empty once it has begun
            left = _seconds_until(email.utils.parsedate_to_datetime(begins)) if begins else 0
            return Notice(f"Azure takes this machine away ({event['EventType']})", left)
    return None


_NOTICES = {"aws": _aws, "gcp": _gcp, "azure": _azure}


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """What the service says; None where it has nothing by that name."""
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - http, ours
    # A proxy of the environment's cannot see this machine's own service.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=ANSWER_SECONDS) as answer:
            text: str = answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
        raise
    return text.strip()


def _seconds_until(when: dt.datetime) -> int:
    return max(0, int((when - dt.datetime.now(dt.UTC)).total_seconds()))
