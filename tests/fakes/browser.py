"""A real headless browser that records its requests and error messages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# An opened part is reported a moment later.
OPEN_ALL = """async () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  await new Promise((done) => setTimeout(done, 100));
}"""


def browser_path() -> str:
    """Path of Chromium.

    Raises:
        FileNotFoundError: Chromium is not on the path.
    """
    paths = [path for name in NAMES if (path := shutil.which(name)) is not None]
    if not paths:
        raise FileNotFoundError(
            f"no browser: these tests open the report in Chromium, and none of {', '.join(NAMES)} "
            "is on the path: install one ('make browser' does on Debian and Ubuntu)"
        )
    return paths[0]


@contextmanager
def opened_browser(profile: Path) -> Iterator[BrowserContext]:
    """Chromium with a profile of its own.

    Args:
        profile: an empty folder.
    """
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=browser_path(),
            headless=True,
            chromium_sandbox=False,
            args=QUIET,
            viewport={"width": 1280, "height": 900},
        )
        yield context
        context.close()


class Opened:
    """A page opened from a file, with the browser's messages and requests since then."""

    def __init__(self, context: BrowserContext, file: Path) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dialog)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]")

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def texts(self, selector: str) -> list[str]:
        """Texts of the elements, in order."""
        return self.page.locator(selector).all_inner_texts()

    def numbers(self, selector: str) -> list[float]:
        """First number in the text of each element."""
        return [
            float(text.split()[0].lstrip("$").replace(",", "")) for text in self.texts(selector)
        ]
