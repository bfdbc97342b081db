"""A view of the report: its filters, what follows them, and the address that holds it."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from urllib.parse import quote

import pytest
from builders.catalog_offers import offer
from builders.report_pages import report_page
from builders.runs import ONE_CELL, SIMULATED, results
from fakes.browser import Opened
from playwright.sync_api import BrowserContext, Page, expect

LEAD = ".answer:not([hidden]) .lead"
DOUBTS = ".answer:not([hidden]) .warn"
EIGHT = "A40, L40S, A100-80GB-SXM, H100-SXM, H200-SXM, B200, RTX-4090, RTX-5090"
TEXT_PIXELS = 12  # height of the text; its box has an outline, too
JOB = "llama-2-7b, 64 tokens"
OFFERS = f"catalog:\n  offers:\n{offer(0.02, instance='desk')}"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with a measured job, and one that is simulated on eight GPUs."""
    simulated = SIMULATED.replace("A40, H100-SXM", EIGHT)
    text = ONE_CELL.replace("workload:", f"{simulated}workload:") + OFFERS
    return report_page(tmp_path_factory.mktemp("run"), results(text))


@pytest.fixture
def report(browser: BrowserContext, file: Path) -> Iterator[Opened]:
    """The opened report, with the job of eight GPUs; at the end, the console is empty."""
    opened = Opened(browser, file)
    opened.page.select_option("#job", label=JOB)
    yield opened
    assert opened.complaints == []
    opened.page.close()


def opened_again(browser: BrowserContext, address: str) -> Page:
    """The page of an address, as another person opens it."""
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    return page


def test_a_limit_that_is_not_positive_is_refused_where_it_is_typed(report: Opened) -> None:
    """It filters nothing, the field is marked, and the address does not have it."""
    for field, nonsense in product(("deadline", "budget"), ("-3", "0", "-0.5")):
        report.page.fill(f"#{field}", nonsense)
        assert field not in report.page.url
        assert report.texts("#matches") == [f"{nonsense} is not a {field}: enter a number above 0."]
        assert report.page.locator(f"#{field}").get_attribute("aria-invalid") == "true"
        assert report.texts(LEAD)[0].startswith("Rent ")
        report.page.fill(f"#{field}", "")
        assert report.page.locator(f"#{field}").get_attribute("aria-invalid") == "false"


def test_the_address_holds_the_job_and_every_filter(
    browser: BrowserContext, report: Opened
) -> None:
    """Another person who opens it sees the same view; the job has its key, not a number."""
    page = report.page
    page.select_option("#gpu", "H100-SXM")
    page.select_option("#market", "on-demand")
    provider = page.locator("#ranking tbody th small").first.inner_text().split()[0]
    page.select_option("#provider", provider)
    page.fill("#deadline", "500")
    page.fill("#budget", "900")
    address, seen = page.evaluate("location.href"), report.texts(LEAD)
    assert quote("llama-2-7b/lora-r4-all-linear-bf16/dense/seq64", safe="") in address
    assert "Rent H100-SXM" in seen[0]
    sent = opened_again(browser, address)
    assert sent.locator(LEAD).all_inner_texts() == seen
    values = [sent.input_value(f"#{field}") for field in ("provider", "deadline", "budget")]
    assert values == [provider, "500", "900"]
    assert sent.locator("#speed-charts figcaption").all_inner_texts() == ["H100-SXM"]
    expect(sent.locator("#absent")).to_be_hidden()
    sent.close()


def test_what_a_link_asks_for_and_the_report_lacks_is_named(
    browser: BrowserContext, file: Path
) -> None:
    """A run that was made again may have lost a job or a GPU; the rest of the view is shown."""
    sent = opened_again(browser, f"{file.as_uri()}#job=gone/seq9&gpu=A41&deadline=soon&budget=900")
    expect(sent.locator("#absent")).to_have_text(
        "The link asks for job gone/seq9 and gpu A41 and deadline soon, which this report does not "
        "have."
    )
    assert sent.input_value("#budget") == "900"
    sent.fill("#budget", "")
    expect(sent.locator("#absent")).to_be_hidden()
    sent.close()


def test_charts_of_gpus_follow_every_filter(report: Opened) -> None:
    """They show the GPUs of the offers that match, and say where none does."""
    page, figures = report.page, "#speed-charts figcaption"
    assert sorted(report.texts(figures)) == sorted(EIGHT.split(", "))
    usd = report.numbers("#ranking tbody td:nth-child(2)")
    page.get_by_role("button", name="Show all").first.click()
    page.fill("#budget", str(min(usd) * 1.2))
    shown = {text.split("\n")[0] for text in report.texts("#ranking tbody th")}
    assert 0 < len(shown) < 8
    assert set(report.texts(figures)) == set(report.texts("#memory-charts figcaption")) == shown
    page.fill("#budget", "0.000001")
    for chart in ("#cost", "#speed-charts", "#memory-charts", "#largest-chart"):
        assert report.texts(chart) in (["No offer matches."], [""])  # one is folded
    page.fill("#budget", "")
    page.select_option("#market", "spot")
    assert set(report.texts(figures)) == set(report.texts("#memory-charts figcaption")) != set()


@pytest.mark.parametrize("width", [1440, 390])
def test_names_in_the_chart_of_costs_do_not_overlap(report: Opened, width: int) -> None:
    """Each GPU has one."""
    report.page.set_viewport_size({"width": width, "height": 900})
    expect(report.page.locator("#cost svg[role=img]")).to_be_visible()
    texts = report.page.locator("#cost svg text").filter(has_not_text="$").all()
    boxes = {
        text.text_content(): text.bounding_box()
        for text in texts
        if text.text_content() in EIGHT.split(", ")
    }
    placed = [box for box in boxes.values() if box is not None]
    assert len(placed) == 8
    for n, one in enumerate(placed):
        for other in placed[n + 1 :]:
            apart = abs(one["y"] - other["y"]) >= TEXT_PIXELS
            left, right = sorted((one, other), key=lambda box: box["x"])
            assert apart or left["x"] + left["width"] <= right["x"], boxes


def test_ticks_of_a_short_logarithmic_axis_differ(report: Opened) -> None:
    """Batches of 1 to 3 have a tick for each whole number, once."""
    ticks = report.page.evaluate(
        "[[1, 3], [1, 2], [3, 5], [1, 64], [1, 1000]].map((d) => wholeTicks(...d, 6))"
    )
    assert ticks == [[1, 2, 3], [1, 2], [3, 4, 5], [1, 4, 16, 64], [1, 4, 16, 64, 256]]
    first = report.page.locator("#speed-charts figure").first
    labels = first.locator("[aria-label='x-axis tick label'] text").all_text_contents()
    assert len(labels) == len(set(labels)) > 1


def test_warnings_stand_beside_the_answer(report: Opened) -> None:
    """Nothing measured, few steps and mostly start-up: outside every folded part."""
    nothing, few = (
        "Nothing was measured on this GPU: its times are simulated.",
        ("An epoch has fewer than 100 optimizer steps: a smaller batch size may train better."),
    )
    start_up = "Most of the time is the assumed start-up of 8 min."
    assert report.texts(DOUBTS) == [nothing, few, start_up]
    assert report.page.locator(f"details {DOUBTS}").count() == 0
    report.page.fill("#budget", "900")
    assert set(report.texts(DOUBTS)) >= {nothing, few, start_up}
    report.page.fill("#budget", "")
    report.page.select_option("#job", label="llama-tiny, 16 tokens")
    assert report.texts(DOUBTS) == [few, start_up]


def test_a_table_that_scrolls_says_so(report: Opened) -> None:
    """As long as it is wider than its place; a narrower one has no hint."""
    page = report.page
    page.locator("#speed-points summary").click()
    hint = page.locator("#speed-points .after .note")
    page.set_viewport_size({"width": 390, "height": 900})
    expect(hint).to_have_text("Scroll sideways for more columns →")
    expect(hint).to_be_visible()
    page.set_viewport_size({"width": 2400, "height": 900})
    page.locator("#speed-points .scroll").evaluate("e => { e.style.width = '3000px'; }")
    expect(hint).to_be_hidden()
