"""The Ray cluster a sweep runs on: the one RAY_ADDRESS names, else one of its own here."""

import contextlib
import logging
import os
from collections.abc import Iterator

from orchestrator.plan import ClusterResources

# A sweep's observations are small; Ray would set a third of the machine's memory aside for them.
LOCAL_OBJECT_STORE_BYTES = 128 * 2**20
OWN_CLUSTER = "local"


class ClusterError(RuntimeError):
    """The cluster cannot be reached; one line on why and what to do."""


def cluster_address() -> str | None:
    """The cluster the environment names, or None for one of our own."""
    address = os.environ.get("RAY_ADDRESS", "")
    return None if address in {"", OWN_CLUSTER} else address


def this_machine() -> ClusterResources:
    """What a cluster of our own would offer, without starting it."""
    return ClusterResources(({"CPU": float(len(os.sched_getaffinity(0)))},))


@contextlib.contextmanager
def connected_cluster() -> Iterator[ClusterResources]:
    """A connection to the cluster; one of our own ends with it.

    Raises:
        ClusterError: RAY_ADDRESS names a cluster that does not answer.
    """
    address = cluster_address()
    # Ray says on every start how this variable's default will change, unless it is set.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            ray.init(
                address=OWN_CLUSTER,
                num_cpus=int(this_machine().nodes[0]["CPU"]),
                object_store_memory=LOCAL_OBJECT_STORE_BYTES,
                include_dashboard=False,
                **quiet,
            )
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        named = "a Ray on this machine" if address is None else f"RAY_ADDRESS={address}"
        raise ClusterError(
            f"{named} cannot be used: {line}: check the address and its token, or unset "
            "RAY_ADDRESS to use this machine alone"
        ) from None
    try:
        yield ClusterResources(tuple(n["Resources"] for n in ray.nodes() if n["Alive"]))
    finally:
        ray.shutdown()
