"""``learn`` as a user meets it: two learning curves, measured in children, kept and used."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Self

import pytest
from builders import data as made_data
from builders import questions as made_questions
from builders.observations import FULL, environment, tiny_cell
from builders.runs import ROUTED, made_run, spec_of

from orchestrator.cli.main import main
from orchestrator.run_folder.file_names import LEARNED, LEARNING
from orchestrator.run_folder.learning_log import learned_file
from orchestrator.run_folder.run_folder import open_run
from orchestrator.running import learning_runner
from trials.child_process.forked_child import ChildGoneError, ProbeEnd
from trials.child_process.learning_child import ChildLearner, LearnError, NoStartError, _line
from trials.records.learning import EpochReply, Heartbeat, HeldOutScores, LearnReady, LearnSetup
from trials.records.model import presets
from trials.records.observation import Outcome

ENOUGH = 0.9  # of the held-out answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set, its tokenizer, and a run of the model with sparse and dense cells."""
    folder = tmp_path_factory.mktemp("learn")
    made_questions.made_tokenizer(folder / "tok")
    made_data.write_jsonl(folder / "data.jsonl", made_questions.questions(400))
    made_run(folder / "run", ROUTED.replace("[2]", "[2, 8]"), measured=2)
    return folder


def arguments(folder: Path, *more: str, out: str = "run") -> list[str]:
    """Arguments of ``learn`` on the made data set."""
    return [
        *("learn", str(folder / "data.jsonl"), "--text-fields", "question,answer"),
        *("--model", "mixtral-tiny", "--tokenizer", str(folder / "tok")),
        *("--learning-rate", "3e-3", "--batch-size", "16", "--epochs", "4", "--threads", "1"),
        *("--defaults", "plain"),  # as the recipes of the run
        *("--out", str(folder / out), *more),
    ]


@pytest.fixture(scope="module")
def learned(folder: Path) -> Path:
    """The run after ``learn``."""
    assert main(arguments(folder)) == 0
    return folder / "run"


@pytest.mark.long
def test_sparse_and_dense_learn_the_made_language(
    folder: Path, learned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both curves reach 90 % of the held-out answers; a second call repeats no epoch."""
    kept = (learned / LEARNED).read_bytes()
    assert main(arguments(folder, "--json")) == 0
    said = capsys.readouterr()
    assert (learned / LEARNED).read_bytes() == kept
    assert "epoch 1:" not in said.err
    printed = json.loads(said.out)
    assert [(row["active_experts"], row["accuracy"] >= ENOUGH) for row in printed["stops"]] == [
        (2, True),
        (8, True),
    ]
    untrained = [row["accuracy"] for row in printed["curves"] if row["epoch"] == 0]
    assert all(accuracy < 0.1 for accuracy in untrained)
    (against,) = printed["sparse_against_dense"]
    assert against["accuracy_gain_low"] < 0 < against["accuracy_gain_high"]
    assert len(list((learned / LEARNING).iterdir())) == 2  # to go on from
    assert f"\n{learned / LEARNING}: " in said.err


@pytest.mark.long
def test_more_epochs_resume_the_same_curve(folder: Path, learned: Path) -> None:
    """One epoch and then one more give the same numbers as two epochs at once."""
    assert main(arguments(folder, "--epochs", "1", out="steps")) == 0
    assert main(arguments(folder, "--epochs", "2", "--active-experts", "2", out="steps")) == 0
    one_by_one, at_once = (
        {epoch.key: (epoch.train_loss, epoch.tested) for epoch in learned_file(path)}
        for path in (folder / "steps", learned)
    )
    assert len(one_by_one) == 5
    assert one_by_one.items() <= at_once.items()


@pytest.mark.long
def test_epochs_auto_takes_the_epochs_from_learning_curves(
    folder: Path, learned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Curves come from the run itself or from --learned; a run without them is an error."""
    assert main(["rank", str(learned), "--epochs", "auto"]) == 0
    said = capsys.readouterr().out
    assert "as learned" in said
    assert f"held-out examples of {folder / 'data.jsonl'}" in said
    rows = json.loads((learned / "ranking.json").read_text(encoding="utf-8"))["learned"]
    assert [row["active_experts"] for row in rows] == [2, 8]
    assert main(["report", str(learned)]) == 0
    assert "sparse, 2 of 8" in capsys.readouterr().out
    made_run(folder / "other", ROUTED)
    other = ["what-if", str(folder / "other"), "--epochs", "auto"]
    assert main(other) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"--epochs auto: {folder / 'other'} ")
    assert message.count("\n") == 1
    assert main([*other, "--learned", str(learned)]) == 0
    assert "as learned" in capsys.readouterr().out
    assert main(["what-if", str(learned), "--learned", str(learned)]) == 1
    assert "--epochs auto" in capsys.readouterr().err


@pytest.mark.long
def test_a_sweep_can_start_in_a_folder_with_learning_curves(folder: Path, learned: Path) -> None:
    """A folder that holds only learning curves becomes a run folder and keeps them."""
    first = folder / "first"
    first.mkdir()
    (first / LEARNED).write_bytes((learned / LEARNED).read_bytes())
    open_run(first, ROUTED, spec_of(ROUTED))
    assert (first / LEARNED).exists()


@pytest.mark.long
def test_a_child_that_is_killed_is_one_line(folder: Path) -> None:
    """The error names the cell, the epoch and the signal."""
    cell = tiny_cell("llama-tiny", FULL, seq_len=64)
    setup = made_questions.learn_setup(folder, cell, made_questions.learn_examples(20, 4))
    with ChildLearner(setup) as child:
        assert child.epoch(0, 1, lambda _: None).tested is not None
        assert child.child_pid is not None
        os.kill(child.child_pid, signal.SIGKILL)
        with pytest.raises(LearnError) as error:
            child.epoch(1, 1, lambda _: None)
    assert all(word in str(error.value) for word in (cell.key, "epoch 1", "SIGKILL"))


@pytest.mark.parametrize(
    ("outcome", "detail", "said"),
    [
        (
            Outcome.OUT_OF_MEMORY,
            "no room",
            "OUT_OF_MEMORY (no room): give a smaller --batch-size or --cutoff, or another recipe",
        ),
        (
            Outcome.FAILED,
            "NotTrainingError: the loss is nan",
            "the loss is nan: give a smaller --learning-rate, or --precision fp32",
        ),
        (Outcome.FAILED, "TokenizerError: no such folder", "no such folder"),
    ],
)
def test_a_failed_child_is_reported_with_a_remedy(outcome: Outcome, detail: str, said: str) -> None:
    """Out of memory and a diverging loss come with the options to change."""
    assert _line(ChildGoneError(ProbeEnd(outcome, detail))) == said


def test_all_mistakes_are_reported_at_once_and_nothing_is_created(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All mistakes in options and data are reported together, and no folder remains."""
    out = tmp_path / "new"
    wrong = ("--active-experts", "9", "--held-out", "1.5", "--choices", "sound", "--recipe", "x")
    assert main([*arguments(folder, *wrong)[:-8], "--out", str(out), *wrong]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == [
        "--held-out",
        "--active-experts",
        "--recipe",
        "--choices",
    ]
    assert not out.exists()


def test_a_model_folder_without_a_tokenizer_is_an_error_at_the_start(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error names the folder and --tokenizer, beside the other mistakes."""
    (tmp_path / "config.json").write_text(json.dumps(presets()["llama-tiny"].config))
    data = ("learn", str(folder / "data.jsonl"), "--text-fields", "question,answer")
    out = tmp_path / "new"
    weights = ("--weights", "random", "--active-experts", "2")
    assert main([*data, "--model", str(tmp_path), *weights, "--out", str(out)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"--tokenizer '{tmp_path}'")
    assert [line.split()[0] for line in lines[1:]] == ["--active-experts"]
    assert not out.exists()


class FakeChild:
    """A child that learns without a model; its class holds the faults.

    Attributes:
        ends_at: number of active experts and epoch at which it ends.
        begins: whether it comes to the first epoch.
        epochs_run: (active experts, epoch) of all epochs that were run.
    """

    ends_at: ClassVar[tuple[int, int] | None]
    begins: ClassVar[bool]
    epochs_run: ClassVar[list[tuple[int, int]]]

    def __init__(self, setup: LearnSetup) -> None:
        self._active = setup.cell.active_experts or 0
        self._curve = setup.curve
        assert setup.checkpoint_file is not None
        self._checkpoint = Path(setup.checkpoint_file)

    def __enter__(self) -> Self:
        if not self.begins:
            raise NoStartError("mixtral-tiny: no such tokenizer")
        kept = {"curve": None, "attempt": None, "epoch": 0}
        if self._checkpoint.exists():
            kept = json.loads(self._checkpoint.read_bytes())
            assert kept["curve"] == self._curve
        self.ready = LearnReady(
            environment=environment(),
            memory_limit_bytes=1,
            epoch=kept["epoch"],
            attempt=kept["attempt"],
            cut_off=3,
            left_out=0,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def epoch(self, number: int, attempt: int, listen: Callable[[Heartbeat], None]) -> EpochReply:
        listen(Heartbeat(doing="training", done=1, total=2))
        if self.ends_at == (self._active, number):
            raise LearnError("the child was killed by SIGKILL")
        self.epochs_run.append((self._active, number))
        if number:
            kept = {"curve": self._curve, "attempt": attempt, "epoch": number}
            self._checkpoint.write_text(json.dumps(kept), encoding="utf-8")
        right = tuple(place < 10 * number for place in range(40))
        return EpochReply(
            epoch=number,
            train_loss=1.0,
            tested=HeldOutScores(nats=(1.0,) * 40, tokens=(1,) * 40, correct=right),
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeChild]:
    """The fake class, in place of the real child."""
    FakeChild.ends_at, FakeChild.begins, FakeChild.epochs_run = None, True, []
    monkeypatch.setattr(learning_runner, "ChildLearner", FakeChild)
    return FakeChild


def test_a_child_that_cannot_start_leaves_no_folder(
    folder: Path, fake: type[FakeChild], capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed start is one message, and no output folder remains."""
    fake.begins = False
    assert main(arguments(folder, out="short")) == 1
    assert capsys.readouterr().err.splitlines()[1:] == ["mixtral-tiny: no such tokenizer"]
    assert not (folder / "short").exists()


def test_a_curve_that_ends_early_is_kept_and_the_other_one_is_learned(
    folder: Path, fake: type[FakeChild], capsys: pytest.CaptureFixture[str]
) -> None:
    """After a killed child the other curve is still learned; a second call resumes the first."""
    fake.ends_at = (2, 3)
    assert main(arguments(folder, out="ended")) == 1
    said = capsys.readouterr()
    assert "SIGKILL" in said.err
    assert "3 examples were" in said.err
    assert "| 4     | " in said.out
    assert fake.epochs_run == [*((2, epoch) for epoch in range(3)), *((8, e) for e in range(5))]
    fake.ends_at, fake.epochs_run = None, []
    assert main(arguments(folder, out="ended")) == 0
    assert fake.epochs_run == [(2, 3), (2, 4)]


@pytest.mark.parametrize(
    ("state", "epochs_run", "attempt"),
    [(1, [2, 3, 4], 1), (2, [2, 3, 4], 1), (None, [0, 1, 2, 3, 4], 2)],
)
def test_a_curve_restarts_only_when_its_checkpoint_is_lost(
    folder: Path,
    tmp_path: Path,
    fake: type[FakeChild],
    *,
    state: int | None,
    epochs_run: list[int],
    attempt: int,
) -> None:
    """A checkpoint may be one epoch ahead of the records; attempts are never mixed in a curve."""
    fake.ends_at = (2, 2)
    one = arguments(folder, "--active-experts", "2", out=str(tmp_path / "lost"))
    assert main(one) == 1
    fake.ends_at, fake.epochs_run = None, []
    (checkpoint,) = (tmp_path / "lost" / LEARNING).iterdir()
    if state is None:
        checkpoint.unlink()
    else:
        kept_state = json.loads(checkpoint.read_bytes()) | {"epoch": state}
        checkpoint.write_text(json.dumps(kept_state), encoding="utf-8")
    assert main(one) == 0
    assert fake.epochs_run == [(2, epoch) for epoch in epochs_run]
    kept = [json.loads(line) for line in (tmp_path / "lost" / LEARNED).read_bytes().splitlines()]
    assert [epoch["attempt"] for epoch in kept] == [1, 1, *[attempt] * len(epochs_run)]


def test_a_second_attempt_resumes_though_the_first_got_further(
    folder: Path, tmp_path: Path, fake: type[FakeChild]
) -> None:
    """The checkpoint names its attempt, so no epoch is learned twice."""
    out = tmp_path / "again"
    one = arguments(folder, "--active-experts", "2", out=str(out))
    fake.ends_at = (2, 4)
    assert main(one) == 1
    (checkpoint,) = (out / LEARNING).iterdir()
    checkpoint.unlink()
    fake.ends_at = (2, 2)
    assert main(one) == 1
    fake.ends_at, fake.epochs_run = None, []
    assert main(one) == 0
    assert fake.epochs_run == [(2, 2), (2, 3), (2, 4)]
    assert [epoch.attempt for epoch in learned_file(out)] == [1] * 4 + [2] * 5


def test_learning_resumes_after_an_early_stop_with_more_patience_or_all_epochs(
    folder: Path, tmp_path: Path, fake: type[FakeChild], capsys: pytest.CaptureFixture[str]
) -> None:
    """A curve that stopped at epoch 6 resumes from its checkpoint with --patience or --whole."""
    one = arguments(folder, "--active-experts", "2", "--epochs", "8", out=str(tmp_path / "more"))
    for more, epochs_run in [((), range(7)), (("--patience", "3"), [7]), (("--whole",), [8])]:
        fake.epochs_run = []
        assert main([*one, *more]) == 0
        assert fake.epochs_run == [(2, epoch) for epoch in epochs_run]
        assert "--epochs auto --learned" in capsys.readouterr().err


def test_a_curve_that_failed_at_once_leaves_no_checkpoint(
    folder: Path, tmp_path: Path, fake: type[FakeChild], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a checkpoint size nor --epochs auto is mentioned for a curve without an epoch."""
    fake.ends_at = (2, 1)
    one = arguments(folder, "--active-experts", "2", out=str(tmp_path / "none"))
    assert main(one) == 1
    assert [file.name for file in (tmp_path / "none").iterdir()] == [LEARNED]
    said = capsys.readouterr().err
    assert "of state" not in said
    assert "--epochs auto" not in said
