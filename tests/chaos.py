"""Kills at random moments while sweeps run: `make chaos`, for `MINUTES=` from `SEED=`.

A sweep of ten cells runs on a Ray of its own: into a folder, into a bucket that refuses a third of
the requests, or, as root, onto a disk that fills up. Its children, Ray workers, agents, raylet, GCS
and driver are killed, and children are stopped. A driver that ends early is started again until the
sweep is complete. Trials run the law of ``fakes/law_worker.py`` in place of a model; but for those
of one more sweep, whose trials train on two ranks and, given as many cores, on four, which are
killed too. `WHERE=ranks` runs sweeps of this kind alone. Trials of a last sweep have their ranks on
two of the three nodes of a cluster, and whole nodes are killed as well: `WHERE=nodes`.

Printed are kills; observations that were in the log and are not any more; probes with two verdicts;
processes that live a minute after their driver; files left among the temporary ones; and for each
kind of victim how long the ranks outlived it, at most. The script ends with 1 if there is any of
these, if ranks outlived another one by 5 s, or if a sweep never ends.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from fakes.ray_cluster import Cluster, StartedNode, kill_sessions, of_sessions
from fakes.ray_sweeps import LAW_PATH, SPEC, environment
from fakes.s3_server import BUCKET, CREDENTIALS, S3Server, s3_server

from orchestrator.planning.slow_nodes import slow_nodes
from orchestrator.storage.local_storage import OBSERVATIONS
from trials.records.observation import Observation
from trials.records.profile import logged, observations_of
from trials.trial import nodes_of

LENGTHS = list(range(24, 24 + 8 * 10, 8))
# A child, or its fork server, that was stopped holds its trial until its time is over.
LIMITS = "build_timeout_seconds: {0}\nprobe_timeout_seconds: {0}\n"
LAWS = SPEC.replace("[24, 32, 40]", str(LENGTHS)) + LIMITS.format(20)
MOST_RANKS = 4 if len(os.sched_getaffinity(0)) >= 4 else 2  # a rank holds a core
LAYOUTS = f"[{{gpus: 2, strategy: fsdp2}}, {{gpus: {MOST_RANKS}, strategy: ddp}}]"
GANGS = (
    SPEC.replace("seq_lens: [24, 32, 40]", f"seq_lens: [24, 32]\n    parallel: {LAYOUTS}")
    + LIMITS.format(60)
    + "boundary_repeats: 0\n"
)
ON_NODES = GANGS.replace("{gpus: 2, ", f"{{gpus: {MOST_RANKS}, ").replace(
    " strategy:", " nodes: 2, strategy:"
)
CELLS = {LAWS: 10, GANGS: 4, ON_NODES: 4}
# After an agent, with which its raylet ends, a raylet, GCS or driver, Ray or the sweep starts anew,
# as long as a dozen other kills take.
OF_RAY = {"worker": 8, "agent": 1, "raylet": 1, "gcs_server": 1, "driver": 2}
TARGETS = {
    LAWS: {"child": 12, "stopped child": 2} | OF_RAY,
    GANGS: {"rank": 12, "stopped rank": 1, "gang": 4} | OF_RAY | {"worker": 3},
}
TARGETS[ON_NODES] = TARGETS[GANGS] | {"worker": 4, "raylet": 2, "node": 2}
STARTING = 0.004  # share of the kills that are kept while no trial runs: sweeps are to get further
PAUSE_SECONDS = (0.05, 1.0)
ROUND_KILLS = 30  # of a sweep; then it may end
OUTLIVE_SECONDS = 60.0
KEPT_BY_OTHERS = "torchinductor_"  # among temporary files: PyTorch never removes it
ROUND_SECONDS = 1800.0
DISK = ("-t", "tmpfs", "-o", "size=192k")
MOST_OUTLIVED_SECONDS = 5.0
WHERES = ("folder", "bucket", *(["full disk"] if os.geteuid() == 0 else []), "ranks", "nodes")
SPECS = {"ranks": GANGS, "nodes": ON_NODES}
NODES = 3
OF_TRIALS = {"server", "gang", "rank"}  # the rest lives as long as a node


def family(driver: int) -> list[psutil.Process]:
    """A driver and all processes below it."""
    try:
        process = psutil.Process(driver)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kind_of(process: psutil.Process) -> str | None:
    """The target that a process is."""
    with contextlib.suppress(psutil.Error):
        words = " ".join(process.cmdline())
        if "gang_worker" in words:  # a fork server, the parent of the ranks, and these
            above = sum("gang_worker" in " ".join(p.cmdline()) for p in process.parents())
            return ("server", "gang", "rank")[above]
        if "law_worker" in words or "trials.training.worker" in words:
            return "child"
        if "ray::" in words:
            return "agent" if "Agent" in words else "worker"
        name = Path(process.exe()).name
        return name if name in OF_RAY else None
    return None


def is_trial_of_folder(path: Path) -> bool:
    """Whether Python's ``tempfile`` tried to write here, and was killed before it cleared up."""
    return len(path.name) == 8 and path.is_file() and path.read_bytes() == b"blat"


def duplicated(logged: Sequence[Observation]) -> Iterator[str]:
    """Keys of probes that had a verdict and were made again, though its nodes were not slow."""
    verdicts: dict[str, Observation] = {}
    for number, o in enumerate(logged):
        if o.outcome.is_verdict:
            probe = o.key.rpartition("/t")[0]
            before = verdicts.get(probe)
            if before is not None:
                slow = {node.node_id for node in slow_nodes(logged[:number])}
                if nodes_of(before).isdisjoint(slow):
                    yield probe
            verdicts[probe] = o


def outlived_seconds(ranks: Sequence[psutil.Process]) -> float:
    """Seconds until all ranks have ended; those of a gang that was killed end with it."""
    start = time.monotonic()
    psutil.wait_procs(ranks, timeout=2 * MOST_OUTLIVED_SECONDS)
    return time.monotonic() - start


class Nodes(Cluster):
    """A head and three nodes, two of which have the ranks of a trial. What died is started anew."""

    def __init__(self, place: Path) -> None:
        super().__init__(place, place / "ray")
        self.env |= {"TMPDIR": str(place / "tmp"), "RAY_ADDRESS": f"{self.address}:{self.gcs}"}
        self._workers: list[StartedNode] = []

    @property
    def has_head(self) -> bool:
        """Whether the head is up."""
        return any(kind_of(process) == "gcs_server" for process in self.processes())

    def start(self) -> None:
        """Start all where there is no head."""
        if not self.has_head:
            self.stop()
            self.start_head("--num-cpus=0", "--include-dashboard=false")
        self.replace()

    def replace(self) -> None:
        """Start a node for each that died."""
        alive = {os.getsid(p.pid) for p in self.processes() if kind_of(p) == "raylet"}
        self._workers = [node for node in self._workers if node.session in alive]
        while self.has_head and len(self._workers) < NODES:
            self._workers.append(self.start_node("cpu-small", amount=MOST_RANKS // 2))

    def processes(self) -> list[psutil.Process]:
        """Processes of the nodes, and the head's GCS."""
        head = of_sessions({node.pid for node in self._nodes[:1]})
        gcs = (process for process in head if kind_of(process) == "gcs_server")
        return [*gcs, *of_sessions({node.session for node in self._workers})]


class Round:
    """One sweep under kills, with what was seen of it."""

    def __init__(self, place: Path, where: str, server: S3Server, chance: random.Random) -> None:
        self.where, self.chance, self._server, self._place = where, chance, server, place
        self._out = place / "disk" / "run"
        self._out.parent.mkdir(parents=True)
        if where == "full disk":
            subprocess.run(["mount", *DISK, "none", self._out.parent], check=True)
        self._spec = SPECS.get(where, LAWS)
        self._nodes = Nodes(place) if where == "nodes" else None
        (place / "small.yaml").write_text(self._spec, encoding="utf-8")
        (place / "tmp").mkdir()
        self.kills: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.begun: set[psutil.Process] = set()
        self.outlived: dict[str, float] = {}

    def start(self) -> subprocess.Popen[bytes]:
        """Start, or resume, the sweep."""
        if self._nodes is not None:
            self._nodes.start()
        variables = {"TMPDIR": str(self._place / "tmp"), "RAY_TMPDIR": str(self._place / "tmp")}
        if self._spec is LAWS:
            variables["PYTHONPATH"] = LAW_PATH
        if self.where == "bucket":
            variables |= CREDENTIALS | {"AWS_ENDPOINT_URL": self._server.url}
        out = f"s3://{BUCKET}/{self._place.name}" if self.where == "bucket" else str(self._out)
        minutes = "0.2" if self._nodes is None else "3"  # a node starts in a fraction of that
        words = (
            "sweep",
            str(self._place / "small.yaml"),
            "--out",
            out,
            "--wait-for-nodes",
            minutes,
        )
        env = environment(self._place) if self._nodes is None else self._nodes.env
        with (self._place / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "orchestrator", *words],
                env=env | variables,
                cwd=self._place,
                stdout=log,
                stderr=log,
            )

    def logged(self) -> list[Observation]:
        """Every whole line of the log, repeated ones too."""
        if self.where == "bucket":
            objects = self._server.objects(f"{self._place.name}/observations/")
            content = b"".join(objects.values())
        else:
            file = self._out / OBSERVATIONS
            content = file.read_bytes() if file.exists() else b""
        return observations_of(map(logged, content.split(b"\n")[:-1]))

    def is_complete(self) -> bool:
        """Whether every cell was timed: a trial whose child was killed thrice ends without."""
        return len({o.cell.key for o in self.logged() if o.is_timing}) == CELLS[self._spec]

    def run(self, until: float) -> str | None:
        """Run until the sweep is complete; why it never was, or None."""
        end = time.monotonic() + ROUND_SECONDS
        driver = self.start()
        while time.monotonic() < end:
            time.sleep(self.chance.uniform(*PAUSE_SECONDS))
            self.begun |= set(self.processes(driver.pid))
            self.seen |= {o.key for o in self.logged()}
            if driver.poll() is None:
                if self._nodes is not None:
                    self._nodes.replace()
                if self.kills.total() < ROUND_KILLS and time.monotonic() < until:
                    self.kill(driver.pid)
                continue
            if driver.returncode == 0 and self.is_complete():
                return None
            if self.where == "full disk":
                more = ["mount", "-o", "remount,size=64m", self._out.parent]
                subprocess.run(more, check=True)
                self.kills["full disk"] += 1
            driver = self.start()
        driver.kill()
        return f"never complete: {(self._place / 'log').read_text()[-2000:]}"

    def processes(self, driver: int) -> list[psutil.Process]:
        """A driver's, and those of its cluster."""
        return family(driver) + ([] if self._nodes is None else self._nodes.processes())

    def kill(self, driver: int) -> None:
        """Kill, or stop, one process of a kind that is drawn, if there is one."""
        targets = TARGETS[self._spec]
        (kind,) = self.chance.choices(list(targets), list(targets.values()))
        processes = {p: kind_of(p) for p in self.processes(driver)}
        if next(iter(targets)) not in processes.values():
            if self.chance.random() > STARTING:
                return
            kind = "driver"
        wanted = {"node": "raylet"}.get(kind, kind.removeprefix("stopped "))
        living = [p for p, own in processes.items() if p.pid != driver and own == wanted]
        if kind == "driver":
            living = family(driver)[:1]
        if living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = self.chance.choice(living)
                ranks = self.ranks_of(process, [p for p, own in processes.items() if own == "rank"])
                if kind == "node":
                    kill_sessions({os.getsid(process.pid)})
                else:
                    process.send_signal(signal.SIGSTOP if "stopped" in kind else signal.SIGKILL)
                self.kills[kind] += 1
                if ranks and "stopped" not in kind:
                    seconds = outlived_seconds(ranks)
                    self.outlived[kind] = max(self.outlived.get(kind, 0.0), seconds)

    def ranks_of(
        self, victim: psutil.Process, ranks: Sequence[psutil.Process]
    ) -> Sequence[psutil.Process]:
        """Ranks that are to end with a process: of its own gang, or of all nodes.

        There is room for one trial on the nodes. Without a head, these do not learn of the driver's
        end, and take a minute to give both up.
        """
        if self._nodes is None:
            return [rank for rank in ranks if rank.parent() in {victim, victim.parent()}]
        is_driver = "orchestrator" in victim.cmdline() and self._nodes.has_head
        below = {victim, *victim.children(recursive=True)}
        return ranks if is_driver or not below.isdisjoint(ranks) else []

    def damage(self) -> dict[str, list[str]]:
        """What was lost, doubled or left."""
        logged = self.logged()
        to_end = [p for p in self.begun if self._nodes is None or kind_of(p) in OF_TRIALS]
        alive = psutil.wait_procs(to_end, timeout=OUTLIVE_SECONDS)[1]
        late = max((self.outlived.get(kind, 0.0) for kind in ("rank", "gang")), default=0.0)
        said = (self._place / "log").read_text(encoding="utf-8", errors="replace")
        return {
            "lost": sorted(self.seen - {o.key for o in logged}),
            "duplicated": sorted(duplicated(logged)),
            "ranks": [f"{late:.1f} s"] * (late > MOST_OUTLIVED_SECONDS),
            "processes": [str(p) for p in alive if p.is_running()],
            "files": sorted(
                path.name
                for path in (self._place / "tmp").iterdir()
                if not path.name.startswith(KEPT_BY_OTHERS) and not is_trial_of_folder(path)
                if f"Ray's logs are in {path}/" not in said
            ),
        }

    def close(self) -> None:
        """End what is left."""
        if self._nodes is not None:
            self._nodes.stop()
        for process in self.begun:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.where == "full disk":
            subprocess.run(["umount", "-l", self._out.parent], check=True)


def main() -> int:
    """Run rounds until the time is over; 1 if one of them was damaged."""
    seed, minutes = int(os.environ.get("SEED", "0")), float(os.environ.get("MINUTES", "60"))
    chance, until = random.Random(seed), time.monotonic() + 60 * minutes
    kills: Counter[str] = Counter()
    wheres = os.environ.get("WHERE", ",".join(WHERES)).split(",")
    damaged, number = False, 0
    with s3_server() as server:
        server.fails_every = 3
        while time.monotonic() < until:
            where = wheres[number % len(wheres)]
            with tempfile.TemporaryDirectory(prefix="c", ignore_cleanup_errors=True) as place:
                one = Round(Path(place), where, server, chance)
                try:
                    failure = one.run(until)
                    damage = one.damage()
                finally:
                    one.close()
            kills += one.kills
            found = {name: items for name, items in damage.items() if items}
            damaged = damaged or bool(found) or failure is not None
            late = {kind: f"{seconds:.2f} s" for kind, seconds in one.outlived.items()}
            ends = f" ranks ended within {late}" * (where in SPECS)
            line = (
                f"seed {seed}, round {number}, {where}: {dict(one.kills)}{ends} {found} "
                f"{failure or ''}"
            )
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            number += 1
    sys.stdout.write(f"{kills.total()} kills in {number} sweeps: {dict(kills)}\n")
    return int(damaged)


if __name__ == "__main__":
    sys.exit(main())
