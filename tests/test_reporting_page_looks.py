"""Pages of a report at three widths, in both themes and in print: axe-core finds no violation.

Each leaves a screenshot in ``build/screenshots`` for people to look at.
"""

import dataclasses
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from builders.catalog_offers import offer
from builders.long_cases import long_cases
from builders.report_pages import MADE, report_page
from builders.runs import ONE_CELL, ROUTED, SIMULATED, results
from fakes.browser import OPEN_ALL, Opened
from playwright.sync_api import BrowserContext, Page, expect

from orchestrator.pricing.price_history import PriceCourse
from orchestrator.reporting.comparison import compare
from orchestrator.reporting.html_report import html_comparison

ROOT = Path(__file__).parent
AXE = (ROOT / "vendor" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
SCREENSHOTS = ROOT.parent / "build" / "screenshots"
# Every width and both themes; the other pairs take as long again.
LOOKS = pytest.mark.parametrize(
    ("scheme", "width"),
    [
        *(("light", 1440), ("dark", 390)),
        *long_cases((("dark", 1024), ("dark", 1440), ("light", 1024), ("light", 390))),
    ],
)
OFFERS = "catalog:\n  offers:\n" + "".join(
    offer(0.02 * (n + 1), provider="them", instance=f"big{n}") for n in range(30)
)
ROUTES = ROUTED.partition("cells:\n")[2].partition("workload:")[0]
TEXT = ONE_CELL.replace("workload:", f"{SIMULATED}{ROUTES}workload:") + OFFERS
DAYS = [date(2026, 11, day) for day in (1, 8, 15, 22)]
COURSES = [
    PriceCourse(gpu, market, tuple(zip(DAYS, usd, strict=True)))
    for gpu, market, usd in (
        ("A40", "on-demand", (0.44, 0.44, 0.49, 0.49)),
        ("H100-SXM", "on-demand", (2.29, 2.69, 3.25, 3.63)),
        ("H100-SXM", "spot", (0.8, 0.9, 1.6, 1.8)),
    )
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with measured, simulated and sparse cells."""
    run = dataclasses.replace(results(TEXT), price_courses=COURSES)
    return report_page(tmp_path_factory.mktemp("run"), run)


@pytest.fixture
def scheme() -> str:
    """The theme of a test that does not depend on it."""
    return "light"


@pytest.fixture
def page(browser: BrowserContext, file: Path, scheme: Any) -> Iterator[Page]:
    """The opened report in a theme."""
    opened = Opened(browser, file)
    opened.page.emulate_media(color_scheme=scheme)
    yield opened.page
    assert opened.complaints == []
    opened.page.close()


def violations(page: Page) -> list[tuple[str, str]]:
    """Rules of axe-core that the page breaks, each with the first place."""
    page.evaluate(AXE)
    found = page.evaluate("async () => (await axe.run()).violations")
    return [(rule["id"], rule["nodes"][0]["html"]) for rule in found]


@LOOKS
def test_a_report_is_accessible_and_no_wider_than_the_screen(
    page: Page, scheme: str, width: int
) -> None:
    """With all of its parts open; the table of offers shows all columns without scrolling."""
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate(OPEN_ALL)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"report-{width}-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide, shown = page.locator("#ranking .scroll").evaluate("e => [e.scrollWidth, e.clientWidth]")
    assert wide <= shown
    assert violations(page) == []


def test_the_course_of_prices_is_drawn_for_each_market(page: Page) -> None:
    """A point for each snapshot and GPU; the scale says so where it is logarithmic."""
    charts = page.locator("#prices .chart svg")
    expect(charts).to_have_count(2)
    expect(page.locator("#on-demand-prices svg")).to_contain_text("log scale")
    expect(page.locator("#spot-prices svg")).not_to_contain_text("log scale")
    expect(page.locator("#prices-key span")).to_have_text(["A40", "H100-SXM"])
    page.locator("#prices-numbers summary").click()
    rows = page.locator("#prices-numbers tbody tr")
    expect(rows).to_have_count(12)
    expect(rows.last).to_have_text(re.compile("H100-SXM.*spot.*2026-11-22.*1.8"))


def test_a_phone_shows_a_card_for_each_offer(page: Page) -> None:
    """Cost and time stand first, side by side, each with its name."""
    page.set_viewport_size({"width": 390, "height": 900})
    card = page.locator("#ranking tbody tr").first
    cost, time, odds = (card.locator("td").nth(n) for n in range(3))
    assert re.match(r"\$0\.\d+", cost.inner_text())
    assert re.match(r"0\.\d+ h", time.inner_text())
    boxes = [part.bounding_box() for part in (cost, time, odds)]
    (left, top), (right, beside), (_, below) = ((b["x"], b["y"]) for b in boxes if b is not None)
    assert left < right
    assert top == beside < below
    names = cost.evaluate("e => getComputedStyle(e, '::before').content")
    assert names == '"cost"'
    page.get_by_role("button", name="time").click()
    assert page.locator("#ranking th[aria-sort=ascending]").inner_text().startswith("time")


@pytest.mark.parametrize("scheme", ["dark"])
def test_print_has_the_answer_and_the_offers(page: Page) -> None:
    """Without controls and closed parts, and on white."""
    page.emulate_media(media="print")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "report-print.png", full_page=True)
    assert page.locator("#filters").is_hidden()
    assert page.locator(".answer:not([hidden]) .lead").is_visible()
    assert page.locator("#ranking tbody tr").first.is_visible()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"


def test_labels_are_words(page: Page) -> None:
    """None of the program's own names is on the page."""
    page.evaluate(OPEN_ALL)
    shown = " ".join(page.locator("main").all_inner_texts())
    own = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", shown))
    assert own == set()
    page.select_option("#job", label="mixtral-tiny, 2 of 8 experts, 16 tokens")
    labels = page.locator("#largest-chart svg text")
    expect(labels.first).to_have_text("cpu, 2 of 8 experts, 16 tokens")


@LOOKS
def test_a_comparison_is_accessible(
    browser: BrowserContext, scheme: Any, width: int, tmp_path: Path
) -> None:
    """The page of two runs, in both themes."""
    run = results(TEXT)
    path = tmp_path / "both.html"
    path.write_text(html_comparison(compare(run, run, ("old", "new")), MADE), encoding="utf-8")
    opened = Opened(browser, path)
    opened.page.emulate_media(color_scheme=scheme)
    opened.page.set_viewport_size({"width": width, "height": 900})
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    opened.page.screenshot(path=SCREENSHOTS / f"comparison-{width}-{scheme}.png", full_page=True)
    assert violations(opened.page) == []
    opened.page.close()
