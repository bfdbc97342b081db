"""Snapshots of prices: written, chosen by date, and read as the course of a GPU's price."""

import datetime as dt
import re
from pathlib import Path

import pytest
import yaml
from builders.price_rows import offer
from builders.runs import made_run
from fakes.s3_server import BUCKET, S3Server

from gpu_catalog.catalog import CatalogError, load_catalog
from orchestrator.cli.main import main
from orchestrator.cli.options.clock import today
from orchestrator.cli.parsers.program import build_parser
from orchestrator.pricing.catalog_file import read_price_file
from orchestrator.pricing.price_history import (
    price_courses,
    snapshot_of,
    snapshot_offers,
    sparkline,
    write_snapshot,
)
from orchestrator.pricing.prices_in_use import prices_in_use
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.storage.run_storage import run_path

FIRST, SECOND = dt.date(2026, 10, 1), dt.date(2026, 11, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two snapshots: a GPU that became dearer, by its cheaper of two offers, and a newcomer."""
    dear = offer(provider="dear", usd_per_hour=8, gpus_per_instance=2)
    write_snapshot(tmp_path, [offer(usd_per_hour=1), dear], FIRST)
    later = [offer(usd_per_hour=1.5), dear, offer(gpu="B300", market="spot", usd_per_hour=2)]
    write_snapshot(tmp_path, later, SECOND)
    (tmp_path / "prices-last.csv").write_text("not a snapshot", encoding="utf-8")
    return tmp_path


def test_the_course_of_a_gpu_is_its_lowest_price_in_each_snapshot(folder: Path) -> None:
    """Instances of several GPUs count per GPU; markets are apart."""
    newcomer, dearer = price_courses(folder)
    assert (newcomer.gpu, newcomer.market, newcomer.points) == ("B300", "spot", ((SECOND, 2.0),))
    assert dearer.points == ((FIRST, 1.0), (SECOND, 1.5))
    assert dearer.change == pytest.approx(0.5)
    assert price_courses(folder, ["B300"]) == [newcomer]


def test_the_snapshot_of_a_date_is_the_last_until_then(folder: Path) -> None:
    """Before the first there is none; without a date it is the last."""
    assert snapshot_of(folder, dt.date(2026, 10, 31)) == "prices-2026-10-01.csv"
    assert snapshot_of(folder, SECOND) == snapshot_of(folder, None)
    with pytest.raises(CatalogError, match="2026-10-01"):
        snapshot_of(folder, dt.date(2026, 9, 30))


def test_history_draws_the_course_of_each_price(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its first to its last price, with its change."""
    assert main(["catalog", "history", str(folder)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[part.strip() for part in row.strip("|").split("|")] for row in rows]
    courses = {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}
    assert courses["L40S"]["course"] == "▁█"
    assert courses["B300"]["course"] == "▁"
    assert "50" in courses["L40S"]["change"]


def test_a_run_is_ranked_at_the_prices_of_a_date(tmp_path: Path) -> None:
    """``rank --as-of`` takes the last snapshot until then, and ``rank`` alone the last of all."""
    made_run(tmp_path / "run")
    snapshots = tmp_path / "prices"
    for date, usd in ((FIRST, 1.0), (SECOND, 3.0)):
        write_snapshot(snapshots, [offer(gpu="cpu", usd_per_hour=usd)], date)
    for options, usd in ((["--as-of", "2026-10-31"], 1.0), ([], 3.0)):
        command = ["rank", str(tmp_path / "run"), "--prices", str(snapshots), *options]
        assert main(command) == 0
        ranking = Ranking.model_validate_json((tmp_path / "run" / "ranking.json").read_bytes())
        assert {row.usd_per_hour for row in ranking.offers} == {usd}


def test_prices_in_use_are_those_of_the_date(folder: Path) -> None:
    """Only what the snapshot has is offered; a date alone is refused."""
    then = prices_in_use([str(folder)], as_of=FIRST).catalog
    assert [o.usd_per_hour for o in then.offers("L40S")] == [1, 8]
    assert [o.usd_per_hour for o in prices_in_use([str(folder)]).catalog.offers("B300")] == [2]
    assert then.offers("A40") == []
    with pytest.raises(CatalogError, match="--prices"):
        prices_in_use(as_of=FIRST)


def test_a_folder_without_snapshots_or_with_an_impossible_date_says_so(tmp_path: Path) -> None:
    """The message names the command, or the file."""
    with pytest.raises(CatalogError, match="catalog snapshot"):
        price_courses(tmp_path)
    (tmp_path / "prices-2026-13-01.csv").touch()
    with pytest.raises(CatalogError, match="2026-13-01"):
        price_courses(tmp_path)


def test_snapshots_in_a_bucket_are_read_as_those_in_a_folder(
    server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """``snapshot``, ``history``, ``--prices`` and ``--as-of`` take an address in a bucket."""
    bucket = run_path(f"s3://{BUCKET}/prices")
    write_snapshot(bucket, [offer(usd_per_hour=1)], FIRST)
    assert main(["catalog", "snapshot", "--prices", "paper", "--out", str(bucket)]) == 0
    assert f"{bucket}/prices-{today()}.csv" in capsys.readouterr().out
    assert sorted(server.objects("prices/")) == [f"prices-{FIRST}.csv", f"prices-{today()}.csv"]
    assert [course.gpu for course in price_courses(bucket, ["L40S"])] == ["L40S"]
    assert main(["catalog", "history", str(bucket), "--gpu", "A40"]) == 0
    assert "0.79" in capsys.readouterr().out
    assert main(["catalog", "prices", "--prices", str(bucket), "--as-of", str(FIRST)]) == 0
    assert f"prices-{FIRST}.csv" in capsys.readouterr().out
    assert main(["catalog", "history", f"s3://{BUCKET}/none"]) == 1
    assert "no snapshots" in capsys.readouterr().err


def test_a_sparkline_spans_from_the_lowest_to_the_highest() -> None:
    """Equal prices have no height."""
    assert sparkline([1, 2, 8]) == "▁▂█"
    assert sparkline([3, 3]) == "▁▁"


def test_a_snapshot_is_written_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped prices go into a file of today, which history reads."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert main(["catalog", "snapshot", "--prices", "shipped", "--out", str(tmp_path / "s")]) == 0
    [written] = (tmp_path / "s").glob("prices-*.csv")
    assert written.name in capsys.readouterr().out
    assert main(["catalog", "history", str(tmp_path / "s"), "--gpu", "B300"]) == 0
    out = capsys.readouterr().out
    assert "3.75" in out
    assert "6.94" in out
    assert main(["catalog", "history", str(tmp_path / "s"), "--gpu", "H9000"]) == 1
    assert "H9000" in capsys.readouterr().err
    arguments = ["catalog", "prices", "--prices", str(tmp_path / "s"), "--as-of", "2020-01-01"]
    assert main(arguments) == 1
    assert "2020-01-01" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["price-snapshots-cronjob.yaml", "price-snapshots-github.yaml"])
def test_a_nightly_job_runs_commands_that_exist(file: str) -> None:
    """Their options are parsed as the program's own."""
    text = (Path(__file__).parent.parent / "deploy" / file).read_text(encoding="utf-8")
    assert all(isinstance(part, dict) for part in yaml.safe_load_all(text))
    commands = re.findall(r"(?:finetune-cost|python -m orchestrator) (catalog [^&\n]+)", text)
    assert [command.split()[:2] for command in commands] == [
        ["catalog", "refresh"],
        ["catalog", "snapshot"],
    ]
    for command in commands:
        build_parser().parse_args(command.split())


def test_the_cron_job_forbids_a_second_one_and_has_no_token() -> None:
    """A slow source must not pile jobs up, and a snapshot needs nothing of the cluster."""
    text = (Path(__file__).parent.parent / "deploy" / "price-snapshots-cronjob.yaml").read_text()
    [_, job] = yaml.safe_load_all(text)
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    assert pod["automountServiceAccountToken"] is False
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/prices"


def test_a_formula_in_a_price_is_text_in_the_snapshot_and_read_as_it_was(tmp_path: Path) -> None:
    """Providers and services that collect prices write these texts."""
    evil = offer(source="=cmd|'/C calc'!A0", note="-1+1")
    other = offer(source="'=1", note="@SUM(1)", region="mars")
    file = write_snapshot(tmp_path, [evil, other], FIRST)
    assert isinstance(file, Path)
    for row in file.read_text(encoding="utf-8").splitlines()[1:]:
        assert not {cell[0] for cell in row.split(",") if cell} & set("=+-@")
    assert snapshot_offers(tmp_path, file.name) == [evil, other]
    assert read_price_file(file, load_catalog()) == (evil, other)
