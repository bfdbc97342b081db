"""Reader of training examples in files, folders and data sets of the hub.

Files are not read by ``datasets``: its readers stop at the first broken line, count lines from the
start of a block rather than of the file, and take seconds to import.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_catalog.suggestions import did_you_mean
from orchestrator.datasets.file_formats import FIRST_SPLIT, of_file, of_hub, wrong
from orchestrator.datasets.source import (
    FORMATS,
    KNOWN_FORMATS,
    ZIPPED,
    DataError,
    DatasetSource,
    Example,
    Mistake,
    data_format,
)

# Files of the hub's library beside the examples.
NOT_EXAMPLES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
NOT_EXAMPLES |= {"state.json", "config.json", "tokenizer.json", "tokenizer_config.json"}
# Words in a file's name that name its split, as on the hub.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
UNSPLIT = "data"  # shards that the hub's library saves to disk; the folder names the split


def examples(source: DatasetSource, fields: Sequence[str]) -> Iterator[Example | Mistake]:
    """Examples one by one, with a mistake in place of each that cannot be read.

    Raises:
        DataError: there is nothing to read.
    """
    path = source.path
    if path is None:
        return of_hub(source, fields)
    mistakes = []
    if source.subset is not None:
        text = f"{source.subset!r}: only a hub data set has subsets: remove it"
        mistakes.append(Mistake("subset", text))
    if source.split is not None and path.is_file():
        text = f"{source.split!r}: a single file has no splits: remove it"
        mistakes.append(Mistake("split", text))
    if mistakes:
        raise DataError(mistakes)
    files = _files(path, source) if path.is_dir() else [_checked_file(path)]
    return itertools.chain.from_iterable(of_file(file, fields) for file in files)


def _checked_file(path: Path) -> Path:
    if not path.exists():
        hint = "" if path.suffix else "; a hub data set is OWNER/NAME"
        raise wrong(f"{path}: no such file or folder{hint}")
    if path.is_fifo():
        raise wrong(f"{path}: is a pipe, and examples are read more than once: give a file")
    if not path.is_file():
        raise wrong(f"{path}: is a device or a socket: give a file")
    zipped = path.name.casefold().endswith(ZIPPED)
    if data_format(path) not in FORMATS or (zipped and data_format(path) in {".parquet", ".arrow"}):
        raise wrong(f"{path}: unknown format {path.suffix!r}: use {KNOWN_FORMATS}")
    return path


def _files(folder: Path, source: DatasetSource) -> list[Path]:
    """Files of a split in a folder."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if data_format(path) in FORMATS
        and path.is_file()
        and path.name not in NOT_EXAMPLES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise wrong(f"{folder}: has no file of examples: use {KNOWN_FORMATS}")
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
    formats = sorted({data_format(path) for path in chosen})
    if len(formats) > 1:
        raise wrong(
            f"{folder}: has {' and '.join(formats)} files, perhaps with the same examples: "
            "give a file, or a folder with one format"
        )
    return chosen


def _split(path: Path) -> str | None:
    """Split that the name of a file or its folder gives, or None."""
    stem = path.name.partition(".")[0]
    shard = SHARD.fullmatch(stem)
    if shard is not None and shard[1] != UNSPLIT:
        return shard[1]
    words = re.split(r"[^a-z0-9]+", path.with_name(stem).as_posix().casefold())
    return next((split for split, names in SPLITS.items() if set(names) & set(words)), None)
