"""Make the pictures of the documentation from real estimates and the runs of ``make demo``.

    python docs/make_pictures.py build/demo

The terminal is drawn by rich as SVG; the report is a screenshot of ``report.html`` by the Chromium
of this machine (``make browser``).
"""

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
ESTIMATE = (
    "finetune-cost estimate --model llama-3.1-8b --method lora --seq-len 512 --examples 5000 "
    "--epochs 3 --gpu A40,A100-80GB-SXM,H100-SXM"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TERMINAL = (110, 50)  # columns and lines
PAGE_PIXELS = {"width": 1280, "height": 800}
COLOURS = 64  # of the screenshot: few, so that the file stays small


def shown_in_a_terminal(command: str) -> str:
    """Output of one of the program's commands, with the codes that a terminal gets."""
    arguments = [sys.executable, "-m", "orchestrator", *shlex.split(command)[1:]]
    read_end, terminal = pty.openpty()
    size = {"COLUMNS": str(TERMINAL[0]), "LINES": str(TERMINAL[1]), "TERM": "xterm"}
    with subprocess.Popen(
        arguments,
        cwd=ROOT,
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        env=os.environ | size,
    ) as child:
        os.close(terminal)
        with os.fdopen(read_end, "rb") as stream:
            parts = []
            while chunk := _chunk(stream.fileno()):
                parts.append(chunk)
    if child.returncode != 0:
        sys.exit(f"{command}: ended with {child.returncode}")
    return b"".join(parts).decode().replace("\r\n", "\n")


def _chunk(descriptor: int) -> bytes:
    """Bytes of a terminal; none at its end, which Linux reports as an error."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def terminal_picture(command: str, file: Path) -> None:
    """Draw a command and what it prints."""
    shown = Text.from_ansi(shown_in_a_terminal(command).rstrip())
    columns = TERMINAL[0]
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True)
        console.print(Text(f"$ {command}", style="bold green"))
        console.print(shown)
    svg = console.export_svg(title="finetune-cost")
    # The fonts that rich names lie on a server; any monospaced one does.
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), "utf-8")


def report_picture(run: Path, file: Path) -> None:
    """Take a screenshot of the top of a run's report."""
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        sys.exit("no Chromium on this machine: make browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport=PAGE_PIXELS, color_scheme="light")
        page.goto((run.resolve() / "report.html").as_uri())
        page.screenshot(path=file)
        browser.close()
    Image.open(file).quantize(COLOURS).save(file, optimize=True)


def main() -> None:
    """Make the pictures."""
    if len(sys.argv) != 2:
        sys.exit("usage: docs/make_pictures.py DEMO")
    demo = Path(sys.argv[1])
    PICTURES.mkdir(exist_ok=True)
    report_picture(demo / "all-gpus", PICTURES / "report.png")
    report_picture(demo / "one-to-eight", PICTURES / "one-to-eight.png")
    report_picture(demo / "laptop", PICTURES / "laptop.png")
    terminal_picture(ESTIMATE, PICTURES / "estimate.svg")


if __name__ == "__main__":
    main()
