"""Prices on the command line: tables, their age, refreshes, a user's own prices, and secrets."""

import datetime as dt
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from builders.aws_prices import KEY, SECRET, TOKEN, Stubs, address, product, public_file
from builders.runs import ONE_CELL, made_run, spec_of
from fakes.price_server import PriceServer, price_server
from test_sources_gpuhunt_catalogs import COLUMNS

from gpu_catalog.live_prices.sources import aws_api, aws_public
from gpu_catalog.price_table import refreshed_path, write_offers, written_offers
from orchestrator.cli.main import main
from orchestrator.console import ALL_COLUMNS
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.spec.sweep_spec import CatalogRows
from orchestrator.storage.run_storage import StoreError

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # gpuhunt's
ROW = "{gpu: cpu, usd_per_hour: 0.01, instance: mine}"


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty working directory with no data, credentials or cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in list(os.environ):
        if name.startswith(("AWS_", "GPUHUNT_")):
            monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setattr(aws_public, "BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path / "catalogs"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PriceServer]:
    """A server that has Amazon's public files."""
    with price_server() as server:
        monkeypatch.setattr(aws_public, "BASE_URL", server.url)
        yield server


def today() -> dt.date:
    """Today's date in UTC, as the command line takes it."""
    return dt.datetime.now(dt.UTC).date()


def publish_price(server: PriceServer, usd: str, day: dt.date | None = None) -> None:
    """Publish Amazon's price of an instance with an L40S in its first region."""
    row = {"Instance Type": "g6e.xlarge", "PricePerUnit": usd}
    server.pages[address("us-east-1")] = public_file(row, day=str(day or today()))


def test_the_price_table_in_use_and_its_date_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last line names the price table and its date, also for a table given by --prices."""
    assert main(["catalog", "prices"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert all(word in last for word in ("shipped", "2025-04-01"))
    assert main(["catalog", "prices", "--prices", "paper"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert all(word in last for word in ("paper", "2024-08-08"))
    assert {row.split("|")[7].strip() for row in rows[2:-1]} == {"0.79", "1.67", "2.1"}


def test_refreshed_prices_replace_the_shipped_table(
    server: PriceServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The refresh prints the file and the age of its prices; ``shipped`` selects the old table."""
    publish_price(server, "1.2345", today() - dt.timedelta(days=3))
    assert main(["catalog", "refresh", "--source", "aws-public", "--regions", "us-east-1"]) == 0
    said = capsys.readouterr()
    day = today() - dt.timedelta(days=3)
    path, _, counts = said.out.partition(": ")
    assert path == f"{tmp_path}/data/finetune-cost/prices.csv"
    assert counts.startswith("1 new prices")
    assert counts.endswith(f"prices of {day}\n")
    assert said.err == "asking aws-public\n"
    assert main(["catalog", "prices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("g6e.xlarge" in line and "1.234" in line for line in lines)
    assert "refreshed" in lines[-1]
    assert main(["catalog", "prices", "--prices", "shipped"]) == 0
    assert "1.234" not in capsys.readouterr().out


def test_a_refresh_without_any_reply_keeps_the_earlier_prices(
    server: PriceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each failed source has one line, and one more line says that nothing changed."""
    publish_price(server, "1.2345")
    assert main(["catalog", "refresh", "--source", "aws-public", "--regions", "us-east-1"]) == 0
    before = refreshed_path().read_bytes()
    server.pages.clear()
    capsys.readouterr()
    assert main(["catalog", "refresh", "--source", "gpuhunt,aws,aws-public"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[:3] == ["asking gpuhunt", "asking aws-public", "asking aws"]
    assert lines[3].startswith("gpuhunt: ")
    assert lines[4].startswith("aws-public: us-east-1: ")
    assert "1 prices are kept" in lines[4]
    assert lines[5].startswith("aws: no credentials: ")
    assert len(lines) == 7
    assert lines[6].startswith("no new prices. Still in use: those of 20")
    assert refreshed_path().read_bytes() == before


def test_rejected_prices_are_listed_on_stderr_and_beyond_twenty_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each rejected price is one line on stderr; beyond twenty, a file lists them all."""
    folder = tmp_path / "catalogs"
    folder.mkdir()
    rows = ["NVIDIA L40S,moon,1.5,8,32,1,L40S,48.0,False,,nvidia,,x86,{}"]
    rows += [
        f"NVIDIA L40S,r{number},0.0,8,32,1,L40S,48.0,True,,nvidia,,x86,{{}}" for number in range(3)
    ]
    rows += ["AMD Instinct MI250X,moon,2.49,24,283,1,MI250X,128.0,False,,amd,,x86,{}"]
    file = folder / "runpod.csv"
    file.write_text("\n".join([COLUMNS, *rows]), encoding="utf-8")
    assert main(["catalog", "refresh", "--source", "gpuhunt"]) == 0
    err = capsys.readouterr().err
    assert err.count(": rejected: spot price 0") == 3
    assert "MI250X 1\n" in err
    rows += [row.replace(",r0,", f",q{number},") for number in range(30) for row in rows[1:2]]
    file.write_text("\n".join([COLUMNS, *rows]), encoding="utf-8")
    assert main(["catalog", "refresh", "--source", "gpuhunt"]) == 0
    err = capsys.readouterr().err
    assert err.count(": rejected: ") == 20
    listed = tmp_path / "data" / "finetune-cost" / "prices-rejected.txt"
    assert f"13 more are rejected: {listed} lists all 33" in err
    assert len(listed.read_text(encoding="utf-8").splitlines()) == 33


def test_a_refresh_can_be_written_to_another_file(
    server: PriceServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Prices written by --out are used only where --prices names the file."""
    publish_price(server, "1.2345")
    options = ["--source", "aws-public", "--regions", "us-east-1", "--out", "mine.csv"]
    assert main(["catalog", "refresh", *options]) == 0
    assert "--prices mine.csv" in capsys.readouterr().out
    assert not refreshed_path().exists()
    assert [o.usd_per_hour for o in written_offers(tmp_path / "mine.csv")] == [1.2345]
    assert main(["catalog", "prices", "--prices", "mine.csv"]) == 0
    assert "and mine.csv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["refresh", "--source", "gpuhnt"], "--source 'gpuhnt': no such source: did you mean 'gpu"),
        (
            ["refresh", "--source", ","],
            "--source names no source: take gpuhunt, runpod-community, vast",
        ),
        (["prices", "--prices", "papre"], "--prices papre: no such file or price table: "),
        (
            ["prices", "--prices", "paper", "--prices", "shipped"],
            "--prices paper and shipped: give only one",
        ),
        (["prices", "--prices", "refreshed"], "no prices yet: run 'catalog refresh'"),
        (["gpus", "--catalog", "none.yaml"], "none.yaml: no such file"),
        (["refresh", "--source", "gpuhunt", "--out", "/proc/x/y.csv"], "GPUHUNT_CATALOG_DIR"),
    ],
)
def test_an_error_is_a_line_on_stderr_with_code_1(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong source, table or file gives one message on stderr and nothing on stdout."""
    assert main(["catalog", *arguments]) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


@pytest.mark.parametrize("part", ["gpus", "prices"])
def test_wide_is_taken_on_either_side_of_the_part(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both print all columns; without it, a narrow terminal hides some and names the option."""
    shown: list[bool] = []
    for module in ("gpus", "prices"):
        command = f"orchestrator.cli.commands.catalog.run_{module}"
        monkeypatch.setattr(command, lambda _: shown.append(ALL_COLUMNS.get()) or 0)
    for arguments in (["--wide", part], [part, "--wide"], [part]):
        assert main(["catalog", *arguments]) == 0
    assert shown == [True, True, False]


def test_the_word_that_was_typed_is_never_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    """Options of a part are near matches, but not one that stands before it."""
    for arguments in (["--prices=shipped", "gpus"], ["gpus", "--pricse=shipped"]):
        with pytest.raises(SystemExit):
            main(["catalog", *arguments])
    before, misspelt = capsys.readouterr().err.splitlines()
    assert before.endswith(
        "catalog gpus: unrecognized arguments: --prices=shipped (--help lists every option)"
    )
    assert "--pricse=shipped: did you mean '--prices'?" in misspelt


def test_a_users_own_gpus_are_listed_with_the_shipped_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A user's catalog file is validated as the shipped data is."""
    text = (
        "gpus:\n  - {key: A30, kind: cuda, device_names: [NVIDIA A30], source: me, "
        "recorded: 2026-11-20}\noffers:\n  - {gpu: A30, usd_per_hour: 0.3}\n"
    )
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert main(["catalog", "gpus", "--catalog", "mine.yaml"]) == 0
    assert "NVIDIA A30 " in capsys.readouterr().out
    assert main(["catalog", "prices", "--catalog", "mine.yaml"]) == 0
    assert "| A30 " in capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(text.replace("0.3", "0"), encoding="utf-8")
    assert main(["catalog", "prices", "--catalog", "mine.yaml"]) == 1
    assert capsys.readouterr().err.startswith("mine.yaml:4: offers[0]")


def test_a_run_is_ranked_again_with_a_users_own_prices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nothing is measured; a price file replaces or extends the shipped offers."""
    made_run(tmp_path / "run")
    (tmp_path / "own.yaml").write_text(f"- {ROW}\n", encoding="utf-8")
    for command in ("rank", "report"):
        assert main([command, "run", "--prices", "own.yaml"]) == 0
        said = capsys.readouterr()
        assert "own mine" in said.out
        assert "own.yaml" in said.err
        ranking = json.loads((tmp_path / "run" / "ranking.json").read_text(encoding="utf-8"))
        assert len(ranking["offers"]) == 3
    assert main(["rank", "run"]) == 0
    assert "own mine" not in capsys.readouterr().out
    assert main(["rank", "run", "--prices", "paper"]) == 1
    assert "no offer for cpu" in capsys.readouterr().out


def test_a_run_is_ranked_by_refreshed_prices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The shipped prices of CPUs are kept beside refreshed GPU prices."""
    made_run(tmp_path / "run")
    assert main(["rank", "run"]) == 0
    shipped = (tmp_path / "run" / "ranking.csv").read_text(encoding="utf-8")
    offer = next(o for o in written_offers(_some_table(tmp_path)) if o.provider == "aws")
    write_offers(refreshed_path(), [offer])
    capsys.readouterr()
    assert main(["rank", "run"]) == 0
    assert "refreshed" in capsys.readouterr().err
    assert (tmp_path / "run" / "ranking.csv").read_text(encoding="utf-8") == shipped


def _some_table(folder: Path) -> Path:
    path = folder / "table.csv"
    head = "gpu,provider,region,instance,usd_per_hour,recorded,source"
    row = f"L40S,aws,us-east-1,g6e.xlarge,1.5,{today()},aws: a test"
    path.write_text(f"{head}\n{row}\n", encoding="utf-8")
    return path


OWN_GPU = """\
gpus:
  - {key: mine, kind: cpu, usable_memory_bytes: 50331648, source: me, recorded: 2026-11-20}
offers:
  - {gpu: mine, usd_per_hour: 0.02}
"""


def test_a_sweep_accepts_a_gpu_from_a_users_catalog(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without --catalog the GPU is unknown; with it the plan contains its trial."""
    (tmp_path / "own.yaml").write_text(OWN_GPU, encoding="utf-8")
    spec = ONE_CELL.replace("[cpu]", "[mine]")
    (tmp_path / "my.yaml").write_text(spec, encoding="utf-8")
    assert main(["sweep", "my.yaml", "--dry-run"]) == 1
    assert "unknown GPU 'mine'" in capsys.readouterr().err
    assert main(["sweep", "my.yaml", "--dry-run", "--catalog", "own.yaml"]) == 0
    said = capsys.readouterr()
    assert "mine/llama-tiny/full-fp32/dense/seq16" in said.out
    assert said.err == ""


def test_the_run_folder_holds_the_rows_of_the_users_file(tmp_path: Path) -> None:
    """The run folder keeps the user's catalog rows; a changed row is an error."""
    rows = CatalogRows.model_validate(
        {
            "gpus": [
                {"key": "mine", "kind": "cpu", "usable_memory_bytes": 9 * 2**20}
                | {"source": "me", "recorded": "2026-11-20"}
            ]
        }
    )
    base = spec_of().merged_catalog().merged(rows.gpus)
    text = ONE_CELL
    run = open_run(tmp_path / "run", text, spec_of(), rows)
    assert run.catalog_rows() == rows
    assert run.spec().merged_catalog().gpu("mine").usable_memory_bytes == 9 * 2**20
    assert run.spec(base).merged_catalog().gpus == base.gpus
    other = rows.model_copy(
        update={"gpus": (rows.gpus[0].model_copy(update={"usable_memory_bytes": 2**20}),)}
    )
    with pytest.raises(StoreError, match="--catalog has changed mine"):
        open_run(tmp_path / "run", text, run.spec(), other)
    assert open_run(tmp_path / "run", text, run.spec()).catalog_rows() == rows
    (tmp_path / "run" / "catalog.json").write_text("{}]", encoding="utf-8")
    with pytest.raises(StoreError, match="not rows of a catalog"):
        RunFolder(tmp_path / "run").spec()


def test_no_credential_reaches_a_log_or_a_file(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """No reply or error of Amazon carries a credential into output, logs or files."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_SESSION_TOKEN", TOKEN),
        ("SEEWEB_API_TOKEN", SECRET),
    ):
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO)
    stubs = Stubs()
    pricing = stubs.stubber("pricing")
    pricing.add_client_error("get_products", "SignatureDoesNotMatch", f"{KEY} {SECRET} {TOKEN}")
    pages = [product("g6e.xlarge", "us-east-1", "1.861")]
    pricing.add_response("get_products", {"FormatVersion": "aws_v1", "PriceList": pages})
    stubs.stubber("ec2").add_client_error(
        "describe_regions", "AuthFailure", f"{KEY} {SECRET} {TOKEN}"
    )
    monkeypatch.setattr(aws_api.AwsApi.__init__, "__defaults__", ((), stubs.client))
    assert main(["catalog", "refresh", "--source", "gpuhunt,aws,aws-public"]) == 1
    assert main(["catalog", "refresh", "--source", "aws"]) == 0
    assert main(["catalog", "prices"]) == 0
    stubs.all_were_asked()
    said = capfd.readouterr()
    texts = [said.out, said.err, caplog.text]
    texts += [p.read_text(encoding="utf-8") for p in tmp_path.rglob("*") if p.is_file()]
    assert "SignatureDoesNotMatch" in said.err
    assert "AuthFailure" in said.err
    assert any("g6e.xlarge" in text for text in texts)
    assert not [text for text in texts for secret in (KEY, SECRET, TOKEN) if secret in text]
    assert socket.getdefaulttimeout() is None
