"""A terminal of a given size, in which a program runs as for a user."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(
    words: Sequence[str], env: Mapping[str, str], cwd: Path, *, rows: int = 24, columns: int = 80
) -> tuple[int, str]:
    """Run a program in a terminal; its exit code and what it wrote there."""
    kept = {name: value for name, value in env.items() if name not in {"COLUMNS", "LINES"}}
    driver, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    program = subprocess.Popen(
        words,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=kept | {"TERM": "xterm"},
        cwd=cwd,
    )
    os.close(terminal)
    written = b"".join(iter(lambda: _read(driver), b""))
    os.close(driver)
    return program.wait(timeout=60), written.decode()


def without_style(text: str) -> str:
    """Text without colours and movements of the cursor."""
    return STYLE.sub("", text)


def _read(driver: int) -> bytes:
    """What was written to a terminal; empty at its end."""
    try:
        return os.read(driver, 65536)
    except OSError:  # on Linux the end of a terminal is an error
        return b""
