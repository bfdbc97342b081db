"""Make the pictures of the documentation from real estimates and the runs of ``make demo``.

    python docs/make_pictures.py build/demo

They are of the terminal and the browser (``make browser``) in which the tests look at the program:
rich draws the terminal as SVG, and Chromium the top of ``report.html``.
"""

import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import BrowserContext
from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fakes.browser import Opened, opened_browser
from fakes.terminal import shown

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
ESTIMATE = (
    "finetune-cost estimate --model llama-3.1-8b --method lora --seq-len 512 --examples 5000 "
    "--epochs 3 --gpu A40,A100-80GB-SXM,H100-SXM"
)
REPORTS = {"report": "all-gpus", "one-to-eight": "one-to-eight", "laptop": "laptop"}
"""Runs of the demo by picture."""
ROWS, COLUMNS = 50, 110  # of the terminal
COLOURS = 64  # of a screenshot: few, so that the file stays small


def terminal_picture(command: str, file: Path) -> None:
    """Draw a command and what it prints."""
    words = [sys.executable, "-m", "orchestrator", *shlex.split(command)[1:]]
    code, printed = shown(words, os.environ, ROOT, rows=ROWS, columns=COLUMNS)
    if code != 0:
        sys.exit(f"{command}: ended with {code}")
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text(f"$ {command}", style="bold green"))
        console.print(Text.from_ansi(printed.replace("\r\n", "\n").rstrip()))
    svg = console.export_svg(title="finetune-cost")
    # The fonts that rich names lie on a server; any monospaced one does.
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), "utf-8")


def report_picture(browser: BrowserContext, run: Path, file: Path) -> None:
    """Take a screenshot of the top of a run's report."""
    opened = Opened(browser, run.resolve() / "report.html")
    opened.page.emulate_media(color_scheme="light")
    opened.page.screenshot(path=file)
    if opened.complaints:
        sys.exit(f"{run}: {opened.complaints[0]}")
    Image.open(file).quantize(COLOURS).save(file, optimize=True)


def main() -> None:
    """Make the pictures."""
    if len(sys.argv) != 2:
        sys.exit("usage: docs/make_pictures.py DEMO")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, opened_browser(Path(profile)) as browser:
        for name, run in REPORTS.items():
            report_picture(browser, Path(sys.argv[1]) / run, PICTURES / f"{name}.png")
    terminal_picture(ESTIMATE, PICTURES / "estimate.svg")


if __name__ == "__main__":
    main()
