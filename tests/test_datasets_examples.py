"""Reading and counting the examples of a data set, and errors in it."""

import datetime as dt
import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import data as made_data
from builders.messages import assert_lines
from builders.runs import ONE_CELL, made_run, spec_of
from tokenizers import Tokenizer

from orchestrator.cli.main import main
from orchestrator.datasets import dataset_reader as reading
from orchestrator.datasets import lengths as data_lengths
from orchestrator.datasets.lengths import DataLengths, histogram_csv, read_histogram
from orchestrator.datasets.source import DataError
from orchestrator.reporting.dataset_tables import PADDINGS
from orchestrator.run_folder.run_folder import open_run
from orchestrator.spec.job import Job
from orchestrator.spec.job_request import JobRequest, requested_job
from orchestrator.spec.job_tokens import longest_tokens, padded_tokens, rows, steps
from orchestrator.spec.spec_file import SpecError
from orchestrator.storage.run_storage import StoreError
from trials.child_process.token_counter import TokenCounter, TokenizerError
from trials.records.model import find_model, presets

ROWS = made_data.rows(700)
SHORT = ROWS[:12]
FIELDS = ("question", "answer")


def joined(row: made_data.Row) -> str:
    """Text of a row: its fields, joined."""
    return f"{row['question']}\n{row['answer']}"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a trained tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tok"
    made_data.train_tokenizer(folder, [joined(row) for row in ROWS])
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    """The trained tokenizer as the tokenizers library loads it, without truncation or padding."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.fixture(scope="session")
def one_child(tokenizer_folder: Path) -> Iterator[TokenCounter]:
    """A counter whose child all tests share: a process takes seconds to import."""
    with TokenCounter(str(tokenizer_folder)) as counter:
        yield counter


class SharedCounter:
    """A counter that uses the shared child for the shared tokenizer, else its own."""

    def __init__(self, name: str, shared: TokenCounter, folder: Path) -> None:
        self._counter = shared if name == str(folder) else TokenCounter(name)
        self._own = self._counter is not shared

    def __enter__(self) -> TokenCounter:
        return self._counter.__enter__() if self._own else self._counter

    def __exit__(self, *exception: object) -> None:
        if self._own:
            self._counter.__exit__(*exception)


@pytest.fixture
def count(
    one_child: TokenCounter, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Job]:
    """Function that reads and counts a data set with the trained tokenizer."""
    monkeypatch.setattr(
        data_lengths,
        "TokenCounter",
        lambda name: SharedCounter(name, one_child, tokenizer_folder),
    )

    def counted(dataset: Path | str, **options: Any) -> Job:
        fields = {
            "tokenizer": str(tokenizer_folder),
            "epochs": 3,
            "dataset": str(dataset),
        } | options
        return requested_job(JobRequest.model_validate(fields), ())

    return counted


def lengths_of(workload: Job) -> DataLengths:
    """Lengths of a job that has them."""
    assert workload.lengths is not None
    return workload.lengths


def mistakes_of(count: Callable[..., Job], dataset: Path | str, **options: Any) -> list[str]:
    """Lines of the DataError that reading a data set raises."""
    with pytest.raises(DataError) as error:
        count(dataset, **options)
    lines = str(error.value).split("\n")
    assert len(lines) == len(error.value.mistakes)
    return lines


def expected_histogram(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Histogram of token counts, each with one token for the end of text."""
    counts = Counter(len(tokenizer.encode(text)) + 1 for text in texts)
    return tuple(sorted(counts.items()))


def as_jsonl(folder: Path) -> Path:
    """A file with one object per line."""
    return made_data.write_jsonl(folder / "data.jsonl", ROWS)


def as_json_list(folder: Path) -> Path:
    """One JSON list with a byte order mark."""
    path = folder / "data.json"
    path.write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8")
    return path


def as_json_object(folder: Path) -> Path:
    """A list inside a JSON object."""
    path = folder / "data.json"
    path.write_text(json.dumps({"version": 1, "data": ROWS}), encoding="utf-8")
    return path


def as_lines_named_json(folder: Path) -> Path:
    """JSON lines in a file named .json."""
    return made_data.write_jsonl(folder / "data.json", ROWS)


def as_zipped_lines(folder: Path) -> Path:
    """Compressed JSON lines with blank lines."""
    path = folder / "data.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n\n" for row in ROWS).encode()))
    return path


def as_csv(folder: Path) -> Path:
    """A CSV with fields of several lines."""
    return made_data.write_csv(folder / "data.csv", ROWS)


def as_semicolons(folder: Path) -> Path:
    """A CSV with semicolons, as spreadsheets write it in some languages."""
    return made_data.write_csv(folder / "data.csv", ROWS, ";")


def as_tsv(folder: Path) -> Path:
    """A file with tabs."""
    return made_data.write_csv(folder / "data.tsv", ROWS, "\t")


def as_parquet(folder: Path) -> Path:
    """A Parquet file with another column and several row groups."""
    table = pa.Table.from_pylist([{"id": n, **row} for n, row in enumerate(ROWS)])
    pq.write_table(table, folder / "data.parquet", row_group_size=64)
    return folder / "data.parquet"


def as_arrow_folder(folder: Path) -> Path:
    """A folder as ``datasets`` saves it to disk."""
    folder /= "train"
    folder.mkdir()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text("{}", encoding="utf-8")
    (folder / "dataset_info.json").write_text("{}", encoding="utf-8")
    return folder.parent


def as_shards(folder: Path) -> Path:
    """A folder as on the hub: files of two splits, one of them in parts."""
    (folder / "data").mkdir()
    for shard in range(2):
        part = pa.Table.from_pylist(ROWS[shard::2])
        pq.write_table(part, folder / "data" / f"train-{shard:05}-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(SHORT), folder / "data" / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text("about it", encoding="utf-8")
    return folder


FORMS = (
    *(as_jsonl, as_json_list, as_json_object, as_lines_named_json, as_zipped_lines),
    *(as_csv, as_semicolons, as_tsv, as_parquet, as_arrow_folder, as_shards),
)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_format_of_the_same_examples_counts_alike(
    form: Callable[[Path], Path],
    tmp_path: Path,
    count: Callable[..., Job],
    tokenizer: Tokenizer,
) -> None:
    """Counts equal the tokenizers library's; the tokenizer's saved truncation is ignored."""
    workload = count(form(tmp_path), text_fields=FIELDS)
    lengths = lengths_of(workload)
    assert lengths.histogram == expected_histogram(tokenizer, [joined(row) for row in ROWS])
    assert workload.examples == lengths.examples == len(ROWS)
    assert lengths.complete
    assert lengths.empty == 0


def test_record_survives_its_json(tmp_path: Path, count: Callable[..., Job]) -> None:
    """Lengths are equal after a round trip through JSON, and a histogram after one through CSV."""
    lengths = lengths_of(count(as_jsonl(tmp_path), text_fields=FIELDS))
    again = DataLengths.model_validate_json(lengths.model_dump_json())
    assert again == lengths
    assert again.lengths.mean * again.examples == pytest.approx(lengths.tokens)
    path = tmp_path / "lengths.csv"
    path.write_text(histogram_csv("mine", lengths), encoding="utf-8")
    assert read_histogram(path).histogram == lengths.histogram
    assert read_histogram(path).source == f"{path} (mine)"


def test_a_template_renders_fields_and_escapes(
    tmp_path: Path, count: Callable[..., Job], tokenizer: Tokenizer
) -> None:
    r"""Doubled braces are literal, and a written ``\n`` is a line end, as a shell passes it."""
    workload = count(as_jsonl(tmp_path), template="Q: {question}\\n{{A}}: {answer}")
    texts = [f"Q: {row['question']}\n{{A}}: {row['answer']}" for row in ROWS]
    assert lengths_of(workload).histogram == expected_histogram(tokenizer, texts)
    assert "'Q: {question}\\n{{A}}" in lengths_of(workload).rendering


@pytest.mark.parametrize(("role", "said"), [("role", "content"), ("from", "value")])
def test_conversations_are_rendered_by_the_chat_template(
    role: str, said: str, tmp_path: Path, count: Callable[..., Job], tokenizer: Tokenizer
) -> None:
    """ShareGPT's keys are accepted too; no special tokens are added."""
    roles = ("user", "assistant") if role == "role" else ("human", "gpt")
    chats = [
        [{role: roles[0], said: row["question"]}, {role: roles[1], said: row["answer"]}]
        for row in SHORT
    ]
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": chat} for chat in chats]), path)
    texts = [f"<|user|>{row['question']}</s><|assistant|>{row['answer']}</s>" for row in SHORT]
    counts = Counter(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    assert lengths_of(count(path, chat="messages")).histogram == tuple(sorted(counts.items()))


def test_examples_without_text_are_skipped_and_counted(
    tmp_path: Path, count: Callable[..., Job], tokenizer: Tokenizer
) -> None:
    """One of two fields may be empty, or a number."""
    examples = [
        {"question": "", "answer": None},
        {"question": " \n", "answer": ""},
        {"question": None, "answer": "seven"},
        {"question": "how many", "answer": 7},
        {"question": "half a \ud83d character", "answer": ""},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in examples), encoding="utf-8")
    lengths = lengths_of(count(path, text_fields=FIELDS))
    assert (lengths.empty, lengths.empty_at) == (2, (f"{path}:1", f"{path}:2"))
    texts = ["seven", "how many\n7", "half a ? character"]
    assert lengths.histogram == expected_histogram(tokenizer, texts)


def test_at_most_the_given_number_of_examples_is_read(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """The lengths record that more exist; the job's number of examples can be given."""
    path = as_jsonl(tmp_path)
    first = lengths_of(count(path, text_fields=FIELDS, most=50))
    assert (first.examples, first.complete) == (50, False)
    assert count(path, text_fields=FIELDS, most=50, examples=9000).examples == 9000
    assert lengths_of(count(path, text_fields=FIELDS, most=len(ROWS))).complete
    # What stands behind is not even looked at.
    path.write_text(path.read_text(encoding="utf-8") + "not JSON\n", encoding="utf-8")
    assert lengths_of(count(path, text_fields=FIELDS, most=50)).histogram == first.histogram


def test_a_split_is_recognised_by_file_names(tmp_path: Path, count: Callable[..., Job]) -> None:
    """The default is the training split, as in the hub's library."""
    folder = as_shards(tmp_path)
    assert count(folder, text_fields=FIELDS).examples == len(ROWS)
    assert count(folder, text_fields=FIELDS, split="test").examples == len(SHORT)
    made_data.write_jsonl(tmp_path / "data" / "notes.jsonl", [{"a": 1}])
    assert count(folder, text_fields=FIELDS, split="test").examples == len(SHORT)
    (line,) = mistakes_of(count, folder, text_fields=FIELDS, split="tset")
    assert line.startswith(f"--split 'tset': {folder} ")
    assert "'test'" in line


def test_the_fingerprint_depends_on_rendered_examples_and_tokenizer(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """The format and the name of the file do not change it; other examples do."""
    one = lengths_of(count(as_jsonl(tmp_path), text_fields=FIELDS)).fingerprint
    assert lengths_of(count(as_csv(tmp_path), text_fields=FIELDS)).fingerprint == one
    other = made_data.write_jsonl(tmp_path / "other.jsonl", ROWS[::-1])
    assert lengths_of(count(other, text_fields=FIELDS)).fingerprint != one
    assert lengths_of(count(other, text_fields=FIELDS[:1])).fingerprint != one


def written(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a file."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


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
        ({}, ["--text-fields is missing: {} needs it, or template or chat, to render examples"]),
        (
            {"text_fields": FIELDS, "chat": "messages", "named": "gsm8k", "padding": "packed"},
            [
                "--named 'gsm8k': dataset is given as well: keep one",
                "--cutoff is missing: packing needs it",
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
    with pytest.raises(DataError, match="llama-tiny has none of its own: give a folder or a hub"):
        requested_job(request, [shipped["llama-tiny"]])
    two = [shipped["mixtral-8x7b"], shipped["llama-2-7b"]]
    with pytest.raises(DataError, match="mixtral-8x7b, llama-2-7b have different ones"):
        requested_job(request, two)
    bare = written(tmp_path, "config.json", json.dumps(shipped["llama-tiny"].config)).parent
    said = f"--tokenizer '{bare}' (the model's own, as none is given) cannot be loaded (the folder"
    for given, begin in ((None, said), (str(bare), f"--tokenizer '{bare}' cannot be loaded (")):
        with pytest.raises(DataError) as error:
            requested_job(request.model_copy(update={"tokenizer": given}), [find_model(str(bare))])
        assert str(error.value).startswith(begin)
        assert "tokenizer.json" in str(error.value)


def test_a_hub_data_set_without_a_network_is_one_line(
    count: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at once, without repeated attempts."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    (line,) = mistakes_of(count, "openai/gsm8k", subset="main", text_fields=FIELDS)
    assert line.startswith("data set 'openai/gsm8k'")
    assert "cannot be reached" in line


def test_the_hubs_library_streams_without_importing_torch(tmp_path: Path) -> None:
    """A local folder stands in for a data set of the hub; an unknown split is one line."""
    as_shards(tmp_path)
    program = """\
import sys
from orchestrator.datasets import file_formats
from orchestrator.datasets.source import DatasetSource as Source
file_formats.hub_is_reached = lambda: True
examples = list(file_formats.of_hub(Source(sys.argv[1]), ("question",)))
print(len(examples), sorted(examples[0].fields), examples[1].place)
print(list(file_formats.of_hub(Source(sys.argv[1], split="tset"), ("question",)))[0].text)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    streamed, wrong, imported = ended.stdout.splitlines()
    assert streamed == f"{len(ROWS)} ['question'] {tmp_path}: example 2"
    assert wrong.startswith(f"data set '{tmp_path}', split 'tset': ")
    assert imported == "[]"


def shuffled_batches(tokens: Sequence[int], batch_size: int, epochs: int) -> Iterator[list[int]]:
    """Full batches of shuffled epochs."""
    draw = np.random.default_rng(0)
    for _ in range(epochs):
        order = draw.permutation(tokens)
        whole = len(order) // batch_size * batch_size
        yield from order[:whole].reshape(-1, batch_size).tolist()


@pytest.mark.parametrize("cutoff", [None, 90])
def test_padding_agrees_with_transformers_collator(
    cutoff: int | None, tmp_path: Path, count: Callable[..., Job], tokenizer_folder: Path
) -> None:
    """Mean widths agree over shuffled epochs, and no row exceeds the longest."""
    from transformers import (  # noqa: PLC0415 - takes seconds
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
    )

    whole = PreTrainedTokenizerFast.from_pretrained(str(tokenizer_folder))
    collator = DataCollatorWithPadding(whole, pad_to_multiple_of=8)
    workload = count(as_jsonl(tmp_path), text_fields=FIELDS, cutoff=cutoff)
    tokens = np.repeat(*np.transpose(lengths_of(workload).histogram))
    cut = np.minimum(tokens, cutoff or tokens.max())
    assert lengths_of(workload).cut_off(cutoff) == (tokens > cut).sum()
    for batch_size in (2, 16):
        widths = [
            collator([{"input_ids": [1] * length} for length in batch])["input_ids"].shape[1]
            for batch in shuffled_batches(cut, batch_size, 8)
        ]
        expected = padded_tokens(workload, batch_size, 512)
        assert expected == pytest.approx(np.mean(widths), rel=0.01)
        assert max(widths) <= longest_tokens(workload, 512)
        grouped = workload.model_copy(update={"padding": "grouped"})
        assert expected > padded_tokens(grouped, batch_size, 512) > cut.mean()


def test_packed_rows_are_full_and_hold_every_token(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """Examples are concatenated and cut into rows without losing a token."""
    workload = count(as_jsonl(tmp_path), text_fields=FIELDS, padding="packed", cutoff=100)
    stream = [1] * lengths_of(workload).tokens
    packed = [stream[at : at + 100] for at in range(0, len(stream), 100)]
    assert rows(workload) == len(packed)
    assert steps(workload, 4) == 3 * -(-len(packed) // 4)
    assert padded_tokens(workload, 4, 512) == longest_tokens(workload, 512) == 100
    # Of a sample, as many rows as all examples would fill.
    more = workload.model_copy(update={"examples": 10 * workload.examples})
    assert rows(more) == pytest.approx(10 * len(packed), abs=10)


def spec_with(workload: str) -> str:
    """A specification with its workload on separate lines."""
    return ONE_CELL.replace("workload: {examples: 1000, epochs: 3}", f"workload:\n{workload}")


@pytest.fixture
def data_spec(
    count: Callable[..., Job],
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A specification with a data set in the working directory."""
    del count  # its child counts
    monkeypatch.chdir(tmp_path)
    made_data.write_jsonl(tmp_path / "data.jsonl", SHORT)
    lines = ("dataset: data.jsonl", "text_fields: [question, answer]")
    lines = (*lines, f"tokenizer: {tokenizer_folder}", "epochs: 3", "padding: grouped")
    return spec_with("".join(f"  {line}\n" for line in lines))


def test_a_specification_names_its_data_set(data_spec: str) -> None:
    """A data set of the paper or a histogram can be named as well."""
    workload = spec_of(data_spec).workload
    assert (workload.examples, workload.epochs, workload.padding) == (len(SHORT), 3, "grouped")
    assert lengths_of(workload).source == "data.jsonl"
    named = spec_of(spec_with("  {named: math_14k, epochs: 10, cutoff: 512}\n")).workload
    assert (named.examples, named.cutoff) == (13_921, 512)
    Path("l.csv").write_text("tokens,examples\n8,3\n", encoding="utf-8")
    text = spec_with("  {examples: 50, length_histogram: l.csv, epochs: 1}\n")
    assert lengths_of(spec_of(text).workload).histogram == ((8, 3),)


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (
            "answer]",
            "anser]",
            ["9: workload.text_fields: 'anser': no such field in data.jsonl: did"],
        ),
        ("data.jsonl", "date.jsonl", ["8: workload.dataset: date.jsonl: no such file or folder"]),
        ("dataset: ", "datset: ", ["8: workload.datset: unknown key: did you mean 'dataset'?"]),
        (
            "padding: grouped",
            "padding: gruped",
            ["12: workload.padding: must be 'longest', 'group"],
        ),
        ("padding: grouped", "named: gsm8k", ["12: workload.named: 'gsm8k': dataset is given as "]),
        ("padding: grouped", "padding: packed", ["7: workload.cutoff: is missing: packing needs "]),
        (
            "  tokenizer:",
            "  split: x\n  cutoff: 0 #",
            ["11: workload.cutoff: must be at least 1"],
        ),
        (
            "  tokenizer:",
            "  most: 3 #",
            ["7: workload.tokenizer: is missing: llama-tiny has none "],
        ),
        (
            "dataset: data.jsonl",
            "examples: 3",
            ["9: workload.text_fi", "10: workload.tokenizer", "12: workload.padding: 'grouped'"],
        ),
        ("models: [llama-tiny]", "models: [lama-tiny]", ["4: cells[0].models[0]: unknown model"]),
    ],
)
def test_mistakes_of_a_specifications_data_have_their_lines(
    old: str, new: str, lines: Sequence[str], data_spec: str
) -> None:
    """They are reported together with the file's other mistakes."""
    assert data_spec.count(old) == 1
    with pytest.raises(SpecError) as error:
        spec_of(data_spec.replace(old, new).replace("gpus: [cpu]", "gpus: [gpu]"))
    gpu, *mistakes = str(error.value).split("\n")
    assert gpu.startswith("made.yaml:2: gpus[0]: ")
    assert len(mistakes) == len(lines), mistakes
    for line, begin in zip(mistakes, lines, strict=True):
        assert line.startswith(f"made.yaml:{begin}"), line


def test_a_run_keeps_the_counted_lengths_when_its_data_set_is_gone(
    data_spec: str, tmp_path: Path
) -> None:
    """Another data set belongs to another sweep."""
    spec = spec_of(data_spec)
    run = open_run(tmp_path / "run", data_spec, spec)
    data = tmp_path / "data.jsonl"
    data.unlink()
    assert run.spec().workload == spec.workload
    made_data.write_jsonl(data, ROWS)
    with pytest.raises(StoreError, match=r"is another sweep's run \(workload differ\)"):
        open_run(tmp_path / "run", data_spec, spec_of(data_spec))
    made_data.write_jsonl(data, SHORT)
    assert open_run(tmp_path / "run", data_spec, spec_of(data_spec)).spec() == spec
    (tmp_path / "run" / "lengths.json").write_text("{}", encoding="utf-8")
    with pytest.raises(StoreError, match="not lengths of examples"):
        run.spec()


@pytest.mark.parametrize(
    "workload", ["{examples: 1000, epochs: 3}", "{named: openorca, epochs: 3}"]
)
def test_a_run_without_lengths_keeps_none(workload: str, tmp_path: Path) -> None:
    """Its folder has no file of lengths."""
    text = spec_with(f"  {workload}\n")
    run = open_run(tmp_path / "run", text, spec_of(text))
    assert sorted(path.name for path in run.path.iterdir()) == ["models.json", "sweep.yaml"]
    assert run.spec().workload.lengths is None


def test_the_command_prints_lengths_and_padding(
    count: Callable[..., Job],
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Text and JSON agree, and --save writes the histogram."""
    monkeypatch.chdir(tmp_path)
    as_csv(tmp_path)
    options = ["--text-fields", "question,answer", "--tokenizer", str(tokenizer_folder)]
    assert main(["dataset", "data.csv", *options, "--cutoff", "90", "--save", "kept.csv"]) == 0
    said = capsys.readouterr().out
    lengths = lengths_of(count("data.csv", text_fields=FIELDS))
    assert said.startswith("data.csv ")
    assert f"700 examples, {lengths.tokens:,} tokens" in said
    table = {
        cells[1].strip(): [float(cell) for cell in cells[2:5]]
        for line in said.splitlines()
        if len(cells := line.split("|")) == 6 and cells[1].strip().isdigit()
    }
    assert list(table) == ["1", "2", "4", "8", "16", "32", "64"]
    for longest, grouped, packed in table.values():
        assert longest >= grouped >= packed
    assert main(["dataset", "--length-histogram", "kept.csv", "--cutoff", "90", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["source"] == "kept.csv (data)"
    assert [tuple(pair) for pair in printed["histogram"]] == list(lengths.histogram)
    assert printed["cut_off_examples"] == lengths.cut_off(90)
    for size, row in table.items():
        padded = [printed["padded_tokens_per_example"][name][size] for name in PADDINGS]
        assert padded == pytest.approx(row, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "no data set: name a file, a folder or OWNER/NAME, or give --length-histogram"),
        (["openorca", "--save", "x.csv"], "--save x.csv: it is not known how long examples are"),
        (["gsm8k", "--save", "/none/x.csv"], "--save /none/x.csv: cannot be written: No such file"),
        (["math_14k", "--split", "test"], "--split 'test': needs a dataset: "),
    ],
)
def test_an_error_of_the_command_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It exits with 1 and writes to stderr alone."""
    assert main(["dataset", *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(line)
    assert said.err.count("\n") == 1


def test_a_run_is_priced_for_other_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``what-if`` prices another histogram and packing."""
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "run")
    written(tmp_path, "lengths.csv", "tokens,examples\n5,900\n12,100\n")
    other = ["--length-histogram", "lengths.csv", "--cutoff", "16"]
    steps_alone = ["--startup-minutes", "0", "--checkpoint-seconds", "0"]
    rankings = []
    for more in ([], other, [*other, "--packing"]):
        assert main(["what-if", "run", "--json", *steps_alone, *more]) == 0
        rankings.append(json.loads(capsys.readouterr().out))
    assert [ranking["workload"]["examples"] for ranking in rankings] == [1000, 1000, 1000]
    assert [ranking["workload"]["padding"] for ranking in rankings] == [
        "longest",
        "longest",
        "packed",
    ]
    hours = [ranking["offers"][0]["hours"] for ranking in rankings]
    assert hours[2] < hours[0] / 2


def test_dates_inside_messages_are_accepted(tmp_path: Path, count: Callable[..., Job]) -> None:
    """Columnar files have types that JSON lacks."""
    message = {"role": "user", "content": "hello", "at": dt.datetime(2026, 1, 31, tzinfo=dt.UTC)}
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": [message]}]), path)
    assert count(path, chat="messages").examples == 1
