"""The Ray cluster of a sweep: the one that RAY_ADDRESS names, else a new one on this machine."""

import contextlib
import logging
import os
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.planning.cluster_resources import ClusterResources, Node, this_machine
from orchestrator.ray_backend.errors import ClusterError
from orchestrator.ray_backend.head import check_answers, watched_head
from orchestrator.ray_backend.own_ray import end_interrupted_start, watched
from trials.recipes.optional_packages import importable_extras

logger = logging.getLogger(__name__)

# The observations of a sweep are small; Ray would reserve a third of the memory for them.
LOCAL_OBJECT_STORE_BYTES = 128 * 2**20
OWN_CLUSTER = "local"
# Ray reads these variables when it is imported. They keep its messages on workers that died out of
# the output, since trials report their own ends: ``log_to_driver=False`` does not (Ray's issue
# 28216).
SILENT = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "^"}
# Ray lowers the priority of its workers by 15, so that two busy processes beside them leave a trial
# 3 % of a core. Trainers run at the usual priority, and what is measured should as well.
USUAL_PRIORITY = {"RAY_worker_niceness": "0"}
# Ray starts an idle worker for each core with the first driver, a second of a core's time and 80 MB
# each, and ends them unused: the workers of Tune's trials have variables of their own.
NO_IDLE_WORKERS = {"RAY_prestart_worker_first_driver": "false"}
# A node that is busy or new to this job may take this long to start a worker and look.
PACKAGES_TIMEOUT_SECONDS = 60.0


def cluster_address() -> str | None:
    """Address of the cluster that the environment names; None for a new one on this machine."""
    address = os.environ.get("RAY_ADDRESS", "")
    return None if address in {"", OWN_CLUSTER} else address


@contextlib.contextmanager
def connected_cluster(
    *, ask_for_packages: bool, folder: Path | None = None
) -> Iterator[ClusterResources]:
    """Connect to the cluster; a new one on this machine ends with the connection.

    Args:
        ask_for_packages: find out which extras each node has, by a worker on each.
        folder: folder for a new one; None for Ray's own.

    Raises:
        ClusterError: RAY_ADDRESS names a cluster that does not answer, or is no node's address.
    """
    address = cluster_address()
    if address is not None and address.startswith(("http://", "https://")):
        raise ClusterError(
            f"RAY_ADDRESS={address} accepts jobs, and is not a Ray address: put 'ray job "
            "submit --working-dir . --' before this command, which then runs on that cluster, or "
            "unset RAY_ADDRESS to use this machine alone"
        )
    if address is not None and address.startswith("ray://"):
        raise ClusterError(
            f"RAY_ADDRESS={address} is for Ray's client, and a sweep needs a node of the cluster: "
            "run this command on the head, or as a job by 'ray job submit --working-dir . --' "
            "before it, or unset RAY_ADDRESS to use this machine alone"
        )
    # Unless this variable is set, Ray warns on every start that its default will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ |= SILENT
    import ray  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    try:
        _connect(address, folder)
        with watched(folder) if address is None else watched_head(address):
            yield cluster_now(ask_for_packages=ask_for_packages)
    finally:
        ray.shutdown(wait_for_processes=True)


def _connect(address: str | None, folder: Path | None) -> None:
    """Connect to a cluster; without an address, to a new one on this machine."""
    import ray  # noqa: PLC0415 - as above

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            _start_ray(quiet, folder)
        else:
            check_answers(address)
            ray.init(address=address, **quiet)
    except Exception as error:  # noqa: BLE001 - Ray raises bare ones, too
        line = (str(error).strip() or repr(error)).splitlines()[0]
        if address is None:
            raise ClusterError(
                f"Ray cannot be started on this machine: {line}: see that it has memory, processes "
                "and a disk to spare, and run the same command again"
            ) from None
        raise ClusterError(
            f"RAY_ADDRESS={address} cannot be used: {line}: check the address, and its token "
            "(export RAY_AUTH_MODE=token), or unset RAY_ADDRESS to use this machine alone"
        ) from None
    except SystemExit:  # of Ray's own handler of SIGTERM
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.raise_signal(signal.SIGTERM)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def _start_ray(quiet: Mapping[str, Any], folder: Path | None) -> None:
    """Start Ray on this machine; once more where it is so busy that Ray's own 30 s were short."""
    import ray  # noqa: PLC0415 - as above

    os.environ |= USUAL_PRIORITY | NO_IDLE_WORKERS
    for is_last in (False, True):
        try:
            ray.init(
                address=OWN_CLUSTER,
                num_cpus=int(this_machine().nodes[0].resources["CPU"]),
                object_store_memory=LOCAL_OBJECT_STORE_BYTES,
                include_dashboard=False,
                _temp_dir=folder and str(folder),
                **quiet,
            )
        except BaseException as error:
            ray.shutdown()
            end_interrupted_start()
            if is_last or "timed out during startup" not in str(error):
                raise
            logger.warning("Ray took more than 30 s to start: starting it once more")
        else:
            return


def cluster_now(*, ask_for_packages: bool = False) -> ClusterResources:
    """Current nodes of the connected cluster; their extras by a worker on each, if asked for."""
    import ray  # noqa: PLC0415 - as above

    from orchestrator.ray_backend.ray_internals import (  # noqa: PLC0415
        draining_nodes,
        failed_launches,
    )

    alive = [node for node in ray.nodes() if node["Alive"]]
    packages = _packages(alive) if ask_for_packages else {}
    leaving, used = draining_nodes(), _used_by_others()
    nodes = (
        Node(
            node["Resources"],
            packages.get(node["NodeID"]),
            node["NodeID"],
            is_leaving=node["NodeID"] in leaving,
            used=used.get(node["NodeID"], {}),
            labels=node["Labels"],
        )
        for node in alive
    )
    cluster = ClusterResources(tuple(nodes), is_own=cluster_address() is None)
    logs = ray_logs(alive) if cluster.can_start_nodes else None
    return cluster if logs is None else replace(cluster, failed_launches=failed_launches(logs))


def ray_logs(nodes: list[Mapping[str, Any]]) -> Path | None:
    """Folder of Ray's logs on this machine; None where the driver's node is not among these."""
    import ray  # noqa: PLC0415 - as above

    here = ray.get_runtime_context().get_node_id()
    sockets = (Path(node["RayletSocketName"]) for node in nodes if node["NodeID"] == here)
    return next((path.parents[1] / "logs" for path in sockets), None)


def _used_by_others() -> dict[str, dict[str, float]]:
    """Resources of each node that other jobs use, by its id.

    A placement group of this job does not count: its trial may wait there for a worker that never
    starts. Ray reserves resources for a group under names that end in the group's id, which ends in
    the id of its job.
    """
    import ray  # noqa: PLC0415 - as above

    from orchestrator.ray_backend.ray_internals import resources_by_node  # noqa: PLC0415

    of_ours = re.compile(rf"(.+)_group_[0-9a-f]{{28}}{ray.get_runtime_context().get_job_id()}")
    has_now, free = resources_by_node()
    used = {}
    for node_id, has in has_now.items():
        ours: dict[str, float] = defaultdict(float)
        for name, amount in has.items():
            if reserved := of_ours.fullmatch(name):
                ours[reserved[1]] += amount
        used[node_id] = {
            name: amount - free.get(node_id, {}).get(name, 0.0) - ours[name]
            for name, amount in has.items()
            if "_group_" not in name
        }
    return used


def _packages(nodes: list[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Extras of each node, by its id; without nodes that do not answer."""
    import ray  # noqa: PLC0415 - as above
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    look = ray.remote(num_cpus=0, max_retries=0)(importable_extras)
    pending = {
        look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(): node["NodeID"]
        for node in nodes
    }
    ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=PACKAGES_TIMEOUT_SECONDS)
    packages = {}
    for reply in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # its node or worker died
            packages[pending[reply]] = ray.get(reply)
    return packages
