"""Readers of JSON, JSON Lines, CSV, Parquet and Arrow files and of the hub's data sets."""

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from gpu_catalog.user_file import NestingError, json_of
from orchestrator.datasets.source import (
    ZIPPED,
    DataError,
    DatasetSource,
    Example,
    Mistake,
    data_format,
)
from trials.records.model import hub_is_reached

FIRST_SPLIT = "train"
BOM = b"\xef\xbb\xbf"  # some editors begin a text with it
AT_ONCE = 1000  # rows read from a columnar file
MIB = 2**20
MOST_BYTES_OF_LINE = 64 * MIB
"""Longest line, unpacked; a field of a CSV may have as many characters over several lines. Lines of
some MB are known; a packed file of zeros unpacks to a thousand times its size."""
MOST_BYTES_OF_DOCUMENT = 2048 * MIB
"""Largest JSON document, unpacked. It is read as a whole, which takes several times as much."""
NOT_UTF8 = "not UTF-8 text: save it as UTF-8"
MOST_COLUMNS = 12  # named in a message


def columns_text(columns: Iterable[str]) -> str:
    """Names of the first columns, and the number of others."""
    names = list(columns)
    more = f" and {len(names) - MOST_COLUMNS} more" if len(names) > MOST_COLUMNS else ""
    return ", ".join(names[:MOST_COLUMNS]) + more


def wrong(text: str) -> DataError:
    """Error for a data set as a whole."""
    return DataError([Mistake("dataset", text)])


def of_file(path: Path, fields: Sequence[str]) -> Iterator[Example | Mistake]:
    """Examples of a file, and its mistakes."""
    try:
        match data_format(path):
            case ".parquet":
                yield from _of_parquet(path, fields)
            case ".arrow":
                yield from _of_arrow(path)
            case ".csv" | ".tsv":
                yield from _of_csv(path)
            case _:
                yield from _of_json(path, fields)
    except _TooLongError as error:
        yield _at(f"{path}:{error.number}", str(error))
    except UnicodeDecodeError as error:
        yield _at(path, f"{NOT_UTF8} (byte {error.start})")
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        yield _at(path, f"cannot be read: {why}")


def _at(place: object, text: str) -> Mistake:
    return Mistake("dataset", f"{place}: {text}")


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path) if path.name.casefold().endswith(ZIPPED) else path.open("rb")


def _lines(file: gzip.GzipFile | BufferedReader) -> Iterator[bytes]:
    """Lines of a file.

    Raises:
        _TooLongError: at a line that is too long.
    """
    number = 0
    while line := file.readline(MOST_BYTES_OF_LINE + 1):
        number += 1
        if len(line) > MOST_BYTES_OF_LINE:
            raise _TooLongError(number)
        yield line


class _TooLongError(Exception):
    """A line is too long.

    Attributes:
        number: its number, from 1.
    """

    def __init__(self, number: int) -> None:
        limit = f"longer than {MOST_BYTES_OF_LINE // MIB} MiB"
        super().__init__(f"is {limit}: give each example a line of its own")
        self.number = number


def _of_json(path: Path, fields: Sequence[str]) -> Iterator[Example | Mistake]:
    with _opened(path) as file:
        begin = file.read(AT_ONCE).removeprefix(BOM).lstrip()[:1]
        file.seek(0)
        lines = begin != b"[" and (
            data_format(path) != ".json"
            or _is_example(file.readline(MOST_BYTES_OF_LINE + 1), fields)
        )
    return _of_lines(path) if lines else _of_document(path)


def _is_example(line: bytes, fields: Sequence[str]) -> bool:
    """Whether the first line of a file is one example rather than the start of a document."""
    try:
        data = json_of(line.removeprefix(BOM))
    except ValueError:  # also where the line is cut
        return False
    if not isinstance(data, dict):
        return True
    return not data.keys().isdisjoint(fields) or not any(map(_is_list_of_objects, data.values()))


def _of_lines(path: Path) -> Iterator[Example | Mistake]:
    """Examples of JSON Lines: an object per line."""
    with _opened(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            yield from _of_line(f"{path}:{number}", line.removeprefix(BOM) if number == 1 else line)


def _of_line(place: str, line: bytes) -> Iterator[Example | Mistake]:
    """Example of a line of JSON Lines; none of an empty one."""
    if not line.strip():
        return
    try:
        fields = json_of(line)
    except UnicodeDecodeError:
        yield _at(place, NOT_UTF8)
    except ValueError as error:
        yield _at(place, f"{_reason(error)}: each line must be an object of fields")
    else:
        yield _example(place, fields)


def _of_document(path: Path) -> Iterator[Example | Mistake]:
    """Examples of a JSON document: a list of objects, or an object with one such list."""
    content = bytearray()
    with _opened(path) as file:
        while part := file.read(MIB):
            content += part
            if len(content) > MOST_BYTES_OF_DOCUMENT:
                limit = f"a JSON document larger than {MOST_BYTES_OF_DOCUMENT // MIB} MiB"
                yield _at(path, f"{limit}: write an example per line, as JSON Lines (.jsonl)")
                return
    del content[: len(BOM) * content.startswith(BOM)]
    text = content.decode()
    content.clear()  # it may be gigabytes
    if not text.strip():
        return
    try:
        data = json_of(text)
    except ValueError as error:
        place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        yield _at(place, f"{_reason(error)}: repair it")
        return
    if isinstance(data, dict):
        lists = [value for value in data.values() if _is_list_of_objects(value)]
        if len(lists) != 1:
            text = f"an object with {columns_text(data)}, not with one list of examples"
            yield _at(path, f"{text}: make it a list of objects, or an object per line")
            return
        data = lists[0]
    if not isinstance(data, list):
        yield _at(path, f"{data!r} is not a list of examples: make it a list of objects")
        return
    for number, fields in enumerate(data, start=1):
        yield _example(f"{path}: example {number}", fields)


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _reason(error: Exception) -> str:
    if isinstance(error, NestingError):
        return str(error)
    return f"not JSON ({getattr(error, 'msg', None) or error})"


def _example(place: str, fields: object) -> Example | Mistake:
    if isinstance(fields, dict):
        return Example(place, fields)
    kind = "a list" if isinstance(fields, list) else repr(fields)[:40]
    return _at(place, f"must be an object of fields, not {kind}")


def _of_csv(path: Path) -> Iterator[Example | Mistake]:
    csv.field_size_limit(MOST_BYTES_OF_LINE)  # its own limit is 128 KiB
    with _opened(path) as binary:
        # Decoded line by line, so that a mistake has its line; a field may span several lines.
        lines = (line.decode() for line in _lines(binary))
        first = next(lines, "").removeprefix("\ufeff")
        tabbed = data_format(path) == ".tsv"
        sign = "\t" if tabbed else next((sign for sign in ",;\t" if sign in first), ",")
        rows = csv.reader(itertools.chain([first], lines), delimiter=sign, strict=True)
        try:
            head = next(rows, [])
            for row in rows:
                place = f"{path}:{rows.line_num}"
                if not row:
                    continue
                if len(row) != len(head):
                    text = f"{len(row)} fields, where the header has {len(head)}"
                    yield _at(place, f"{text}: quote fields that contain {sign!r} or a line end")
                else:
                    yield Example(place, dict(zip(head, row, strict=True)))
        except csv.Error as error:
            yield _at(f"{path}:{rows.line_num}", f"not CSV ({error}): repair the line")
        except UnicodeDecodeError:
            yield _at(f"{path}:{rows.line_num + 1}", NOT_UTF8)


def _of_parquet(path: Path, fields: Sequence[str]) -> Iterator[Example | Mistake]:
    import pyarrow as pa  # noqa: PLC0415 - only columnar files need it
    import pyarrow.parquet as pq  # noqa: PLC0415 - as above

    try:
        with pq.ParquetFile(path) as file:
            # All columns if a field is missing: the mistake lists them.
            columns = list(fields) if set(fields) <= set(file.schema_arrow.names) else None
            yield from _of_batches(path, file.iter_batches(AT_ONCE, columns=columns))
    except pa.ArrowException as error:
        yield _at(path, f"not a Parquet file ({str(error).splitlines()[0]})")


def _of_arrow(path: Path) -> Iterator[Example | Mistake]:
    """Examples of an Arrow stream, as the hub's library saves it."""
    import pyarrow as pa  # noqa: PLC0415 - only columnar files need it

    try:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as batches:
            yield from _of_batches(path, batches)
    except pa.ArrowException as error:
        yield _at(path, f"not an Arrow stream ({str(error).splitlines()[0]})")


def _of_batches(path: Path, batches: Iterable[Any]) -> Iterator[Example | Mistake]:
    number = itertools.count(1)
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except OverflowError:
            names = zip(batch.schema.names, batch.columns, strict=True)
            late = columns_text(name for name, column in names if not _is_of_python(column))
            text = "dates of years beyond 1 to 9999, or durations as long, are not read"
            yield _at(path, f"{late}: {text}: leave the column out, or write it as text")
            return
        for row in rows:
            yield Example(f"{path}: example {next(number)}", row)


def _is_of_python(column: Any) -> bool:
    """Whether Python has the values of a column: its dates have years from 1 to 9999."""
    try:
        column.to_pylist()
    except OverflowError:
        return False
    return True


def of_hub(source: DatasetSource, fields: Sequence[str]) -> Iterator[Example | Mistake]:
    """Examples of a data set of the hub, streamed."""
    label = f"{source.name!r}"
    remedy = "check the name, the network and HF_TOKEN, or give a file"
    if not hub_is_reached():
        raise wrong(f"data set {label}: the hub cannot be reached: {remedy}")
    import datasets  # noqa: PLC0415 - takes a second, and only this needs it

    # Else it imports torch, which takes seconds.
    datasets.config.TORCH_AVAILABLE = False
    datasets.disable_progress_bars()
    split = source.split or FIRST_SPLIT
    try:
        data = datasets.load_dataset(source.name, source.subset, split=split, streaming=True)
        if set(fields) <= set(data.features or ()):
            data = data.select_columns(list(fields))
        for number, row in enumerate(data, start=1):
            yield Example(f"{source.name}: example {number}", row)
    except Exception as error:  # noqa: BLE001 - its library, the network or a file may raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        yield Mistake("dataset", f"data set {label}, split {split!r}: {why}: {remedy}")
