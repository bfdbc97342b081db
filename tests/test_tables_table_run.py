"""A CSV of measurements where a run folder is expected: ``rank``, ``what-if`` and ``calibrate``."""

import json
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from gpu_catalog.errors import UserError
from orchestrator.cli.main import main
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.tables.table_or_run import run_of

HEAD = "gpu,model,method,seq_len,batch_size,examples_per_second,gradient_checkpointing\n"
ROWS = (
    ("A40", 2, 40.0),
    ("A40", 4, 64.0),
    ("A40", 8, 80.0),
    ("A40", 8, 81.0),
    ("H100-SXM", 8, 320.0),
)
TABLE = HEAD + "".join(f"{gpu},llama-tiny,full,128,{size},{rate},off\n" for gpu, size, rate in ROWS)
# A job that is nothing but its steps.
AT_ONCE = (
    *("--startup-minutes", "0", "--checkpoint-seconds", "0", "--interruptions-per-day", "0"),
    *("--price-drift", "0", "--spot-price-drift", "0"),
)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(TABLE, encoding="utf-8")
    return Path("mine.csv")


def ranked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The cheapest offer of each GPU in a ranking."""
    assert main([*arguments, "--json"]) == 0
    offers = json.loads(capsys.readouterr().out)["offers"]
    return {offer["cell"]["gpu"]: offer for offer in reversed(offers)}


@pytest.mark.parametrize("command", ["rank", "what-if"])
def test_a_job_is_priced_at_the_speeds_of_the_table(
    command: str, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours are examples over examples per second, at the fastest batch size of each GPU."""
    job = ("--examples", "8000", "--epochs", "10", *AT_ONCE)
    offers = ranked(capsys, command, str(table), *job)
    assert offers["H100-SXM"]["hours"] == pytest.approx(80_000 / 320 / 3600)
    assert offers["A40"]["hours"] == pytest.approx(80_000 / 80.5 / 3600, rel=1e-3)
    assert {o["basis"] for o in offers.values()} == {"measured"}
    assert {(o["batch_size"], o["largest_batch"]) for o in offers.values()} == {(8, None)}


def test_the_recipe_is_that_of_the_columns(table: Path) -> None:
    """Fields without a column have TRL's defaults; the memory is absent."""
    observations = RunFolder(run_of(table)).observations()
    recipes = {o.cell.recipe for o in observations}
    (recipe,) = recipes
    assert (recipe.method, recipe.precision, recipe.loss) == ("full", "bf16-mixed", "chunked")
    assert not recipe.gradient_checkpointing
    assert [o.repeat for o in observations] == [0, 0, 0, 1, 0]
    assert {o.memory for o in observations} == {None}
    seconds = [o.measurement.step_seconds[0] for o in observations if o.measurement]
    assert seconds == pytest.approx([size / rate for _, size, rate in ROWS])


@pytest.mark.parametrize("command", ["fit", "status", "report", "export --format ado"])
def test_other_commands_take_the_folder(command: str, table: Path) -> None:
    """Although no memory was measured."""
    name, *options = command.split()
    assert main([name, str(run_of(table)), *options]) == 0


def test_the_folder_follows_the_table(table: Path) -> None:
    """It is written anew; another run of that name stays."""
    run_of(table)
    table.write_text(TABLE.replace("320.0", "300.0"), encoding="utf-8")
    ranking = orchestrator.rank(table, examples=3000, epochs=1, startup_minutes=0)
    assert len(RunFolder("mine.run").observations()) == len(ROWS)
    rates = {o.cell.gpu: o.examples_per_second for o in ranking.offers}
    assert rates["H100-SXM"] == pytest.approx(300)
    Path("mine.run/sweep.yaml").write_text("name: other\n", encoding="utf-8")
    with pytest.raises(UserError, match="another run"):
        run_of(table)


def test_mistakes_are_reported_at_once_by_line(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown models and recipes beside what ``fit`` reports."""
    rows = (
        "A40,lama-tiny,full,128,4,1,on",
        "A40,llama-tiny,fully,128,4,1,on",
        "A40,llama-tiny,,128,4,1,on",
        "A40,llama-tiny,full,128,4,x,on",
        "A40,llama-tiny,full,128,4,1,perhaps",
        "A41,llama-tiny,full,128,4,1,on",
    )
    table.write_text(HEAD + "\n".join(rows), encoding="utf-8")
    assert main(["rank", str(table)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in lines] == ["2", "3", "4", "5", "6"]
    assert not Path("mine.run").exists()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (TABLE.replace("method", "way").replace("full", "x"), "method"),
        (TABLE.replace("A40", "A41").replace("H100-SXM", "H200-SXM-2"), "catalog"),
    ],
)
def test_a_table_without_a_usable_row_is_refused(text: str, word: str, table: Path) -> None:
    """No column of the recipe, or no GPU of the catalog."""
    table.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=word):
        run_of(table)


@pytest.mark.parametrize(("share", "active"), [("", 2), (",0.25", 2), (",1", 8)])
def test_sparsity_gives_the_active_experts(share: str, active: int, table: Path) -> None:
    """Without the column they are the model's own."""
    head = "gpu,model,method,seq_len,batch_size,examples_per_second" + ",sparsity" * bool(share)
    table.write_text(f"{head}\nA40,mixtral-tiny,lora,128,4,9{share}\n", encoding="utf-8")
    (observation,) = RunFolder(run_of(table)).observations()
    assert (observation.cell.experts, observation.cell.active_experts) == (8, active)


@pytest.mark.long
def test_calibrated_constants_predict_the_measured_steps(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flow: table, ``calibrate``, ``estimate --constants``, where steps take three times."""
    recipe = ("--method", "full", "--gradient-checkpointing", "off", "--gradient-accumulation", "1")
    job = ("estimate", "--model", "llama-tiny", "--seq-len", "128", *recipe, "--gpu", "A40")

    def seconds(size: int, *more: str) -> float:
        assert main([*job, "--batch-size", str(size), "--json", *more]) == 0
        return float(json.loads(capsys.readouterr().out)["step_seconds"])

    before = {size: seconds(size) for size in (4, 8)}
    rows = (f"A40,llama-tiny,full,128,{b},{b / s / 3},off" for b, s in before.items())
    table.write_text(HEAD + "\n".join(rows), encoding="utf-8")
    assert main(["calibrate", str(table), "--out", "constants.json"]) == 0
    capsys.readouterr()
    after = seconds(8, "--constants", "constants.json")
    assert after == pytest.approx(3 * before[8], rel=0.1)
