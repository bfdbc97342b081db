"""A real Ray cluster whose nodes each have an address of their own and a cable to cut.

A node is a Linux network namespace, connected to the head by a bridge. Creating it requires root.
"""

import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fakes.ray_cluster import RAY, Cluster, StartedNode
from fakes.ray_sweeps import LAW_PATH

# Ray looks every three seconds and gives up after five times; here a sweep lasts no longer.
IMPATIENT = {
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def missing_requirement() -> str | None:
    """Requirement of such a network that this machine lacks, or None."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if shutil.which("ip") is None:
        return "network namespaces take `ip` of iproute2 (apt-get install iproute2)"
    probe = f"probe{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    if made.returncode != 0:
        return f"`ip netns add` fails: {made.stderr.decode().strip()}"
    ip("netns", "del", probe)
    return None


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Network of a simulated machine.

    Attributes:
        name: name of the namespace.
        address: address of the machine.
        cable: outer end of its cable.
    """

    name: str
    address: str
    cable: str

    @property
    def within(self) -> tuple[str, ...]:
        """Prefix of a command that runs in this namespace."""
        return ("ip", "netns", "exec", self.name)


class Network:
    """A bridge that has an address of this machine and connects simulated machines."""

    def __init__(self) -> None:
        self._name = f"rt{secrets.token_hex(3)}"
        self._net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
        self._namespaces: list[str] = []
        self.address = f"{self._net}.1"
        ip("link", "add", self._name, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self._name)
        ip("link", "set", self._name, "up")

    def namespace(self) -> Namespace:
        """Add a machine to the network."""
        number = len(self._namespaces) + 2
        name, cable = f"{self._name}n{number}", f"{self._name}c{number}"
        made = Namespace(name, f"{self._net}.{number}", cable)
        ip("netns", "add", name)
        self._namespaces.append(name)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", cable, "master", self._name, "up")
        ip("-n", name, "addr", "add", f"{made.address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        # Ray takes for its own the address by which it would reach the world.
        ip("-n", name, "route", "add", "default", "via", self.address)
        return made

    def close(self) -> None:
        """Remove the network."""
        for name in self._namespaces:
            ip("netns", "del", name)
        ip("link", "del", self._name)


@dataclass(frozen=True, slots=True)
class NetworkNode(StartedNode):
    """A node of the cluster in a network namespace of its own.

    Attributes:
        address: address of the node.
        cable: outer end of its cable.
    """

    address: str
    cable: str

    def cut(self) -> None:
        """Disconnect the node; it keeps running."""
        ip("link", "set", self.cable, "down")


class NetworkCluster(Cluster):
    """A head outside, and nodes in namespaces.

    Args:
        home: a folder for tokens and logs.
        scratch: a folder for Ray, with a short path.
        stand_in: trials run the law of ``law_worker.py`` instead of a model.
    """

    def __init__(self, home: Path, scratch: Path, *, stand_in: bool) -> None:
        super().__init__(home, scratch)
        self.env |= IMPATIENT
        if stand_in:
            self.env |= {"PYTHONPATH": LAW_PATH}
        self._network = Network()
        self.address = self._network.address

    def start_head(self, *arguments: str) -> None:
        """Start a head on the bridge that connects the nodes."""
        super().start_head(f"--node-ip-address={self.address}", *arguments)

    def start_network_node(self, carried: str, amount: int = 1, **settings: str) -> NetworkNode:
        """Start a node with this resource in a namespace of its own.

        Args:
            carried: a catalog key.
            amount: as many of it, and of cores.
            settings: environment variables.
        """
        made = self._network.namespace()
        node_id = secrets.token_hex(28)
        process = self._start(
            f"--address={self.address}:{self.gcs}",
            f"--node-ip-address={made.address}",
            f'--resources={{"{carried}": {amount}}}',
            f"--num-cpus={amount}",
            within=made.within,
            RAY_OVERRIDE_NODE_ID_FOR_TESTING=node_id,
            **settings,
        )
        return NetworkNode(node_id, process.pid, made.address, made.cable)

    def give_notice(self, node: NetworkNode) -> None:
        """Give the two-minute notice of a cloud to a node, which is not taken away."""
        subprocess.run(
            [
                *(*RAY, "drain-node", f"--address={self.address}:{self.gcs}"),
                *(f"--node-id={node.node_id}", "--reason=DRAIN_NODE_REASON_PREEMPTION"),
                *("--reason-message=preempted", "--deadline-remaining-seconds=120"),
            ],
            env=self.env,
            capture_output=True,
            check=True,
        )

    def lose(self) -> None:
        """Kill the head and all nodes at once."""
        super().stop()

    def stop(self) -> None:
        """Stop the cluster and remove its network."""
        self.lose()
        self._network.close()
