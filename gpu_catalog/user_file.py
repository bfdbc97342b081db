"""Text and data of a file that a user names."""

import json
import os
import stat
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from gpu_catalog.errors import UserError

MOST_BYTES = 64 * 2**20
MOST_LEVELS = 200  # of nested lists and tables; Python's own readers follow a few hundred
WRITER_SECONDS = 10.0  # a shell starts the writer of <(...) at the same time
POLL_SECONDS = 0.02
BYTES_AT_ONCE = 2**20


class NestingError(ValueError):
    """Data are nested more than ``MOST_LEVELS`` deep."""

    def __init__(self) -> None:
        super().__init__(f"is nested more than {MOST_LEVELS} levels deep")


def text_of(path: Path, kind: Callable[[str], UserError], most_bytes: int = MOST_BYTES) -> str:
    """Text of a file, without a byte order mark.

    Args:
        path: the file; a pipe will do, if something writes to it.
        kind: error to raise, made from its line.
        most_bytes: largest file to read.

    Raises:
        UserError: of this kind, if the file cannot be read; its line names the file.
    """
    try:
        with FileIO(path, opener=_open_at_once) as file:
            is_device = _is_device(file)
            content = b"" if is_device else _content(file, most_bytes + 1)
    except FileNotFoundError:
        raise kind(f"{path}: no such file") from None
    except IsADirectoryError:
        raise kind(f"{path}: is a folder: name the file in it") from None
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror}") from None
    if is_device:
        raise kind(f"{path}: is a device: give a file")
    if content is None:
        raise kind(f"{path}: nothing writes to this pipe: give a file, or start its writer first")
    if len(content) > most_bytes:
        raise kind(f"{path}: is larger than {most_bytes // 2**20} MiB: give the right file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from None


def json_of(text: str | bytes) -> Any:
    """Data of a JSON text.

    Raises:
        NestingError: it is nested too deep.
        ValueError: it is not JSON.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise NestingError from None
    signs: Any = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, signs)) > MOST_LEVELS:  # few texts: the levels themselves take longer
        check_levels(data)
    return data


def check_levels(data: Any) -> None:
    """Refuse data that are nested too deep for what reads them further.

    Raises:
        NestingError: they are.
    """
    level = [part for part in [data] if isinstance(part, dict | list)]
    for _ in range(MOST_LEVELS):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
        if not level:
            return
    raise NestingError


def _is_device(file: FileIO) -> bool:
    mode = os.fstat(file.fileno()).st_mode
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; one that is a pipe without waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _content(file: FileIO, most_bytes: int) -> bytes | None:
    """First bytes of a file; None if it is a pipe that nothing writes to."""
    descriptor = file.fileno()
    first: bytes | None = b""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        last = time.monotonic() + WRITER_SECONDS
        # Without a writer a pipe reads as empty; with one that has yet to write, as None.
        while (first := file.read(min(most_bytes, BYTES_AT_ONCE))) == b"":
            if time.monotonic() > last:
                return None
            time.sleep(POLL_SECONDS)
    os.set_blocking(descriptor, True)
    parts = [first or b""]
    left = most_bytes - len(parts[0])
    while left > 0 and (part := file.read(min(left, BYTES_AT_ONCE))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
