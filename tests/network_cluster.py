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

from ray_cluster import Cluster, kill_sessions

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
        self._name = f"rt{secrets.token_hex(3)}"
        self._net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
        self._namespaces: list[str] = []
        self._has_bridge = False
        self.address = f"{self._net}.1"

    def start_head(self, *arguments: str) -> None:
        """A head, on the bridge that the nodes are joined to."""
        if not self._has_bridge:
            ip("link", "add", self._name, "type", "bridge")
            ip("addr", "add", f"{self.address}/24", "dev", self._name)
            ip("link", "set", self._name, "up")
            self._has_bridge = True
        super().start_head(f"--node-ip-address={self.address}", *arguments)

    def namespace(self) -> tuple[str, str, str]:
        """A machine's network: its name, its address, and the outer end of its cable."""
        number = len(self._namespaces) + 2
        name, cable = f"{self._name}n{number}", f"{self._name}c{number}"
        address = f"{self._net}.{number}"
        ip("netns", "add", name)
        self._namespaces.append(name)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", cable, "master", self._name, "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        return name, address, cable

    def start_network_node(self, carried: str, **settings: str) -> NetworkNode:
        """A node in a namespace of its own, that carries this resource.

        Args:
            carried: a catalog key.
            settings: variables of its environment.
        """
        name, address, cable = self.namespace()
        node_id = secrets.token_hex(28)
        process = self._start(
            f"--address={self.address}:{self.gcs}",
            f"--node-ip-address={address}",
            f'--resources={{"{carried}": 1}}',
            within=("ip", "netns", "exec", name),
            RAY_OVERRIDE_NODE_ID_FOR_TESTING=node_id,
            **settings,
        )
        return NetworkNode(node_id, address, cable, process.pid)

    def lose(self) -> None:
        """The head and all nodes, at once."""
        super().stop()
        self._nodes.clear()

    def stop(self) -> None:
        """Ends it, and takes its network down."""
        self.lose()
        for name in self._namespaces:
            ip("netns", "del", name)
        subprocess.run(["ip", "link", "del", self._name], capture_output=True, check=False)
