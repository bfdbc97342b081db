"""Drain this node in Ray when its cloud announces that it takes the machine away: ``node-notice``.

The metadata service of each cloud announces this to the machine itself and to nobody else:

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
import logging
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.clouds.deployment_request import METADATA

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0  # as AWS advises
ANSWER_SECONDS = 10.0
DRAIN_SECONDS = 60.0
# Google announces the fact without a time; these times are from its documentation.
PREEMPTED_SECONDS = 30
MAINTENANCE_SECONDS = 3600  # for a machine with a GPU
NO_ANSWER = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)
TAKEN_AWAY = {"Preempt", "Terminate", "Reboot", "Redeploy"}  # a freeze lasts seconds


@dataclass(frozen=True, slots=True)
class Notice:
    """Announcement that this machine will be taken away."""

    reason: str
    seconds: int


def wait_for_notice(
    provider: str,
    base: str = METADATA,
    node_id: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for a notice, and return once Ray drains this node.

    Args:
        provider: aws, gcp or azure.
        base: address of the metadata service.
        node_id: id of the Ray node; None for the one on this machine.
        sleep: function that waits for a number of seconds.
    """
    is_silent = False
    while True:
        try:
            announced = notice(provider, base)
        except NO_ANSWER as error:
            if not is_silent:
                logger.warning(
                    "%s: no answer from %s's metadata service (%s): trying again",
                    *(base, provider, error),
                )
            is_silent = True
        else:
            is_silent = False
            if announced is not None and _drain(announced, node_id):
                return
        sleep(POLL_SECONDS)


def notice(provider: str, base: str = METADATA) -> Notice | None:
    """Ask the metadata service; None where it announces nothing.

    Raises:
        OSError: the service does not answer.
        HTTPException: the answer breaks off.
        ValueError: the answer is not as documented.
        LookupError: likewise.
        TypeError: likewise.
    """
    return _NOTICES[provider](base)


def _drain(announced: Notice, node_id: str | None) -> bool:
    """Ask Ray to place nothing more on this node; whether it accepted."""
    logger.info("%s, in %d seconds: draining this node", announced.reason, announced.seconds)
    command = [
        *("ray", "drain-node", "--reason=DRAIN_NODE_REASON_PREEMPTION"),
        f"--reason-message={announced.reason}",
        f"--deadline-remaining-seconds={announced.seconds}",
        *([f"--node-id={node_id}"] if node_id is not None else _own_node()),
    ]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=DRAIN_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("ray drain-node: %s: trying again", error)
        return False
    if completed.returncode != 0:
        lines = completed.stderr.strip().splitlines() or [f"ended with {completed.returncode}"]
        logger.warning("ray drain-node: %s: trying again", lines[-1])
    return completed.returncode == 0


def _own_node() -> list[str]:
    """Options that name this machine's node, read from its raylet process.

    Starting a Ray driver to ask for them would take too long.
    """
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            words = file.read_bytes().decode(errors="replace").split("\0")
            flags = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
            if words[0].endswith("/raylet") and {"node_id", "gcs-address"} <= flags.keys():
                return [f"--node-id={flags['node_id']}", f"--address={flags['gcs-address']}"]
    return []


def _aws(base: str) -> Notice | None:
    """Notice by version 2 of the service, the only version that our nodes may use."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _answer(f"{base}/latest/api/token", lifetime, method="PUT")
    if token is None:
        raise LookupError("/latest/api/token: not found")
    reply = _answer(
        f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}
    )
    if reply is None:  # nothing is announced
        return None
    action = json.loads(reply)
    left = _seconds_until(dt.datetime.fromisoformat(action["time"]))
    return Notice(f"AWS takes this spot instance away ({action['action']})", left)


def _gcp(base: str) -> Notice | None:
    instance, flavor = f"{base}/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
    if _answer(f"{instance}/preempted", flavor) == "TRUE":
        return Notice("Google takes this spot machine away", PREEMPTED_SECONDS)
    if _answer(f"{instance}/maintenance-event", flavor) == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("Google stops this machine for maintenance of its host", MAINTENANCE_SECONDS)
    return None


def _azure(base: str) -> Notice | None:
    headers = {"Metadata": "true"}
    reply = _answer(f"{base}/metadata/scheduledevents?api-version=2020-07-01", headers)
    events = [] if reply is None else json.loads(reply)["Events"]
    for event in (e for e in events if e["EventType"] in TAKEN_AWAY):
        # Machines of one availability set also get each other's events.
        name = f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        if _answer(name, headers) in event["Resources"]:
            begins = event["NotBefore"]  # empty once the event has begun
            left = _seconds_until(email.utils.parsedate_to_datetime(begins)) if begins else 0
            return Notice(f"Azure takes this machine away ({event['EventType']})", left)
    return None


_NOTICES = {"aws": _aws, "gcp": _gcp, "azure": _azure}


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """Text of the service's answer; None for status 404."""
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - http, ours
    # A proxy from the environment cannot reach this machine's own service.
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
