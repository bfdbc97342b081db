"""The command line as a user meets it: output streams, exit codes, and no leftover files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders.runs import ONE_CELL, TWO_CELLS, made_run, spec_of

from orchestrator.cli.main import build_parser, main
from orchestrator.planning.plan import Plan, Skip
from orchestrator.run_folder.run_folder import open_run

HERE = Path(__file__).parent.parent
# As a user's shell has it, whatever the tests are run under.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name != "PYTHONUNBUFFERED" and not name.startswith("RAY_")
} | {"PYTHONPATH": str(HERE)}


def orchestrate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty working directory without a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


def files_in(tmp_path: Path) -> list[str]:
    """Relative paths of everything in the working directory."""
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


def test_an_unusable_logging_tool_is_an_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow has no address; TensorBoard cannot write to a bucket."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["sweep", "--log-to", "mlflow"]) == 1
    assert capsys.readouterr().err.startswith("--log-to mlflow")
    assert main(["sweep", "--out", "s3://bucket/run", "--log-to", "tensorboard"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("s3://bucket/run: ")
    assert "--log-to" in message
    assert files_in(tmp_path) == []


def test_planning_fitting_and_ranking_need_neither_torch_nor_ray(tmp_path: Path) -> None:
    """A dry run and every command on an existing run work without torch and Ray."""
    made_run(tmp_path / "run")
    program = """\
import sys
from orchestrator.cli.main import main
for command in (["sweep", "--dry-run"], *([name, "run"] for name in sys.argv[1:])):
    assert main(command) == 0
print("imported:", sorted({"torch", "transformers", "ray"} & set(sys.modules)))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, "status", "fit", "rank", "report"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.endswith("imported: []\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["swep"], "invalid choice: 'swep'"),
        (["catalog"], "arguments are required: {gpus,prices,refresh,snapshot,history}"),
        (["catalog", "models"], "invalid choice: 'models'"),
        (["rank"], "the following arguments are required: RUN"),
        (["rank", "run", "--examples", "many"], "must be a whole number, not 'many'"),
        (["rank", "run", "--epochs", "0"], "must be at least 1, not 0"),
        (["rank", "run", "--batch-size", "-1"], "must be at least 1, not -1"),
        (["sweep", "--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_usage_is_reported_on_stderr_with_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Wrong usage ends the command before it does anything."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    said = capsys.readouterr()
    assert exit_.value.code == 2
    assert words in said.err
    assert said.out == ""
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep", "none.yaml"], "none.yaml: no such file or shipped sweep"),
        (["sweep", "wrong.yaml"], "wrong.yaml:2: gpus[0]: unknown GPU 'A4O'"),
        (["sweep", "wrong.yaml", "--dry-run"], "wrong.yaml:6: cells[0].seq_lens[0]: must be"),
        (["sweep", "--out", "gs://bucket/run"], "gs://bucket/run: is not a run folder"),
        (
            ["status", "s3://"],
            "'s3://': is not a run folder in a bucket: give s3://BUCKET/FOLDER\n",
        ),
        (["fit", "s3://key:secret@bucket/run"], "s3://…@…: names more than a bucket: give s3://"),
        (["sweep", "--out", "wrong.yaml"], "wrong.yaml: is a file, or below one: give a folder\n"),
        (["sweep", "--out", "other"], "other: holds 'notes' but no run: choose another --out\n"),
        (["sweep", "--resume"], "--resume takes the run folder and no specification: "),
        (["sweep", "x.yaml", "--resume", "--out", "run"], "--resume takes the run folder and no "),
        (["sweep", "--resume", "--out", "none"], "none: no such run folder"),
        (["status", "none"], "none: no such run folder ('sweep --out none' creates it)\n"),
        (["fit", "other"], "other: not a run folder: it has no sweep.yaml\n"),
        (["rank", "wrong.yaml"], "wrong.yaml: is a file, or below one: give a folder\n"),
        (["report", "other"], "other: not a run folder: it has no sweep.yaml\n"),
    ],
)
def test_a_user_error_is_reported_on_stderr_with_code_1_and_nothing_is_created(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A missing or wrong specification or an unusable folder is reported on stderr."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine", encoding="utf-8")
    wrong = ONE_CELL.replace("[cpu]", "[A4O]").replace("[16]", "[0]")
    (tmp_path / "wrong.yaml").write_text(wrong, encoding="utf-8")
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""
    assert files_in(tmp_path) == ["other", "other/notes", "wrong.yaml"]


def test_error_of_a_process_is_its_message_alone(tmp_path: Path) -> None:
    """A failing process prints one line without a traceback and exits with 1."""
    ended = orchestrate("sweep", "none.yaml", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("none.yaml: no such file")
    assert ended.stderr.count("\n") == 1


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    """The plan lists skipped trials with the reason."""
    text = TWO_CELLS.replace("[cpu]", "[cpu, A40]")
    (tmp_path / "two.yaml").write_text(text, encoding="utf-8")
    ended = orchestrate("sweep", "two.yaml", "--dry-run", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in ended.stdout.splitlines()]
    assert rows[0] == ["trial", "plan", "why"]
    assert rows[2:4] == [
        [f"cpu/llama-tiny/full-fp32/dense/seq{length}", "to measure", ""] for length in (16, 32)
    ]
    assert [row[:2] for row in rows[4:6]] == [
        [f"A40/llama-tiny/full-fp32/dense/seq{length}", "skipped"] for length in (16, 32)
    ]
    assert "on this machine has no A40" in rows[4][2]
    last = ended.stdout.splitlines()[-1]
    assert re.findall(r"\d+", last) == ["2", "0", "2"]
    assert files_in(tmp_path) == ["two.yaml"]


def test_dry_run_on_an_existing_run_counts_finished_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run leaves an existing run unchanged, with a specification and with --resume."""
    run = made_run(tmp_path / "run", TWO_CELLS)
    (tmp_path / "two.yaml").write_text(TWO_CELLS, encoding="utf-8")
    before = files_in(tmp_path)
    for arguments in (["two.yaml"], ["--resume"]):
        assert main(["sweep", *arguments, "--out", "run", "--dry-run"]) == 0
        assert "1 to measure, 1 done" in capsys.readouterr().out
    assert files_in(tmp_path) == before
    assert run.plan() is None


def test_finished_run_is_not_measured_again_but_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run is ranked without starting Ray."""
    made_run(tmp_path / "run")
    assert main(["sweep", "--resume", "--out", "run"]) == 0
    said = capsys.readouterr()
    assert "nothing left to measure" in said.err
    assert "800" in said.out
    ray = sys.modules.get("ray")  # another file of tests may have imported it
    assert ray is None or not ray.is_initialized()
    assert files_in(tmp_path)[1:] == [
        f"run/{name}"
        for name in (
            "fits.json",
            "models.json",
            "observations.jsonl",
            "plan.json",
            "ranking.csv",
            "ranking.json",
            "report.html",
            "report.md",
            "sweep.yaml",
        )
    ]


def test_a_run_whose_model_folder_was_deleted_can_be_read_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run folder keeps the model's configuration, so every command still works."""
    config = {"model_type": "llama", "vocab_size": 8, "num_attention_heads": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made_run(tmp_path / "run", ONE_CELL.replace("llama-tiny", "./mine"))
    (tmp_path / "mine" / "config.json").unlink()
    for command in ("status", "fit", "rank", "report"):
        assert main([command, "run"]) == 0
    capsys.readouterr()
    assert main(["sweep", "--resume", "--out", "run", "--dry-run"]) == 0
    assert "0 to measure, 1 done" in capsys.readouterr().out
    assert main(["sweep", "--resume", "--out", "run"]) == 0
    assert "nothing left to measure" in capsys.readouterr().err


def test_a_trial_waiting_on_a_cluster_stays_waiting_on_a_machine_without_its_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan of the sweep's driver counts, not the GPUs of the machine that shows the status."""
    spec = spec_of(TWO_CELLS.replace("[cpu]", "[A40]"))
    run = open_run(tmp_path / "run", TWO_CELLS.replace("[cpu]", "[A40]"), spec)
    first, second = spec.all_cells()
    skip = Skip(cell=second, reason="flash_attn cannot be imported")
    run.write("plan.json", Plan(complete=(), pending=(first,), skipped=(skip,)))
    assert main(["status", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:4]] == ["waiting", "skipped"]
    assert main(["report", "run"]) == 0
    said = capsys.readouterr().out
    assert skip.reason in said
    assert "no node of the cluster" not in said


@pytest.mark.parametrize("what", ["gpus", "prices"])
def test_catalog_lists_every_row(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU has one row; the prices of a GPU are listed cheapest first."""
    assert main(["catalog", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    header, _, *rows = (line for line in lines if line.startswith("|"))
    columns = [part.strip() for part in header.split("|")[1:-1]]
    table = [
        dict(zip(columns, (part.strip() for part in row.split("|")[1:-1]), strict=True))
        for row in rows
    ]
    keys = [row["key" if what == "gpus" else "GPU"] for row in table]
    assert {"cpu", "A40"} <= set(keys)
    if what == "gpus":
        assert len(set(keys)) == len(keys)
    else:
        prices = [float(row["$/h"]) for row in table if row["GPU"] == "A40"]
        assert prices == sorted(prices)


@pytest.mark.parametrize("arguments", [["--help"], ["status", "run"], ["catalog", "gpus"]])
def test_a_closed_pipe_ends_the_command_quietly(arguments: list[str], tmp_path: Path) -> None:
    """A closed output pipe, as ``| head -1`` leaves it, is no error for short or long output."""
    made_run(tmp_path / "run")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "orchestrator", *arguments],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["what-if", "run", "--spto"],
            "arguments: --spto; --spto: did you mean '--spot' or '--split'?",
        ),
        (["rank", "run", "--batch-size", "medium"], "'medium'; or fastest, or largest"),
        (["resume", "run"], "; use 'sweep --resume --out RUN'"),
        (["estimat", "--model", "m"], "; estimat: did you mean 'estimate'?"),
        (["profile", "--model=m", "--seq-len=8", "--method=qlor"], "; qlor: did you mean 'qlora'?"),
        (["estimate", "--modle=m"], "required: --model or --config; --modle: did you mean"),
        (["estimate", "train.yaml"], "required: --model or --config; use --config train.yaml"),
        (["catalog", "price"], "; price: did you mean 'prices'?"),
        (["what-if", "run", f"--examples={10**400}"], f"must be at most {10**15}"),
    ],
)
def test_a_mistake_of_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """A usage error is one line with a suggestion, without the usage text."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("word", ["max", "largest"])
def test_max_and_largest_both_mean_the_largest_batch_size(word: str) -> None:
    """Every command with --batch-size accepts both words."""
    for command in (
        ["estimate", "--model", "m"],
        ["profile", "--model", "m", "--seq-len", "8"],
        ["rank", "run"],
        ["what-if", "run"],
    ):
        parsed = build_parser().parse_args([*command, "--batch-size", word])
        assert parsed.batch_size == "largest"


def test_cells_too_short_for_the_data_are_reported_before_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep would measure these cells but could not rank them."""
    (tmp_path / "lengths.csv").write_text("tokens,examples\n20,5\n", encoding="utf-8")
    job = "{examples: 5, epochs: 1, length_histogram: lengths.csv}"
    text = TWO_CELLS.replace("{examples: 1000, epochs: 3}", job)
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    assert main(["sweep", "spec.yaml", "--dry-run"]) == 0
    message = capsys.readouterr().err
    assert "1 of 2 cells cannot" in message


@pytest.mark.parametrize("command", [["estimate", "--model", "m"], ["rank", "run"]])
def test_queries_is_a_hidden_alias_of_examples(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """``--queries``, the paper's word, is accepted but not shown in the help."""
    for option in ("--examples", "--queries"):
        assert build_parser().parse_args([*command, option, "70"]).examples == 70
    with pytest.raises(SystemExit):
        main([command[0], "--help"])
    text = capsys.readouterr().out
    assert "--examples" in text
    assert "--queries" not in text


def test_queries_in_a_specification_means_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``queries:`` means ``examples:``; giving both is one error."""
    former = ONE_CELL.replace("examples: 1000", "queries: 1000")
    assert spec_of(former).workload == spec_of(ONE_CELL).workload
    both = ONE_CELL.replace("examples: 1000", "examples: 1000, queries: 9")
    (tmp_path / "both.yaml").write_text(both, encoding="utf-8")
    assert main(["sweep", "both.yaml", "--dry-run"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("both.yaml:7: ")
    assert "queries" in message
