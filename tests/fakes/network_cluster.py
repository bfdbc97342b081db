"""A real Ray cluster whose nodes have a network of their own each: an address, and a cable to cut.

A node is a network namespace of Linux that is joined to the head's by a bridge. It takes the rights
of root, as making namespaces does.
"""

import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fakes.ray_cluster import Cluster, kill_sessions

STAND_IN = Path(__file__).parent / "stand_in"
# Ray looks every three seconds and gives up after five times; here a sweep lasts no longer.
IMPATIENT = {
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def missing() -> str | None:
    """What this machine lacks to make such a network; None when it has all."""
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
    """`ip` of iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A machine's network.

    Attributes:
        name: `ip netns exec` knows it by it.
        address: of the machine.
        cable: its outer end.
    """

    name: str
    address: str
    cable: str

    @property
    def within(self) -> tuple[str, ...]:
        """What to put before a command that runs there."""
        return ("ip", "netns", "exec", self.name)


class Network:
    """A bridge, with an address of this machine, and machines that are joined to it."""

    def __init__(self) -> None:
        self._name = f"rt{secrets.token_hex(3)}"
        self._net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
        self._namespaces: list[str] = []
        self.address = f"{self._net}.1"
        ip("link", "add", self._name, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self._name)
        ip("link", "set", self._name, "up")

    def namespace(self) -> Namespace:
        """One more machine."""
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
        """Takes it down."""
        for name in self._namespaces:
            ip("netns", "del", name)
        ip("link", "del", self._name)


@dataclass(frozen=True, slots=True)
class NetworkNode:
    """A node of such a cluster.

    Attributes:
        node_id: Ray's name of it.
        address: of its own.
        cable: the end of its cable that is outside.
        session: the processes it consists of.
    """

    node_id: str
    address: str
    cable: str
    session: int

    def kill(self) -> None:
        """All at once, as when the machine is gone."""
        kill_sessions({self.session})

    def cut(self) -> None:
        """It goes on, and nobody hears of it any more."""
        ip("link", "set", self.cable, "down")


class NetworkCluster(Cluster):
    """A head outside, and nodes in namespaces.

    Args:
        home: a folder for tokens and logs.
        scratch: a folder for Ray, with a short name.
        stand_in: trials run no model but a law, as ``law_worker.py`` has it.
    """

    def __init__(self, home: Path, scratch: Path, *, stand_in: bool) -> None:
        super().__init__(home, scratch)
        self.env |= IMPATIENT
        if stand_in:
            path = os.pathsep.join(map(str, (STAND_IN, STAND_IN.parent, STAND_IN.parent.parent)))
            self.env |= {"PYTHONPATH": path}
        self._network = Network()
        self.address = self._network.address

    def start_head(self, *arguments: str) -> None:
        """A head, on the bridge that the nodes are joined to."""
        super().start_head(f"--node-ip-address={self.address}", *arguments)

    def start_network_node(self, carried: str, **settings: str) -> NetworkNode:
        """A node in a namespace of its own, that carries this resource.

        Args:
            carried: a catalog key.
            settings: variables of its environment.
        """
        made = self._network.namespace()
        node_id = secrets.token_hex(28)
        process = self._start(
            f"--address={self.address}:{self.gcs}",
            f"--node-ip-address={made.address}",
            f'--resources={{"{carried}": 1}}',
            within=made.within,
            RAY_OVERRIDE_NODE_ID_FOR_TESTING=node_id,
            **settings,
        )
        return NetworkNode(node_id, made.address, made.cable, process.pid)

    def give_notice(self, node: NetworkNode) -> None:
        """That a node will be taken away in two minutes, as clouds do; it is not taken."""
        subprocess.run(
            [
                *("ray", "drain-node", f"--address={self.address}:{self.gcs}"),
                *(f"--node-id={node.node_id}", "--reason=DRAIN_NODE_REASON_PREEMPTION"),
                *("--reason-message=preempted", "--deadline-remaining-seconds=120"),
            ],
            env=self.env,
            capture_output=True,
            check=True,
        )

    def lose(self) -> None:
        """The head and all nodes, at once."""
        super().stop()
        self._nodes.clear()

    def stop(self) -> None:
        """Ends it, and takes its network down."""
        self.lose()
        self._network.close()
