"""Options that name files: only those inside a folder, symbolic links followed."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpu_catalog.errors import UserError
from orchestrator.pricing.prices_in_use import NAMES
from orchestrator.request import names_in

FILES = ("run", "config", "constants", "catalog", "length_histogram", "learned")
"""Options that are always paths."""
FILES_OR_NAMES = ("model", "tokenizer", "dataset")
"""Options that are a path, or else the name of a preset or on the hub."""


class OutsideError(UserError):
    """A path leads out of the folder that the server may read; a line for each."""


def check_confined(options: Mapping[str, object], root: Path) -> None:
    """Check that every path among options lies in a folder, with everything below it.

    Raises:
        OutsideError: a path does not, or is a bucket.
    """
    root = root.resolve()
    mistakes = [
        f"{name} {text}: this server reads only files in {root}, where it was started"
        for name, text in _paths(options, root)
        if "://" in text or not _is_inside(root / Path(text).expanduser(), root)
    ]
    if mistakes:
        raise OutsideError("\n".join(mistakes))


def _paths(options: Mapping[str, object], root: Path) -> Iterator[tuple[str, str]]:
    for name in FILES:
        if options.get(name) is not None:
            yield name, str(options[name])
    for name in FILES_OR_NAMES:
        text = str(options.get(name) or "")
        if text.startswith((".", "/", "~")) or (text and os.path.lexists(root / text)):
            yield name, text
    for text in names_in(options.get("prices") or ()):
        if text not in NAMES:
            yield "prices", str(text)


def _is_inside(path: Path, root: Path) -> bool:
    if not path.resolve().is_relative_to(root):
        return False
    below = (
        Path(folder, name)
        for folder, folders, files in os.walk(path)
        for name in (*folders, *files)
    )
    return all(one.resolve().is_relative_to(root) for one in below if one.is_symlink())
