"""Pages of a report with names from outside, of two runs, and of a run without observations."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from builders.catalog_offers import offer
from builders.observations import environment, observation
from builders.runs import ONE_CELL, made_run, results, spec_of, whole_trial
from fakes.browser import OPEN_ALL, Opened
from playwright.sync_api import BrowserContext

from gpu_catalog.catalog import Catalog
from orchestrator.cli.main import main
from orchestrator.reporting.comparison import compare, comparison_markdown
from orchestrator.reporting.html_report import html_comparison, html_report, markdown
from trials.records.observation import Measurement, Outcome

MADE = datetime(2026, 11, 21, tzinfo=UTC)
HOSTILE = "</script><script>alert(1)</script>"
IMAGE = "<img src=https://example.com/x onerror=alert(2)>"
MARKDOWN = "![x](https://example.com/y) [z](javascript:alert(3)) <b>|"


TWO_JOBS = ONE_CELL.replace("[16]", "[16, 32]")


def twice_as_fast(measured: Measurement | None) -> Measurement | None:
    """The same measurement with half the step times."""
    if measured is None:
        return None
    return measured.model_copy(update={"step_seconds": tuple(s / 2 for s in measured.step_seconds)})


def test_names_are_escaped(browser: BrowserContext, tmp_path: Path) -> None:
    """A name of an instance, a GPU or an error adds no markup, script or request."""
    text = ONE_CELL + (
        "catalog:\n  offers:\n" + offer(0.0005, instance="first") + offer(0.0007, instance="second")
    )
    spec = spec_of(text)
    (plain,) = spec.all_cells()
    cell = plain.model_copy(update={"model": IMAGE})  # as a folder may be called
    where = environment(host=HOSTILE, device_name=IMAGE)
    observations = [
        o.model_copy(update={"environment": where, "cell": cell}) for o in whole_trial(plain, spec)
    ]
    observations.append(observation(50, Outcome.FAILED, cell=cell, detail=f"{HOSTILE}{MARKDOWN}"))
    # No table has such names, but a page is safe by itself.
    names: dict[str, dict[str, str]] = {
        "first": {"provider": HOSTILE, "instance": MARKDOWN, "region": IMAGE},
        "second": {"provider": "=1+1", "instance": "`code`**bold**"},
    }
    run = results(text, observations, [cell])
    offers = [o.model_copy(update=names.get(o.instance, {})) for o in run.catalog.all_offers]
    run = replace(run, catalog=Catalog(run.catalog.gpus, offers))
    for name, page in (
        ("report.html", html_report(run, MADE)),
        ("both.html", html_comparison(compare(run, run, (HOSTILE, MARKDOWN)), MADE)),
    ):
        path = tmp_path / name
        path.write_text(page, encoding="utf-8")
        opened = Opened(browser, path)
        opened.page.evaluate(OPEN_ALL)
        body = opened.page.inner_text("body")
        assert IMAGE in body
        assert HOSTILE in body
        assert MARKDOWN in body.replace("\\|", "|")
        assert opened.page.locator("img, a[href^=http], a[href^=javascript], b").count() == 0
        assert opened.complaints == []
        assert opened.requests == [path.as_uri()]
        opened.page.close()


def test_two_runs_are_compared(browser: BrowserContext, tmp_path: Path) -> None:
    """A run that takes half the time is twice as fast; a different version is named."""
    before = results(TWO_JOBS)
    newer = environment(versions=(("python", "3.11.1"), ("torch", "2.10.0")))
    faster = [
        o.model_copy(update={"environment": newer, "measurement": twice_as_fast(o.measurement)})
        for o in before.observed
        if o.cell.seq_len == 16
    ]
    comparison = compare(before, results(ONE_CELL, faster), ("old", "new"))
    text = comparison_markdown(comparison)
    assert re.search(r"\| torch +\| 2.9.0 +\| 2.10.0 +\|", text)
    assert "+100.0% (+" in text
    assert "- cpu/llama-tiny/full-fp32/dense/seq32" in text.split("## Only in old")[1]
    path = tmp_path / "both.html"
    path.write_text(html_comparison(comparison, MADE), encoding="utf-8")
    opened = Opened(browser, path)
    assert opened.texts("#speeds-numbers tbody td:nth-child(6)")[0].startswith("2")
    assert opened.texts("#speeds-numbers tbody td:nth-child(7)") == ["faster"]
    assert opened.complaints == []
    opened.page.close()


def test_a_run_without_observations_opens(browser: BrowserContext, tmp_path: Path) -> None:
    """The page says why nothing can be ranked, and does not claim that anything was simulated."""
    path = tmp_path / "report.html"
    path.write_text(html_report(results(ONE_CELL, []), MADE), encoding="utf-8")
    opened = Opened(browser, path)
    assert "Nothing can be ranked" in opened.texts(".answer .lead")[0]
    assert "not measured" in opened.texts("#excluded")[0]
    assert opened.texts("#spending p") == ["Nothing has run yet."]
    assert opened.complaints == []
    opened.page.close()


def test_markdown_of_reports_becomes_tables_and_nothing_else() -> None:
    """Links, images and markup in names stay text."""
    html = str(markdown(f"**sure**\n\n| a | b |\n|---|---|\n| {IMAGE} | [x](http://y) |"))
    assert "<strong>sure</strong>" in html
    assert "<td>&lt;img src=" in html
    assert "<td>[x](http://y)</td>" in html


def test_notes_of_ones_own_stand_in_both_reports_and_are_no_html(tmp_path: Path) -> None:
    """Their headings are below those of the report; a report without notes has no such part."""
    run = made_run(tmp_path / "run")
    assert main(["report", str(run.path)]) == 0
    assert "## Notes" not in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    text = "# Why\n\nThe **A40** stays free in *May*. <script>alert(1)</script>\n"
    (tmp_path / "run" / "notes.md").write_text(text, encoding="utf-8")
    assert main(["report", str(run.path)]) == 0
    report = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert "\n## Notes\n\n### Why\n\nThe **A40** stays" in report
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "<strong>A40</strong>" in page
    assert "<script>alert" not in page
    (tmp_path / "run" / "notes.md").write_bytes(b"\xff\xfe")
    assert main(["report", str(run.path)]) == 1
