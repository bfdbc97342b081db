"""`ray up`, `ray job submit` and `ray down` over ssh with the file that `deploy` writes.

The hosts run on this machine: each has its own processes, files, network and name, and Debian's
sshd. Packages come from this virtual environment instead of a download.
"""

import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fakes import network_cluster
from fakes.network_cluster import Namespace, Network
from fakes.ray_cluster import free_port
from fakes.ray_sweeps import SMALL_CELL, environment

from orchestrator.cli.main import main

SSHD = "/usr/sbin/sshd"
HOME = "/mnt"  # of root on a host, in the host's own view of the file system
LACKING = network_cluster.missing_requirement() or next(
    (f"{name} is not installed" for name in (SSHD, "rsync") if shutil.which(name) is None), None
)
pytestmark = [pytest.mark.ssh, pytest.mark.skipif(LACKING is not None, reason=LACKING or "")]

SSHD_CONFIG = """\
HostKey {folder}/hostkey
PidFile none
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
"""
# The environment that `setup_commands` would make, but for its downloads.
HOST = """\
set -e
hostname {name}
mount --make-rprivate /
mount --bind {home} {HOME}
mount --bind {folder}/passwd /etc/passwd
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mkdir -p /run/sshd
{python} -m venv {HOME}/finetune-cost-env
packages={HOME}/finetune-cost-env/lib/{version}/site-packages
rm -rf $packages/setuptools* $packages/pkg_resources $packages/_distutils_hack $packages/*.pth
echo {packages} > $packages/here.pth
cp {ray} {HOME}/finetune-cost-env/bin/ray
sed -i '1s,.*,#!{HOME}/finetune-cost-env/bin/python,' {HOME}/finetune-cost-env/bin/ray
exec {SSHD} -D -e -f {folder}/sshd_config
"""
PIP = "[global]\nno-index = true\n[install]\nno-build-isolation = false\n"
SPEC = f"name: hosts\ngpus: [cpu]\n{SMALL_CELL}"


class Hosts:
    """Hosts that accept ssh with one key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder / "id_ed25519"
        self._network = Network()
        self._running: list[subprocess.Popen[bytes]] = []
        for key in (self.key, folder / "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder), encoding="utf-8")
        users = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()
        root = f"root:x:0:0:root:{HOME}:/bin/bash"
        accounts = [root, *(user for user in users if not user.startswith("root:"))]
        (folder / "passwd").write_text("\n".join(accounts) + "\n", encoding="utf-8")

    def start(self, name: str) -> str:
        """Start one more host and return its address."""
        made = self._network.namespace()
        home = self.folder / name
        (home / ".ssh").mkdir(parents=True)
        shutil.copy(self.key.with_suffix(".pub"), home / ".ssh" / "authorized_keys")
        (home / ".config" / "pip").mkdir(parents=True)
        (home / ".config" / "pip" / "pip.conf").write_text(PIP, encoding="utf-8")
        script = HOST.format(
            name=name,
            home=home,
            folder=self.folder,
            python=getattr(sys, "_base_executable", sys.executable),
            version=f"python3.{sys.version_info.minor}",
            packages=sysconfig.get_path("purelib"),
            ray=Path(sys.executable).with_name("ray"),
            HOME=HOME,
            SSHD=SSHD,
        )
        with (self.folder / f"{name}.log").open("wb") as log:
            host = subprocess.Popen(
                [
                    *(*made.within, "unshare", "--pid", "--fork", "--kill-child", "--mount"),
                    *("--mount-proc", "--uts", "--ipc", "bash", "-c", script),
                ],
                stdout=log,
                stderr=log,
            )
        self._running.append(host)
        self._wait_for(made, name)
        return made.address

    def _wait_for(self, made: Namespace, name: str) -> None:
        deadline = time.monotonic() + 60
        log = self.folder / f"{name}.log"
        while "Server listening" not in log.read_text(encoding="utf-8"):
            assert time.monotonic() < deadline, (made, log.read_text(encoding="utf-8"))
            time.sleep(0.2)

    def run(self, address: str, command: str) -> str:
        """Return the output of a command on a host."""
        return subprocess.run(
            [
                *("ssh", "-q", "-i", str(self.key), "-o", "StrictHostKeyChecking=no"),
                *("-o", "UserKnownHostsFile=/dev/null", f"root@{address}", command),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        ).stdout

    def close(self) -> None:
        """End all hosts: all processes of a host end with its first."""
        for host in self._running:
            host.kill()
            host.wait(timeout=20)
        self._network.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Hosts in a folder outside /tmp, because each host has its own /tmp."""
    folder = Path("/var/tmp") / f"hosts-{secrets.token_hex(4)}"  # noqa: S108 - a random name
    folder.mkdir(mode=0o700)
    hosts = Hosts(folder)
    try:
        yield hosts
    finally:
        hosts.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_cluster_of_hosts_comes_up_runs_a_job_and_goes_down(
    hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two hosts join with their devices, the trial runs on its own, and Ray is gone afterwards."""
    head, worker = hosts.start("head"), hosts.start("worker")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "my.yaml").write_text(SPEC, encoding="utf-8")
    made = tmp_path / "cluster.yaml"
    options = ["--provider", "local", "--hosts", f"{head},{worker}", "--out", str(made)]
    assert main(["deploy", str(tmp_path / "job" / "my.yaml"), *options]) == 0
    capsys.readouterr()
    config = yaml.safe_load(made.read_text(encoding="utf-8"))
    config["cluster_name"] = f"hosts-{secrets.token_hex(3)}"
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    token = tmp_path / "auth_token"
    token.write_text(secrets.token_hex(32), encoding="ascii")
    config["file_mounts"]["~/.ray/auth_token"] = str(token)
    made.write_text(yaml.safe_dump(config), encoding="utf-8")
    env = environment(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    del env["RAY_ADDRESS"]

    def ray(*command: str) -> str:
        done = subprocess.run(
            ["ray", *command],
            env=env,
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    ray("up", "--yes", str(made))
    deadline = time.monotonic() + 120
    while "1.0 cpu" not in (log := ray("exec", str(made), "ray status")):
        assert time.monotonic() < deadline, log
        time.sleep(2)
    port = free_port()
    dashboard = subprocess.Popen(
        ["ray", "dashboard", "--port", str(port), str(made)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        time.sleep(3)
        env["RAY_ADDRESS"] = f"http://127.0.0.1:{port}"
        sweep = ("python", "-m", "orchestrator", "sweep", "my.yaml", "--out", "runs/my")
        output = ray("job", "submit", "--working-dir", str(tmp_path / "job"), "--", *sweep)
    finally:
        os.killpg(dashboard.pid, 15)
        dashboard.wait(timeout=20)
    assert "/mnt/runs/my/report.html" in output
    log = hosts.run(head, "cat ~/runs/my/observations.jsonl")
    assert '"host":"worker"' in log
    assert '"host":"head"' not in log
    assert token.read_text(encoding="ascii") not in output + log
    del env["RAY_ADDRESS"]
    ray("down", "--yes", str(made))
    assert "raylet" not in hosts.run(head, "ps -eo args")
