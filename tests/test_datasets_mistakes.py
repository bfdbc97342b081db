"""Errors in data sets, in the options for reading them, and in tokenizers."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import data as made_data
from builders.dataset_files import FIELDS, SHORT, as_csv, as_jsonl, mistakes_of, written
from builders.messages import assert_lines

from orchestrator.datasets import dataset_reader as reading
from orchestrator.datasets import file_formats
from orchestrator.datasets.file_formats import MOST_BYTES_OF_LINE
from orchestrator.datasets.source import DataError
from orchestrator.spec.job import Job
from orchestrator.spec.job_request import JobRequest, requested_job
from trials.child_process.token_counter import TokenizerError
from trials.records.model import find_model, presets

pytest_plugins = ["builders.dataset_counting"]

GOOD = '{"question": "a", "answer": "b"}\n'
REFUSED = [
    ("data.jsonl", "", ["{}: holds no examples"]),
    ("data.json", " \n", ["{}: holds no examples"]),
    ("data.csv", "question,answer\n", ["{}: holds no examples"]),
    ("data.json", "[]", ["{}: holds no examples"]),
    ("data.jsonl", GOOD.replace('"a"', '""').replace('"b"', "null"), ["{}: all 1 examples are em"]),
    ("data.xlsx", "PK", ["{}: unknown format '.xlsx': use .json, .jsonl, "]),
    ("data.parquet.gz", "PK", ["{}: unknown format '.gz': use "]),
    ("data.parquet", "PK", ["{}: not a Parquet file ("]),
    ("data.arrow", "PK", ["{}: not an Arrow stream ("]),
    ("data.jsonl.gz", "PK", ["{}: cannot be read: Not a gzipped file"]),
    ("data.json", '[{"question": 1},\n', ["{}:2: not JSON (Expecting value): repair it"]),
    ("data.json", "7\n", ["{}:1: must be an object of fields, not 7"]),
    ("data.json", '{\n"a": 1}', ["{}: an object with a, not with one list"]),
    ("data.json", b'[{"question": "\xe9"}]', ["{}: not UTF-8 text: save it as UTF-8 (byte 15)"]),
    ("data.csv", b"question,answer\na,b\n\xe9,b\n", ["{}:3: not UTF-8 text: save it as UTF-8"]),
    (
        "data.csv",
        'question,answer\na,b,c\na\n"a\n',
        [
            "{}:2: 3 fields, where the header has 2: ",
            "{}:3: 1 fields, where the header has 2: ",
            "{}:4: not CSV (unexpected end of data): repair the line",
        ],
    ),
    (
        "data.jsonl",
        GOOD.encode() + b'{"question": "\xe9"}\n{"question": \n[1]\n{"question": "a"}\n'
        b'{"question": "a", "answer": ["b"]}\n',
        [
            "{}:2: not UTF-8 text: save it as UTF-8",
            "{}:3: not JSON (Expecting value): each line must be an object of fields",
            "{}:4: must be an object of fields, not a list",
            "{}:5: has no field 'answer' (it has question): add it",
            "{}:6: answer: must be text, not a list: use --chat for messages",
        ],
    ),
]


@pytest.mark.parametrize(("name", "content", "lines"), REFUSED)
def test_all_mistakes_of_a_file_are_reported_by_line(
    name: str,
    content: str | bytes,
    lines: Sequence[str],
    tmp_path: Path,
    count: Callable[..., Job],
) -> None:
    """Every mistake of a file has its place."""
    path = written(tmp_path, name, content)
    mistakes = mistakes_of(count, path, text_fields=FIELDS)
    assert len(mistakes) == len(lines), mistakes
    for line, begin in zip(mistakes, lines, strict=True):
        assert line.startswith(begin.format(path)), line


def test_a_date_that_python_lacks_is_one_line(tmp_path: Path, count: Callable[..., Job]) -> None:
    """Of a column that is asked for, and while columns are recognised."""
    path = tmp_path / "dates.parquet"
    late = pa.array([2**62], type=pa.timestamp("us"))
    late_milliseconds = pa.array([10**15], type=pa.timestamp("ms"))
    for column in (late, late_milliseconds):
        pq.write_table(pa.table({"question": column, "answer": ["b"]}), path)
        (line,) = mistakes_of(count, path, text_fields=FIELDS)
        assert line.startswith(f"{path}: question: dates of years beyond 1 to 9999")
        (line,) = mistakes_of(count, path)
        assert str(path) in line


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
@pytest.mark.parametrize("name", ["z.jsonl", "z.json", "z.csv", "z.parquet", "z.arrow"])
def test_a_device_is_no_data_set(
    name: str, device: str, tmp_path: Path, count: Callable[..., Job]
) -> None:
    """It has no end: nothing of it is read."""
    (tmp_path / name).symlink_to(device)
    (line,) = mistakes_of(count, tmp_path / name, text_fields=FIELDS)
    assert line == f"{tmp_path / name}: is a device or a socket: give a file"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz", "a.csv.gz"])
def test_a_line_has_a_limit(name: str, tmp_path: Path, count: Callable[..., Job]) -> None:
    """A packed file of a megabyte may unpack to a line of a gigabyte."""
    path = tmp_path / name
    first = b"question,answer\n" if ".csv" in name else GOOD.encode()
    content = first + bytes(MOST_BYTES_OF_LINE + 1)
    path.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    *_, line = mistakes_of(count, path, text_fields=FIELDS)
    assert line == f"{path}:2: is longer than 64 MiB: give each example a line of its own"


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_document_has_a_limit(
    name: str, tmp_path: Path, count: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read as a whole."""
    monkeypatch.setattr(file_formats, "MOST_BYTES_OF_DOCUMENT", 2**20)
    path = tmp_path / name
    document = b"[" + GOOD.encode() + b" " * 2**20 + b"]"
    path.write_bytes(gzip.compress(document) if name.endswith(".gz") else document)
    (line,) = mistakes_of(count, path, text_fields=FIELDS)
    assert line.startswith(f"{path}: a JSON document larger than 1 MiB: write an example per line")


def test_nesting_has_a_limit(tmp_path: Path, count: Callable[..., Job]) -> None:
    """Of lines and of documents, told with its number."""
    told = "is nested more than 200 levels deep"
    for levels in (200, 100_000):
        deep = "[" * levels + "]" * levels
        example = f'{{"question": "a", "answer": "b", "more": {deep}}}\n'
        path = written(tmp_path, "a.jsonl", GOOD + example)
        (line,) = mistakes_of(count, path, text_fields=FIELDS)
        assert line == f"{path}:2: {told}: each line must be an object of fields"
        path = written(tmp_path, "a.json", f"[\n{example}]")
        (line,) = mistakes_of(count, path, text_fields=FIELDS)
        assert line == f"{path}: {told}: repair it"
    deep = "[" * 199 + "]" * 199
    path = written(tmp_path, "a.jsonl", f'{{"question": "a", "answer": "b", "more": {deep}}}\n')
    assert count(path, text_fields=FIELDS).examples == 1


def test_reading_stops_after_a_number_of_mistakes(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """The last line says that reading stopped."""
    mistakes = mistakes_of(
        count, written(tmp_path, "data.jsonl", GOOD + 99 * "{\n"), text_fields=FIELDS
    )
    assert len(mistakes) == reading.MOST_MISTAKES
    assert "stopped" in mistakes[-1]


def test_a_path_without_readable_examples_is_an_error(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """A missing file, an empty folder, mixed formats and options that do not apply."""
    (line,) = mistakes_of(count, tmp_path / "none.jsonl", text_fields=FIELDS)
    assert line.startswith(f"{tmp_path}/none.jsonl: no such")
    (line,) = mistakes_of(count, "gsm8k", text_fields=FIELDS)
    assert line.startswith("gsm8k: no such")
    assert "OWNER/NAME" in line
    (line,) = mistakes_of(count, tmp_path, text_fields=FIELDS)
    assert line.startswith(f"{tmp_path}: ")
    assert ".json, " in line
    path = as_jsonl(tmp_path)
    lines = mistakes_of(count, path, text_fields=FIELDS, subset="main", split="test")
    assert [line.partition(": ")[0] for line in lines] == ["--subset 'main'", "--split 'test'"]
    as_csv(tmp_path)
    (line,) = mistakes_of(count, tmp_path, text_fields=FIELDS)
    assert line.startswith(f"{tmp_path}: ")
    assert ".csv and .jsonl" in line


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            {"text_fields": ("qestion", "label")},
            [
                "--text-fields 'qestion': no such field in {}: did you mean 'question'?",
                "--text-fields 'label': no such field in {}: it has question, answer",
            ],
        ),
        (
            {"template": "{question} {anser}", "tokenizer": "./none"},
            [
                "--template 'anser': no such field in {}: did you mean 'answer'?",
                "--tokenizer './none': no such folder: give one with a tokenizer.json",
            ],
        ),
        ({"chat": "messages"}, ["--chat 'messages': no such field in {}: it has question, answer"]),
        (
            {"chat": "answer"},
            [f"{{}}:{n}: answer: must be a list of messages, not text" for n in range(1, 13)],
        ),
        (
            {"template": "Q: {"},
            ["--template 'Q: {{': Single '{{' encountered in format string: "],
        ),
        (
            {"template": "Q: {}"},
            ["--template 'Q: {{}}': {{}} is not the name of a field in braces"],
        ),
        (
            {"template": "{question:d} {answer!r}"},
            [
                "--template '{{question:d}} {{answer!r}}': {{question:d}} is not the name",
                "--template '{{question:d}} {{answer!r}}': {{answer!r}} is not the name of",
            ],
        ),
        ({"template": "Q"}, ["--template 'Q': has no field: "]),
        (
            {},
            ["--text-fields is missing: give it, or template or chat; {} has question, answer"],
        ),
        (
            {"text_fields": FIELDS, "chat": "messages", "named": "gsm8k", "padding": "packed"},
            [
                "--named 'gsm8k': dataset is given as well: keep one",
                "--cutoff is missing: packing needs ",
                "--chat 'messages': text_fields is given as well: keep one",
            ],
        ),
        (
            {"text_fields": FIELDS, "tokenizer": None},
            ["--tokenizer is missing: give a folder or a hub name, or the model"],
        ),
    ],
)
def test_all_wrong_options_are_reported_at_once(
    options: dict[str, Any], lines: Sequence[str], tmp_path: Path, count: Callable[..., Job]
) -> None:
    """Each line has the option, its value, and near matches or a remedy."""
    path = made_data.write_jsonl(tmp_path / "data.jsonl", SHORT)
    mistakes = mistakes_of(count, path, **options)
    assert len(mistakes) == len(lines), mistakes
    for line, begin in zip(mistakes, lines, strict=True):
        assert line.startswith(begin.format(path)), line


def test_invalid_conversations_are_reported_by_line(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """Mistakes come from the reader or the chat template; valid conversations do not hide them."""
    right = [{"role": "user", "content": "hello"}]
    chats = [right, [], None, [{"role": "tool", "content": "x"}]]
    path = made_data.write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    assert_lines(
        "\n".join(mistakes_of(count, path, chat="messages")),
        (f"{path}:4: ", "no role tool here"),
        (f"{path}: ", "2 examples", f"({path}:2, {path}:3)"),
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    wrong = (
        [{"role": "user"}],
        [{"text": "x"}],
        [{"from": "gpt"}],
        [{"role": "tool", "content": ""}],
    )
    chats = [right, [*right, call], *([*right, *more] for more in wrong)]
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    path.write_text("".join([*lines[:3], "{\n", *lines[3:]]))
    assert_lines(
        "\n".join(mistakes_of(count, path, chat="messages")),
        (f"{path}:3: messages: message 2 ", "no content"),
        (f"{path}:4: not JSON",),
        (f"{path}:5: messages: message 2 ", "role and content"),
        (f"{path}:6: messages: message 2 ", "no value"),
        (f"{path}:7: ", "no role tool here"),
    )
    path.write_text("{\n" + lines[0])
    mistakes = mistakes_of(count, path, chat="mesages")
    assert [line.partition(": ")[0] for line in mistakes] == ["--chat 'mesages'", f"{path}:1"]


def test_conversations_need_a_chat_template(
    tmp_path: Path, count: Callable[..., Job], tokenizer_folder: Path
) -> None:
    """The error names the tokenizer."""
    path = made_data.write_jsonl(tmp_path / "c.jsonl", [{"m": [{"role": "user", "content": "a"}]}])
    bare = tokenizer_folder / "tokenizer.json"
    (line,) = mistakes_of(count, path, chat="m", tokenizer=str(bare))
    assert line.startswith(f"--tokenizer '{bare}' ")
    assert "chat template" in line


def test_an_invalid_tokenizer_is_an_error_of_one_line(tmp_path: Path) -> None:
    """An empty folder and a truncated file are errors."""
    from trials.training.tokenizer_worker import ExampleTokenizer  # noqa: PLC0415 - the child's own

    with pytest.raises(TokenizerError) as error:
        ExampleTokenizer(str(tmp_path))
    assert "\n" not in str(error.value)
    with pytest.raises(TokenizerError):
        ExampleTokenizer(str(written(tmp_path, "tokenizer.json", "{")))


def test_the_models_own_tokenizer_counts_when_there_is_one(tmp_path: Path) -> None:
    """Without --tokenizer the model must have one, and several models must share it."""
    path = made_data.write_jsonl(tmp_path / "data.jsonl", SHORT)
    request = JobRequest(dataset=str(path), text_fields=FIELDS, epochs=1)
    shipped = presets()
    with pytest.raises(DataError, match="llama-tiny has no tokenizer"):
        requested_job(request, [shipped["llama-tiny"]])
    two = [shipped["mixtral-8x7b"], shipped["llama-2-7b"]]
    with pytest.raises(DataError, match="mixtral-8x7b, llama-2-7b have different"):
        requested_job(request, two)
    bare = written(tmp_path, "config.json", json.dumps(shipped["llama-tiny"].config)).parent
    said = f"--tokenizer '{bare}' (the model's own, as none is given) cannot be loaded (the folder"
    for given, begin in ((None, said), (str(bare), f"--tokenizer '{bare}' cannot be loaded (")):
        with pytest.raises(DataError) as error:
            requested_job(request.model_copy(update={"tokenizer": given}), [find_model(str(bare))])
        assert str(error.value).startswith(begin)
        assert "tokenizer.json" in str(error.value)


def test_a_tokenizer_that_rates_stand_in_for_is_no_mistake_beside_one_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network the tokens of right data are approximate."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    path = written(tmp_path, "data.jsonl", '{"text": "a"}\n{"text": "b"\n')
    request = JobRequest(dataset=str(path), epochs=1)
    with pytest.raises(DataError) as error:
        requested_job(request, [presets()["llama-2-7b"]])
    assert str(error.value).startswith(f"{path}:2: not JSON")


def test_a_hub_data_set_without_a_network_is_one_line(
    count: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at once, without repeated attempts."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    (line,) = mistakes_of(count, "openai/gsm8k", subset="main", text_fields=FIELDS)
    assert line.startswith("data set 'openai/gsm8k'")
    assert "cannot be reached" in line
