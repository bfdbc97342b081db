"""Training examples as anybody keeps them: files, folders of files, data sets of the hub.

Files are read here, not by ``datasets``: its readers stop at the first broken line, count it from
the start of a block rather than of the file, and take seconds to import.
"""

import csv
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from gpu_catalog.near import did_you_mean
from trials.models.tokens import hub_is_reached

FORMATS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
ZIPPED = ".gz"
KNOWN_FORMATS = f"{', '.join(FORMATS)}, or the texts among them with {ZIPPED}"
# What a folder of the hub's library holds beside the examples.
NOT_EXAMPLES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
NOT_EXAMPLES |= {"state.json", "config.json", "tokenizer.json", "tokenizer_config.json"}
# Words that name a split in a file's name, as on the hub.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
UNSPLIT = "data"  # shards that the hub's library saves to disk; the folder names the split
FIRST_SPLIT = "train"
BOM = b"\xef\xbb\xbf"  # what some editors begin a text with
AT_ONCE = 1000  # rows read from a columnar file
LONGEST_FIELD = 2**31 - 1  # csv's own limit is 128 KiB
NOT_UTF8 = "not UTF-8 text: save it as UTF-8"
MOST_COLUMNS = 12  # named in a message


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake.

    Attributes:
        part: what was given wrong: a key of ``workload`` in a specification, an option without
            its dashes, with underscores.
        text: what is wrong, with the value, and what to do.
    """

    part: str
    text: str


class DataError(ValueError):
    """A data set that cannot be used; the message has one line for each mistake."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        # A file needs no option before its name.
        lines = (
            m.text if m.part == "dataset" else f"--{m.part.replace('_', '-')} {m.text}"
            for m in self.mistakes
        )
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class Example:
    """One example: where it stands, and its fields."""

    place: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """Where examples are.

    Attributes:
        name: a file, a folder, or a hub name.
        subset: which of a hub data set's configurations; None for its only one.
        split: which part; None for training.
    """

    name: str
    subset: str | None = None
    split: str | None = None

    @property
    def path(self) -> Path | None:
        """The file or folder; None for a hub name."""
        path = Path(self.name).expanduser()
        stated = self.name.startswith((".", "/", "~")) or _format(path) in FORMATS
        return path if stated or path.exists() or self.name.count("/") != 1 else None


def examples(source: Source, fields: Sequence[str]) -> Iterator[Example | Mistake]:
    """The examples one by one, and what stands there that is none.

    Args:
        source: where they are.
        fields: those that are wanted; others may be left out.

    Raises:
        DataError: there is nothing to read.
    """
    path = source.path
    if path is None:
        return _of_hub(source, fields)
    mistakes = []
    if source.subset is not None:
        mistakes.append(Mistake("subset", f"{source.subset!r}: is of a hub data set: leave it out"))
    if source.split is not None and path.is_file():
        mistakes.append(Mistake("split", f"{source.split!r}: one file is not split: leave it out"))
    if mistakes:
        raise DataError(mistakes)
    files = _files(path, source) if path.is_dir() else [_checked_file(path)]
    return itertools.chain.from_iterable(_of_file(file, fields) for file in files)


def columns_text(columns: Iterable[str]) -> str:
    """Names of columns, the first few of them."""
    names = list(columns)
    more = f" and {len(names) - MOST_COLUMNS} more" if len(names) > MOST_COLUMNS else ""
    return ", ".join(names[:MOST_COLUMNS]) + more


def _format(path: Path) -> str:
    name = path.name.casefold().removesuffix(ZIPPED)
    return Path(name).suffix


def _wrong(text: str) -> DataError:
    return DataError([Mistake("dataset", text)])


def _checked_file(path: Path) -> Path:
    if not path.exists():
        hint = "" if path.suffix else "; a hub data set is OWNER/NAME"
        raise _wrong(f"{path}: no such file or folder{hint}")
    zipped = path.name.casefold().endswith(ZIPPED)
    if _format(path) not in FORMATS or (zipped and _format(path) in {".parquet", ".arrow"}):
        raise _wrong(f"{path}: unknown format {path.suffix!r}: known are {KNOWN_FORMATS}")
    return path


def _files(folder: Path, source: Source) -> list[Path]:
    """The files of a folder's split."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if _format(path) in FORMATS
        and path.is_file()
        and path.name not in NOT_EXAMPLES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise _wrong(f"{folder}: holds no file of examples: known are {KNOWN_FORMATS}")
    splits: dict[str, list[Path]] = {}
    for path in files:
        splits.setdefault(_split(path.relative_to(folder)) or "", []).append(path)
    if set(splits) == {""}:
        splits = {FIRST_SPLIT: files}
    wanted = source.split or FIRST_SPLIT
    if wanted not in splits:
        names = sorted(name for name in splits if name)
        near = did_you_mean(wanted, names) or f": it has {', '.join(names)}"
        raise DataError([Mistake("split", f"{wanted!r}: {folder} has no such split{near}")])
    chosen = splits[wanted]
    formats = sorted({_format(path) for path in chosen})
    if len(formats) > 1:
        raise _wrong(
            f"{folder}: holds {' and '.join(formats)} files, perhaps the same examples twice: "
            "name a file, or a folder with one kind"
        )
    return chosen


def _split(path: Path) -> str | None:
    """The split that the name of a file or its folder states, if any."""
    stem = path.name[: path.name.index(".")] if "." in path.name else path.name
    shard = SHARD.fullmatch(stem)
    if shard is not None and shard[1] != UNSPLIT:
        return shard[1]
    words = re.split(r"[^a-z0-9]+", path.with_name(stem).as_posix().casefold())
    return next((split for split, names in SPLITS.items() if set(names) & set(words)), None)


def _of_file(path: Path, fields: Sequence[str]) -> Iterator[Example | Mistake]:
    try:
        match _format(path):
            case ".parquet":
                yield from _of_parquet(path, fields)
            case ".arrow":
                yield from _of_arrow(path)
            case ".csv" | ".tsv":
                yield from _of_csv(path)
            case _:
                yield from _of_json(path, fields)
    except UnicodeDecodeError as error:
        yield _at(path, f"{NOT_UTF8} (byte {error.start})")
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        yield _at(path, f"cannot be read: {why}")


def _at(place: object, text: str) -> Mistake:
    return Mistake("dataset", f"{place}: {text}")


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path) if path.name.casefold().endswith(ZIPPED) else path.open("rb")


def _of_json(path: Path, fields: Sequence[str]) -> Iterator[Example | Mistake]:
    with _opened(path) as file:
        begin = file.read(AT_ONCE).removeprefix(BOM).lstrip()[:1]
        file.seek(0)
        lines = begin != b"[" and (_format(path) != ".json" or _is_example(file.readline(), fields))
    return _of_lines(path) if lines else _of_document(path)


def _is_example(line: bytes, fields: Sequence[str]) -> bool:
    """Whether the first line of a file is an example, and not all or the beginning of them."""
    try:
        data = json.loads(line.removeprefix(BOM))
    except (ValueError, RecursionError):
        return False
    if not isinstance(data, dict):
        return True
    return not data.keys().isdisjoint(fields) or not any(map(_is_list_of_objects, data.values()))


def _of_lines(path: Path) -> Iterator[Example | Mistake]:
    """JSON Lines: an object a line."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            text = line.removeprefix(BOM) if number == 1 else line
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
            except UnicodeDecodeError:
                yield _at(place, NOT_UTF8)
            except (ValueError, RecursionError) as error:
                yield _at(place, f"not JSON ({_reason(error)}): each line is an object of fields")
            else:
                yield _example(place, fields)


def _of_document(path: Path) -> Iterator[Example | Mistake]:
    """One JSON document: a list of examples, or an object that holds one."""
    with _opened(path) as file:
        text = file.read().removeprefix(BOM).decode()
    if not text.strip():
        return
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        yield _at(place, f"not JSON ({_reason(error)}): repair it")
        return
    if isinstance(data, dict):
        lists = [value for value in data.values() if _is_list_of_objects(value)]
        if len(lists) != 1:
            wrong = f"an object with {columns_text(data)} and not one list of examples"
            yield _at(path, f"{wrong}: make it a list of objects, or an object a line")
            return
        data = lists[0]
    if not isinstance(data, list):
        yield _at(path, f"{data!r} is no list of examples: make it a list of objects")
        return
    for number, fields in enumerate(data, start=1):
        yield _example(f"{path}: example {number}", fields)


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _reason(error: Exception) -> str:
    return getattr(error, "msg", None) or str(error)


def _example(place: str, fields: object) -> Example | Mistake:
    if isinstance(fields, dict):
        return Example(place, fields)
    kind = "a list" if isinstance(fields, list) else repr(fields)[:40]
    return _at(place, f"must be an object of fields, not {kind}")


def _of_csv(path: Path) -> Iterator[Example | Mistake]:
    csv.field_size_limit(LONGEST_FIELD)
    with _opened(path) as binary:
        # Lines are taken one by one and decoded as they come: a field may hold some of them.
        lines = (line.decode() for line in binary)
        first = next(lines, "").removeprefix("\ufeff")
        tabbed = _format(path) == ".tsv"
        sign = "\t" if tabbed else next((sign for sign in ",;\t" if sign in first), ",")
        rows = csv.reader(itertools.chain([first], lines), delimiter=sign, strict=True)
        try:
            head = next(rows, [])
            for row in rows:
                place = f"{path}:{rows.line_num}"
                if not row:
                    continue
                if len(row) != len(head):
                    text = f"{len(row)} fields, where the head has {len(head)}"
                    yield _at(place, f"{text}: quote those with a {sign!r} or a line end in them")
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
            # Where a field is missing, the mistake lists all columns.
            columns = list(fields) if set(fields) <= set(file.schema_arrow.names) else None
            yield from _of_batches(path, file.iter_batches(AT_ONCE, columns=columns))
    except pa.ArrowException as error:
        yield _at(path, f"not a Parquet file ({str(error).splitlines()[0]})")


def _of_arrow(path: Path) -> Iterator[Example | Mistake]:
    """As the hub's library saves to disk."""
    import pyarrow as pa  # noqa: PLC0415 - only columnar files need it

    try:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as batches:
            yield from _of_batches(path, batches)
    except pa.ArrowException as error:
        yield _at(path, f"not a stream of Arrow ({str(error).splitlines()[0]})")


def _of_batches(path: Path, batches: Iterable[Any]) -> Iterator[Example]:
    number = itertools.count(1)
    for batch in batches:
        for row in batch.to_pylist():
            yield Example(f"{path}: example {next(number)}", row)


def _of_hub(source: Source, fields: Sequence[str]) -> Iterator[Example | Mistake]:
    """A data set of the hub, fetched as it is read."""
    label = f"{source.name!r}"
    remedy = "check the name, the network and HF_TOKEN, or give a file"
    if not hub_is_reached():
        raise _wrong(f"data set {label}: the hub cannot be reached: {remedy}")
    import datasets  # noqa: PLC0415 - takes a second, and only this needs it

    # It would import torch to be one of its data sets.
    datasets.config.TORCH_AVAILABLE = False
    datasets.disable_progress_bars()
    split = source.split or FIRST_SPLIT
    try:
        data = datasets.load_dataset(source.name, source.subset, split=split, streaming=True)
        if set(fields) <= set(data.features or ()):
            data = data.select_columns(list(fields))
        for number, row in enumerate(data, start=1):
            yield Example(f"{source.name}: example {number}", row)
    except Exception as error:  # noqa: BLE001 - whatever its library, the network or a file of it raises
        why = " ".join(str(error).split()) or type(error).__name__
        yield Mistake("dataset", f"data set {label}, split {split!r}: {why}: {remedy}")
