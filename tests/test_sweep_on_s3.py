"""Sweeps on a real Ray into a bucket: killed and resumed elsewhere, with failing requests.

A law replaces the model.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.ray_sweeps import LAW_PATH, SPEC
from fakes.s3_server import BUCKET, KEY, SECRET, TOKEN, S3Server, s3_server
from fakes.s3_sweeps import sent, start_sweep, undisturbed

from trials.records.observation import largest_batch

# At batch sizes that always fit, the probes of every device are the same.
ONE_CELL = SPEC.replace("[24, 32, 40]", "[24]").replace("batch_size: 32", "batch_size: 2")
ONE_CELL += "profile: true\n"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A bucket that both sweeps use."""
    with s3_server() as server:
        yield server


def test_sweep_resumed_on_another_machine_equals_an_undisturbed_one(
    server: S3Server, tmp_path: Path
) -> None:
    """The keys are the same and unique, though every third request of the second sweep fails.

    Profiles cover one example and the largest batch size, and each is made only once.
    """
    (tmp_path / "small.yaml").write_text(ONE_CELL, encoding="utf-8")
    first, second = tmp_path / "first", tmp_path / "second"
    out, law = ("--out", f"s3://{BUCKET}/small"), {"PYTHONPATH": LAW_PATH}
    (tmp_path / "fault").write_text("wait", encoding="utf-8")  # so that the first does not end
    waits = law | {"LAW_WORKER_FAULTS": str(tmp_path / "fault")}
    sweep = start_sweep(server, first, str(tmp_path / "small.yaml"), *out, **waits)
    end = time.monotonic() + 600
    while not sent(server, "small") and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    before = server.objects("small/observations/")
    assert before, (first / "log").read_text()
    server.fails_every = 3
    resumed = start_sweep(server, second, "--resume", *out, **law)
    assert resumed.wait(timeout=600) == 0, (second / "log").read_text()
    assert server.objects("small/observations/").items() > before.items()
    server.fails_every = 0
    keys = [o.key for o in sent(server, "small")]
    observed = undisturbed(ONE_CELL)
    limit = largest_batch(observed)
    assert limit is not None
    profiles = [f"{observed[0].cell.key}/profile/b{size}/t1" for size in (1, limit[0])]
    assert sorted(keys) == sorted([*(o.key for o in observed), *profiles])
    report = server.objects("small/")["report.md"].decode()
    assert "## Where the time goes" in report
    files = {name for name in server.objects("small/") if "/" not in name}
    assert {"sweep.yaml", "models.json", "plan.json", "fits.json", "report.md"} < files
    assert {"ranking.csv", "ranking.json"} < files
    log = (second / "log").read_text()
    assert f": s3://{BUCKET}/small/report.html" in log
    assert "Traceback" not in log + (first / "log").read_text()
    assert not list(second.glob(".local/state/finetune-cost/spool/*"))
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    kept += server.objects().values()
    assert not any(secret.encode() in b"".join(kept) for secret in (KEY, SECRET, TOKEN))
