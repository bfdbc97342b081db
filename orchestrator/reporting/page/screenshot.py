"""Picture of a page by the Chromium of this machine."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from gpu_catalog.errors import UserError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PIXELS = (1200, 630)  # as sites show the preview of a link
LOAD_MILLISECONDS = 10_000  # on the page's own clock, for its charts
TIMEOUT_SECONDS = 120.0


class BrowserError(UserError):
    """No picture can be made."""


def screenshot(page: str) -> bytes:
    """Top of a page as PNG, ``PIXELS`` large, in the light theme.

    Args:
        page: the HTML; it may request nothing.

    Raises:
        BrowserError: this machine has no Chromium, or it fails.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise BrowserError(
            f"--image: no browser: none of {', '.join(BROWSERS)} is on the path: install Chromium"
        )
    with tempfile.TemporaryDirectory(prefix="report-") as scratch:
        source, image = Path(scratch, "report.html"), Path(scratch, "report.png")
        source.write_text(page, encoding="utf-8")
        options = [
            *("--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
            f"--user-data-dir={scratch}/profile",
            f"--window-size={PIXELS[0]},{PIXELS[1]}",
            f"--virtual-time-budget={LOAD_MILLISECONDS}",
            f"--screenshot={image}",
        ]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium has none for root
        try:
            subprocess.run(
                [browser, *options, source.as_uri()],
                capture_output=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BrowserError(f"--image: {browser} failed: {error}") from None
        if not image.exists():
            raise BrowserError(f"--image: {browser} made no picture: try it by hand")
        return image.read_bytes()
