"""A real Ray cluster of several nodes on this machine, as its users start and use it."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from fakes.ray_sweeps import environment
from orchestrator.planning.cluster_resources import SCALES_TO
from orchestrator.ray_backend.cluster import NO_IDLE_WORKERS

RAY = (sys.executable, "-P", str(Path(__file__).with_name("ray_command.py")))
FAKE_HEAD = "f" * 51 + "00000"  # the head's id in Ray's fake provider


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class StartedNode:
    """A node of the cluster.

    Attributes:
        node_id: Ray's id of the node.
        session: session of its processes.
    """

    node_id: str
    session: int

    @property
    def gang(self) -> list[psutil.Process]:
        """Fork server of ranks on the node, their parent, and the ranks in their order."""
        return sorted(self._processes("gang_worker"), key=lambda process: process.pid)

    def _processes(self, word: str) -> Iterator[psutil.Process]:
        """Processes of the node with this word in their command."""
        for process in of_sessions({self.session}):
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()):
                    yield process

    def kill(self) -> None:
        """Kill all processes of the node at once, as when the machine is gone."""
        kill_sessions({self.session})

    def kill_raylet(self) -> None:
        """Kill Ray's own process on the node, and leave all others."""
        for process in self._processes("raylet/raylet"):
            process.kill()


class Cluster:
    """Ray nodes on this machine, each in the foreground of a process group of its own."""

    def __init__(self, home: Path, scratch: Path) -> None:
        self.home = home
        self.address = "127.0.0.1"
        self.gcs, self.dashboard = free_port(), free_port()
        self.token = home / "token"
        self.token.write_text(secrets.token_hex(32), encoding="ascii")
        # A cluster without a token runs whatever anyone on the network sends it.
        self.env = environment(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(self.token))
        self.env |= NO_IDLE_WORKERS
        del self.env["RAY_ADDRESS"]
        self.scratch = scratch
        self._started = 0
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start_head(self, *arguments: str) -> None:
        """Start a head that also accepts job submissions."""
        self._start(
            "--head",
            f"--port={self.gcs}",
            f"--dashboard-port={self.dashboard}",
            "--dashboard-host=127.0.0.1",
            f"--temp-dir={self.scratch}",
            *arguments,
        )

    def start_autoscaling_head(self, cluster_file: Mapping[str, Any], *never: str) -> list[str]:
        """Start a head whose autoscaler starts a cluster file's nodes on this machine on demand.

        It uses Ray's fake provider in place of the file's; node types, their limits and priorities,
        and the limit of the cluster are the file's own.

        Args:
            cluster_file: content of a file for `ray up`.
            never: GPUs that the head declares and cannot start.

        Returns:
            Keys of the GPUs whose nodes it can start.
        """
        types = {
            name: {"min_workers": 0, "max_workers": 0} | kind | {"node_config": {}}
            for name, kind in cluster_file["available_node_types"].items()
        }
        # The fake provider knows the head by this name alone.
        head = types["ray.head.default"] = types.pop(cluster_file["head_node_type"])
        scales_to = {name: 1 for name in head["resources"] if name.startswith(SCALES_TO)}
        keys = [name.removeprefix(SCALES_TO) for name in scales_to]
        scales_to |= {SCALES_TO + key: 1 for key in never}
        commands = ("initialization", "setup", "head_setup", "worker_setup")
        commands = (*commands, "head_start_ray", "worker_start_ray")
        config = {
            "cluster_name": "autoscaling",
            "max_workers": cluster_file["max_workers"],
            "idle_timeout_minutes": cluster_file["idle_timeout_minutes"],
            "upscaling_speed": 10.0,
            "provider": {
                "type": "external",  # as such it needs no default configuration, which wheels lack
                "module": "ray.autoscaler._private.fake_multi_node.node_provider."
                "FakeMultiNodeProvider",
                "launch_multiple": True,
                "disable_node_updaters": True,
                "head_node_id": FAKE_HEAD,
                "gcs_address": f"{ray.util.get_node_ip_address()}:{self.gcs}",
            },
            "available_node_types": types,
            "head_node_type": "ray.head.default",
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
        } | {f"{name}_commands": [] for name in commands}
        path = self.home / "autoscaling.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        # As ray.cluster_utils.AutoscalingCluster does; `ray up` and KubeRay run version 2.
        before = dict(self.env)
        self.env |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        self.env |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD}
        self.env |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD}
        self.start_head(f"--autoscaling-config={path}", f"--resources={json.dumps(scales_to)}")
        self.env = before
        return keys

    def start_node(self, *carried: str, amount: int = 1) -> StartedNode:
        """Start a node that has so many of each of these resources, and as many cores."""
        node_id, resources = secrets.token_hex(28), json.dumps(dict.fromkeys(carried, amount))
        process = self._start(
            *(f"--address={self.address}:{self.gcs}", f"--num-cpus={amount}"),
            f"--resources={resources}",
            RAY_OVERRIDE_NODE_ID_FOR_TESTING=node_id,
        )
        return StartedNode(node_id, process.pid)

    def _start(
        self, *arguments: str, within: Sequence[str] = (), **settings: str
    ) -> subprocess.Popen[bytes]:
        """Start a node and wait until it is up: two starting at once may choose the same ports.

        Args:
            arguments: arguments of `ray start`.
            within: prefix of the command, to run it elsewhere.
            settings: environment variables.
        """
        self._started += 1
        log = self.home / f"node-{self._started}.log"
        with log.open("ab") as written:
            node = subprocess.Popen(
                [
                    *within,
                    *(*RAY, "start", "--block", "--disable-usage-stats", "--num-cpus=1"),
                    *("--object-store-memory=80000000", "--include-log-monitor=false"),
                    # Its default is one fixed port, which only one node of a machine can have.
                    f"--dashboard-agent-listen-port={free_port()}",
                    *arguments,
                ],
                env=self.env | settings,
                cwd=self.home,
                stdout=written,
                stderr=written,
                start_new_session=True,
            )
        self._nodes.append(node)
        deadline = time.monotonic() + 240
        while "Ray runtime started" not in log.read_text(encoding="utf-8"):
            assert node.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.1)
        return node

    def node_ids(self) -> dict[str, str]:
        """Node id by resource, as Ray reports it."""
        return dict(
            self._evaluated("{k: n['NodeID'] for n in ray.nodes() for k in n['Resources']}")
        )

    def staying_nodes(self) -> list[str]:
        """Ids of the nodes that are alive and not draining."""
        return list(
            self._evaluated(
                "[n['NodeID'] for n in ray.nodes() if n['Alive'] and n['NodeID'] not in "
                "ray._private.state.state.get_draining_nodes()]"
            )
        )

    def _evaluated(self, expression: str) -> Any:
        """Value of an expression in a driver of this cluster."""
        script = (
            "import json, ray\n"
            f"ray.init('{self.address}:{self.gcs}', log_to_driver=False)\n"
            f"print('ANSWER' + json.dumps({expression}))\n"
        )
        answer = self.run("python", "-c", script, timeout=60)
        return json.loads(answer.stdout.partition("ANSWER")[2].splitlines()[0])

    def run(self, *command: str, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of this cluster."""
        return subprocess.run(
            command,
            env=self.env,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def launch(self, spec: Path, *options: str) -> subprocess.Popen[str]:
        """`launch` on a laptop, with this machine as the cloud; `ray up` and `ray down` are logged.

        Every tunnel writes its process id to `tunnels`; every other call is written to `calls`.
        """
        laptop = self.home / "laptop"
        laptop.mkdir()
        (laptop / "cluster.yaml").write_text("cluster_name: here\n", encoding="utf-8")
        tunnel = f"{sys.executable} {Path(__file__).with_name('tunnel.py')}"
        ray = laptop / "ray"
        ray.write_text(
            "#!/bin/sh\n"
            'case "$1" in\n'
            f'job) exec {" ".join(RAY)} "$@" ;;\n'
            f"dashboard) echo $$ >> {laptop}/tunnels; exec {tunnel} $3 {self.dashboard} ;;\n"
            f'*) echo "$@" >> {laptop}/calls ;;\n'
            "esac\n",
            encoding="utf-8",
        )
        ray.chmod(0o755)
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "orchestrator", "launch", "cluster.yaml", str(spec)),
                *options,
            ],
            env=self.env
            | {"PATH": f"{laptop}:{self.env['PATH']}", "RAY_ADDRESS": "http://127.0.0.1:9"},
            cwd=laptop,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def submit(
        self, work: Path, *command: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `ray job submit`, repeated while the head's agent is starting.

        Args:
            work: working directory of the job.
            command: command of the job.
            variables: environment variables of the job and its workers.
        """
        address = f"--address=http://127.0.0.1:{self.dashboard}"
        runtime = f"--runtime-env-json={json.dumps({'env_vars': variables})}"
        submit = ("ray", "job", "submit", address, runtime, f"--working-dir={work}", "--", *command)
        deadline = time.monotonic() + 240
        while True:
            job = self.run(*submit, timeout=240)
            if "try again later" not in job.stderr or time.monotonic() > deadline:
                return job
            time.sleep(1)

    def stop(self) -> None:
        """Kill every node at once: a graceful stop drains for half a minute."""
        kill_sessions({node.pid for node in self._nodes})
        for node in self._nodes:
            node.wait(timeout=20)
        self._nodes.clear()


class ClusterSweep:
    """A sweep in the background on a cluster.

    Args:
        cluster: the cluster.
        name: name of its run; another sweep with that name continues it.
        text: its specification.
        more: further arguments of the command.
    """

    def __init__(self, cluster: Cluster, name: str, text: str, *more: str) -> None:
        self.out = cluster.home / name
        spec = cluster.home / f"{name}.yaml"
        spec.write_text(text, encoding="utf-8")
        self._log = cluster.home / f"{name}.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["python", "-m", "orchestrator", "sweep", str(spec), "--out", str(self.out), *more],
                env=cluster.env | {"RAY_ADDRESS": f"{cluster.address}:{cluster.gcs}"},
                cwd=cluster.home,
                stdout=log,
                stderr=log,
            )

    @property
    def said(self) -> str:
        """The whole output."""
        return self._log.read_text(encoding="utf-8")


def of_sessions(leaders: Collection[int]) -> Iterator[psutil.Process]:
    """Every process of these sessions: Ray's children outlive their parent."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) in leaders:
                yield process


def kill_sessions(leaders: Collection[int]) -> None:
    """Kill every process of these sessions."""
    for process in of_sessions(leaders):
        with contextlib.suppress(psutil.Error):
            process.kill()
