"""Data sets in every format that can be read, and what a job makes of them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from builders import data as made_data
from orchestrator.datasets.lengths import DataLengths
from orchestrator.datasets.source import DataError
from orchestrator.spec.job import Job

ROWS = made_data.rows(700)
SHORT = ROWS[:12]
FIELDS = ("question", "answer")


def joined(row: made_data.Row) -> str:
    """Text of a row: its fields, joined."""
    return f"{row['question']}\n{row['answer']}"


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


def written(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a file."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
