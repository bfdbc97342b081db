"""Cluster files that `deploy` makes, their bills, and requests that cannot be met."""

import re
from pathlib import Path

import pytest
from builders.clusters import (
    SHIPPED,
    deployment_of,
    deployment_on,
    shipped,
)

from orchestrator.cli.main import main
from orchestrator.clouds.deployment import DeployError
from orchestrator.clouds.deployment_request import DeploymentRequest


def without_minutes(text: str) -> str:
    """The text without the assumed times of the sweep, which other modules decide."""
    return re.sub(r"#   the sweep: .*?\)\n#\n", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("file", SHIPPED)
def test_a_shipped_file_is_what_the_command_makes(file: str) -> None:
    """After a change of templates or prices, run the command in its first line with --out."""
    name, request = SHIPPED[file]
    assert without_minutes(shipped(file)) == without_minutes(deployment_of(name, request).text)
    command = shipped(file).splitlines()[0].partition(" -m orchestrator ")[2]
    assert command == f"deploy {name} {request.words}"


def test_the_bill_is_an_upper_bound() -> None:
    """On-demand prices bound it; the sweep's own cost is marked as assumed."""
    bill = deployment_on("L4", "L40S", request=DeploymentRequest("aws", nodes_each=2)).bill
    prices = [line.split() for line in bill if line.startswith("  L4")]
    assert ["L4:", "g6.xlarge", "spot", "price", "unknown"] in prices
    assert ["L40S:", "g6e.xlarge", "on-demand", "1.861", "(as", "of", "2026-02-01)"] in prices
    # Four nodes at most, and both kinds of L40S may be those.
    (total,) = (line for line in bill if line.startswith("at most "))
    assert f"${4 * 1.861 + 0.12172:.2f} per hour with 4 nodes" in total
    assert "2 trials" in bill[-1]
    assert "assumed" in bill[-1]


def test_a_bill_with_a_price_missing_is_no_upper_bound() -> None:
    """It names the missing prices and the command that fetches them."""
    request = DeploymentRequest("gcp", region="europe-west4")
    bill = deployment_on("A100-40GB-SXM", "H100-SXM", request=request).bill
    total = next(line for line in bill if line.startswith("at least $1.69 "))
    assert "A100-40GB-SXM, H100-SXM" in total
    assert "'catalog refresh'" in total
    assert "unknown" in bill[-1]


OWN = """\
catalog:
  gpus: [{key: desk, kind: cpu, usable_memory_bytes: 16000000, source: x, recorded: 2026-11-20}]
"""


@pytest.mark.parametrize(
    ("gpus", "wanted", "line"),
    [
        (
            ["A40"],
            DeploymentRequest("aws"),
            "A40: aws does not offer it; elsewhere: runpod, cudo\nsmall.yaml",
        ),
        (
            ["desk"],
            DeploymentRequest("local"),
            "desk: excluded: join-check",
        ),
        (["L4"], DeploymentRequest("aws", hosts=("a", "b")), "--hosts needs --provider local"),
        (
            ["L4"],
            DeploymentRequest("local", hosts=("a",)),
            "--hosts: one host: give HEAD,HOST",
        ),
        (["L4"], DeploymentRequest("local", hosts=("a", "b]")), "'b]' is neither a host"),
        (
            ["L4"],
            DeploymentRequest("local", spot=True),
            "--region, --spot and --no-spot need a cloud",
        ),
        (["L4"], DeploymentRequest("aws", region="us east"), "'us east' is neither a host"),
        (["L4"], DeploymentRequest("aws", job=True), "--job needs --provider kuberay"),
        (
            ["L4"],
            DeploymentRequest("gcp", cache_claim="x"),
            "--cache-claim needs --provider kuberay",
        ),
        (
            ["L4"],
            DeploymentRequest("kuberay", cache_claim="a: b"),
            "--cache-claim: 'a: b' is no name",
        ),
        (
            ["L4"],
            DeploymentRequest("kuberay", cache_claim="weights"),
            "--cache-claim: no cell of small.yaml has weights: pretrained",
        ),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(
    gpus: list[str], wanted: DeploymentRequest, line: str
) -> None:
    """Every mistake has a line of its own."""
    with pytest.raises(DeployError) as error:
        deployment_on(*gpus, request=wanted, more=OWN if "desk" in gpus else "")
    assert str(error.value).startswith(line)


def test_the_command_writes_the_file_and_prints_the_bill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file goes to --out or stdout; exclusions and the bill go to stderr."""
    out = tmp_path / "aws.yaml"
    arguments = ["deploy", "paper", "--provider", "aws", "--prices", "shipped"]
    assert main([*arguments, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "A40: aws " in shown.err
    assert "$7.00 per hour" in shown.err
    (options,) = (line for line in shown.err.splitlines() if "--providers" in line)
    assert "paper --providers aws" in options
    assert "--regions us-" in options
    assert main(arguments) == 0
    assert capsys.readouterr().out == out.read_text(encoding="utf-8")
    assert main([*arguments, "--out", str(tmp_path / "no" / "aws.yaml")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
