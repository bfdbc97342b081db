"""Reading and counting the examples of a data set in every format."""

import datetime as dt
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import data as made_data
from builders.dataset_files import (
    FIELDS,
    ROWS,
    SHORT,
    as_arrow_folder,
    as_csv,
    as_json_list,
    as_json_object,
    as_jsonl,
    as_lines_named_json,
    as_parquet,
    as_semicolons,
    as_shards,
    as_tsv,
    as_zipped_lines,
    joined,
    lengths_of,
    mistakes_of,
)
from tokenizers import Tokenizer

from orchestrator.spec.job import Job

pytest_plugins = ["builders.dataset_counting"]


def expected_histogram(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Histogram of token counts, each with one token for the end of text."""
    counts = Counter(len(tokenizer.encode(text)) + 1 for text in texts)
    return tuple(sorted(counts.items()))


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


def test_dates_inside_messages_are_accepted(tmp_path: Path, count: Callable[..., Job]) -> None:
    """Columnar files have types that JSON lacks."""
    message = {"role": "user", "content": "hello", "at": dt.datetime(2026, 1, 31, tzinfo=dt.UTC)}
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": [message]}]), path)
    assert count(path, chat="messages").examples == 1
