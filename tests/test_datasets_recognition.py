"""Formats of data sets, recognised by their columns, and counted without a tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import data as made_data

import orchestrator
from orchestrator.cli.main import main
from orchestrator.datasets.lengths import DataLengths
from orchestrator.datasets.preference import Preference
from orchestrator.datasets.recognition import WITH_INPUT, WITHOUT_INPUT, Recognised, recognised
from orchestrator.datasets.source import DataError, DatasetSource, Example
from orchestrator.reporting.estimate_tables import as_table
from orchestrator.spec.job_request import JobRequest, requested_job
from trials.records.model import Model, find_model

HI = {"role": "user", "content": "Hi there"}
HELLO = {"role": "assistant", "content": "Hello!"}
CORPORA = Path(__file__).parent / "data" / "corpora"


@pytest.mark.parametrize(
    ("row", "name", "rendered"),
    [
        ({"messages": [HI, HELLO]}, "OpenAI messages", [HI, HELLO]),
        (
            {"conversations": [{"from": "human", "value": "Hi there"}]},
            "ShareGPT",
            [HI],
        ),
        (
            {"instruction": "Add", "input": "1 1", "output": "2"},
            "Alpaca",
            WITH_INPUT.format(instruction="Add", input="1 1", output="2"),
        ),
        (
            {"instruction": "Sing", "input": "", "output": "La"},
            "Alpaca",
            WITHOUT_INPUT.format(instruction="Sing", output="La"),
        ),
        ({"prompt": "1+1=", "completion": "2"}, "prompt and completion", "1+1=2"),
        ({"prompt": [HI], "completion": [HELLO]}, "prompt and completion", [HI, HELLO]),
        (
            {"messages": [HI, HELLO], "tools": '[{"name": "f"}]'},
            "tools",
            [{"tools": [{"name": "f"}]}, HI, HELLO],
        ),
        ({"messages": [HI, HELLO], "tools": None}, "OpenAI messages", [HI, HELLO]),
        ({"text": "All of it"}, "plain text", "All of it"),
    ],
)
def test_a_format_is_recognised_by_its_columns(
    row: dict[str, Any], name: str, rendered: object, tmp_path: Path
) -> None:
    """Further columns do not matter; the name is in the description."""
    path = made_data.write_jsonl(tmp_path / "data.jsonl", [{"id": 1, **row}])
    form = recognised(DatasetSource(str(path)))
    assert isinstance(form, Recognised)
    assert name in str(form)
    assert form.render(Example("1", row)) == rendered


PAIR = {"chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(
    ("row", "rendered"),
    [
        ({"prompt": "1+1=", "input": "x", **PAIR}, ("1+1=yes", "1+1=no")),
        ({"instruction": "Add", "input": "1 1", **PAIR}, ("Add\n1 1yes", "Add\n1 1no")),
        ({"instruction": "Add", "input": "", **PAIR}, ("Addyes", "Addno")),
        (PAIR, ("yes", "no")),
    ],
)
def test_a_pair_has_the_prompt_of_its_columns(
    row: dict[str, Any], rendered: tuple[str, str], tmp_path: Path
) -> None:
    """An instruction and its input are one prompt, as LLaMA-Factory joins them."""
    path = made_data.write_jsonl(tmp_path / "data.jsonl", [row])
    form = recognised(DatasetSource(str(path)))
    assert isinstance(form, Preference)
    assert form.render(Example("1", row)) == rendered


def test_answers_beside_a_conversation_are_not_recognised(tmp_path: Path) -> None:
    """Neither the answers alone nor the conversation alone are what a trainer reads."""
    row = {"conversations": [{"from": "human", "value": "Hi"}], **PAIR}
    path = made_data.write_jsonl(tmp_path / "data.jsonl", [row])
    assert recognised(DatasetSource(str(path))) is None


def test_unknown_columns_need_an_option(tmp_path: Path) -> None:
    """Nothing is guessed."""
    path = made_data.write_jsonl(tmp_path / "data.jsonl", [{"question": "a", "answer": "b"}])
    assert recognised(DatasetSource(str(path))) is None


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ["holds no examples"]),
        ("\n\n", ["holds no examples"]),
        ('{"text" "a"}\n[1]\n', [":1: not JSON", ":2: must be an object of fields"]),
        ("3\n" * 30, [f":{line}: must be an object" for line in range(1, 21)]),
    ],
)
def test_a_file_without_an_example_is_a_mistake_of_the_file(
    tmp_path: Path, text: str, messages: list[str]
) -> None:
    """No option for columns would mend it."""
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as raised:
        recognised(DatasetSource(str(path)))
    lines = str(raised.value).splitlines()
    assert len(lines) == len(messages)
    assert all(message in line for message, line in zip(messages, lines, strict=True)), lines


def lengths(dataset: Path, model: Model) -> DataLengths:
    """Lengths that a model's data has."""
    job = requested_job(JobRequest(dataset=str(dataset), epochs=1), [model])
    assert job.lengths is not None
    return job.lengths


def test_without_a_tokenizer_lengths_are_approximate() -> None:
    """They are labelled with their error; each message has tokens of the template."""
    model = find_model("llama-3.1-8b").model_copy(update={"weights": None})
    counted = lengths(CORPORA / "chat.jsonl", model)
    assert counted.error == 0.13
    assert counted.examples == 4
    assert counted.tokens == pytest.approx(584 + 5 * 8, rel=0.13)
    assert "Llama 3" in str(counted.tokenizer)


def test_tools_are_counted_with_their_messages(tmp_path: Path) -> None:
    """By the rates, which have no template, as their text."""
    model = find_model("llama-3.1-8b").model_copy(update={"weights": None})
    tool = {"name": "look_up", "description": "one two three four " * 25}
    rows = [{"messages": [HI, HELLO], "tools": tools} for tools in ([], [tool])]
    paths = [
        made_data.write_jsonl(tmp_path / f"{number}.jsonl", [row])
        for number, row in enumerate(rows)
    ]
    without, counted = (lengths(path, model).tokens for path in paths)
    assert 100 < counted - without < 150


@pytest.mark.long
def test_a_gated_tokenizer_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried, and out of reach; one that is named must be there."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, path = find_model("llama-3.1-8b"), CORPORA / "chat.jsonl"
    assert lengths(path, model).error == 0.13
    request = JobRequest(dataset=str(path), epochs=1, tokenizer="./none")
    with pytest.raises(DataError, match="--tokenizer"):
        requested_job(request, [model])


@pytest.mark.long
def test_a_dataset_alone_finishes_for_a_gated_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interval is wider than with exact lengths, and the notes say why."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = find_model("llama-tiny").config | {"vocab_size": 32_000}
    made = tmp_path / "config.json"
    made.write_text(json.dumps(config), "utf-8")
    text = {"text": "one two three four five six seven eight nine ten " * 4}
    path = made_data.write_jsonl(tmp_path / "data.jsonl", [text] * 64)
    options = {"gpu": "A40", "method": "lora", "batch_size": 4}
    estimates = orchestrator.estimate(made, dataset=path, **options)
    (row,) = estimates
    tokens = estimates.question.workload.lengths
    assert tokens is not None
    exact = orchestrator.estimate(made, length_histogram=_histogram(tmp_path, tokens), **options)
    (other,) = exact
    wide, narrow = row.estimate.peak_gib_interval, other.estimate.peak_gib_interval
    assert row.estimate.peak_gib == other.estimate.peak_gib
    assert wide.low < narrow.low < narrow.high < wide.high
    wide, narrow = row.estimate.step_seconds_interval, other.estimate.step_seconds_interval
    assert wide is not None
    assert narrow is not None
    assert wide.low < narrow.low < narrow.high < wide.high
    shown = as_table(estimates.estimated, estimates.question)
    assert "plain text" in shown
    assert "15% off" in shown
    assert main(["dataset", str(path), "--model", str(made)]) == 0
    assert "15% off" in capsys.readouterr().out


def _histogram(folder: Path, data: DataLengths) -> Path:
    rows = "".join(f"{tokens},{count}\n" for tokens, count in data.histogram)
    path = folder / "lengths.csv"
    path.write_text(f"tokens,examples\n{rows}", "utf-8")
    return path
