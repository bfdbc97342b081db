"""Text of a file that a user names."""

from collections.abc import Callable
from pathlib import Path

from gpu_catalog.errors import UserError

MOST_BYTES = 64 * 2**20


def text_of(path: Path, kind: Callable[[str], UserError], most_bytes: int = MOST_BYTES) -> str:
    """Text of a file, without a byte order mark.

    Args:
        path: the file; a pipe will do.
        kind: error to raise, made from its line.
        most_bytes: largest file to read: a device never ends.

    Raises:
        UserError: of this kind, if the file cannot be read; its line names the file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise kind(f"{path}: no such file") from None
    except IsADirectoryError:
        raise kind(f"{path}: is a folder: name the file in it") from None
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:
        raise kind(f"{path}: is larger than {most_bytes // 2**20} MiB: give the right file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from None
