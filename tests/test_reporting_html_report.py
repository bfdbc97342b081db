"""The report as one file in a real browser: it shows, sorts, filters, and makes no request."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders.catalog_offers import offer
from builders.curves import DENSE, epochs
from builders.observations import recipe, tiny_cell
from builders.profiles import profiled
from builders.report_pages import MADE, report_page
from builders.runs import ONE_CELL, SIMULATED, results
from fakes.browser import Opened
from playwright.sync_api import BrowserContext, expect

from fitting.fit import fit_observations
from fitting.learning_curves import curves
from gpu_catalog.number_text import dollars
from orchestrator.ranking.ranked_offer import ranking_csv
from orchestrator.reporting.html_report import html_report
from orchestrator.reporting.sections.memory_section import outcome_text
from orchestrator.reporting.sections.recommendation import odds_text
from trials.records.observation import Outcome

OFFERS = "".join(
    (
        "catalog:\n  offers:\n",
        offer(0.02, instance="desk", market="spot"),
        offer(0.05, provider="them", instance="rack"),
        *(offer(1.0 + n, provider="them", instance=f"big{n}") for n in range(30)),
    )
)
LEAD = ".answer:not([hidden]) .lead"
TWO_JOBS = ONE_CELL.replace("[16]", "[16, 32]")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with two measured jobs and one simulated on two GPUs."""
    text = TWO_JOBS.replace("workload:", f"{SIMULATED}workload:") + OFFERS
    return report_page(tmp_path_factory.mktemp("run"), results(text))


@pytest.fixture
def report(browser: BrowserContext, file: Path) -> Iterator[Opened]:
    """The opened report; at the end, the console is empty and nothing else was requested."""
    opened = Opened(browser, file)
    yield opened
    assert opened.complaints == []
    # Saved tables are addresses in the browser's own memory.
    assert [url for url in opened.requests if not url.startswith("blob:")] == [file.as_uri()]
    opened.page.close()


def choose(report: Opened, job: str) -> None:
    """Select another job on the page."""
    report.page.select_option("#job", label=job)


def test_it_opens_with_a_job_of_several_gpus_and_its_answer(report: Opened) -> None:
    """A job with two GPUs comes before one with a single GPU."""
    (answer,) = report.texts(".answer:not([hidden]) .lead")
    assert re.search(r"^Rent (A40|H100-SXM) .* \$", answer)
    assert "batch size 20 (50 optimizer steps an epoch)" in answer
    assert re.search(r"probability of .*%\.$", answer)
    assert "other GPU: " in report.texts(".answer:not([hidden])")[0]
    choose(report, "llama-tiny, 16 tokens")
    (answer,) = report.texts(".answer:not([hidden]) .lead")
    assert re.match(r"Use cpu .*\(desk\)", answer)
    assert "$0.02 an hour" in answer
    assert "other GPU: " not in report.texts(".answer:not([hidden])")[0]


def test_every_job_can_be_chosen_and_all_charts_follow(report: Opened) -> None:
    """The title of each chart names the job."""
    for job, subject in (
        ("llama-tiny, 16 tokens", "llama-tiny, full weights, fp32"),
        ("llama-tiny, 32 tokens", "llama-tiny, full weights, fp32"),
        ("llama-2-7b, 64 tokens", "llama-2-7b, LoRA rank 4 on all-linear, bf16"),
    ):
        choose(report, job)
        assert report.page.locator("#sure [data-of]").all_text_contents() == [subject] * 2
        (tokens,) = re.findall(r"\d+ tokens", job)
        assert report.texts("#speed [data-of]") == [f"{subject}, {tokens} per example"]
        assert report.page.locator("figure svg[role=img]").count() >= 3
        report.page.select_option("#market", "spot")
        report.page.select_option("#market", "")


def test_offers_sort_by_any_column_with_mouse_and_keyboard(report: Opened) -> None:
    """The first use sorts up and the second down; the header shows the direction."""
    choose(report, "llama-tiny, 16 tokens")
    page, prices = report.page, "#ranking tbody td:nth-child(6)"
    page.get_by_role("button", name="Show all").first.click()
    button = page.locator("#ranking th button", has_text="$/h")
    button.click()
    rising = report.numbers(prices)
    assert len(rising) > 30
    assert rising == sorted(rising)
    assert button.locator("..").get_attribute("aria-sort") == "ascending"
    button.focus()
    page.keyboard.press("Enter")
    assert report.numbers(prices) == sorted(rising, reverse=True)
    assert button.locator("..").get_attribute("aria-sort") == "descending"
    assert page.locator("#ranking th[aria-sort=none]").count() == 7


def test_offers_are_filtered_by_provider_market_and_deadline(report: Opened) -> None:
    """The recommendation is of the remaining offers, and the chart follows."""
    choose(report, "llama-tiny, 16 tokens")
    page = report.page
    page.select_option("#provider", "them")
    assert "(rack, on-demand)" in report.texts(LEAD)[0]
    assert report.texts("#matches") == ["31 of 34 offers"]
    assert {"them"} == {text.split()[0] for text in report.texts("#ranking tbody th small")}
    page.select_option("#provider", "")
    page.select_option("#market", "spot")
    assert {"spot"} == {text.split()[-1] for text in report.texts("#ranking tbody th small")}
    page.fill("#deadline", "0.0001")
    lead = report.texts(LEAD)[0]
    assert re.match(r"None of \d+ offers matches. The fastest of those selected takes ", lead)
    assert report.texts("#cost") == ["No offer matches."]
    page.fill("#deadline", "")
    page.fill("#budget", "0.0001")
    assert re.search(r" The cheapest of those selected costs \$", report.texts(LEAD)[0])
    page.fill("#budget", "")
    page.fill("#deadline", "100")
    assert "on your own machine (desk)" in report.texts(LEAD)[0]
    assert page.locator("#cost svg").count() == 1
    page.select_option("#market", "")
    page.select_option("#provider", "them")
    page.fill("#budget", "0.06")
    assert report.texts("#ranking tbody th small") == ["them rack, here, on-demand"]
    assert report.texts(LEAD)[0].endswith("No other offer matches.")
    page.fill("#budget", "0.000001")
    lead = report.texts(LEAD)[0]
    assert re.match(r"None of 34 offers matches. The cheapest of those selected costs \$", lead)
    page.get_by_role("button", name="Clear filters").click()
    page.wait_for_selector("#filtered", state="hidden")
    assert re.search(r"probability of .*%\.$", report.texts(LEAD)[0])


def test_the_fastest_offer_is_not_called_the_cheapest(report: Opened) -> None:
    """Where the run's objective is time, its first offer may be more expensive than others."""
    text = report.page.evaluate(
        """() => {
          const rows = OFFERS.filter((row) => row.cell.job === job);
          const costliest = d3.greatest(rows, (row) => row.usd);
          const byTime = rows.map((row) => ({ ...row, rank: row === costliest ? 0 : row.rank }));
          return adviceOf(byTime)[0].textContent;
        }"""
    )
    assert re.search(r"It is the fastest of the \d+ offers that match\.$", text)


def test_odds_of_the_page_agree_with_those_of_the_ranking(report: Opened) -> None:
    """Drawn again for what is left of the offers, they are as the ranking's where all are left."""
    choose(report, "llama-2-7b, 64 tokens")
    apart = report.page.evaluate(
        """() => {
          const rows = OFFERS.filter((row) => row.cell.job === job);
          setChances(rows);
          return [rows.length, Math.max(...rows.map((row) => Math.abs(row.chance - row.odds)))];
        }"""
    )
    assert apart[0] > 10
    assert apart[1] < 0.06


def test_measured_and_simulated_differ_in_shape(report: Opened) -> None:
    """A full circle and a hollow diamond differ without colour."""

    def shapes() -> set[tuple[str, bool]]:
        marks = report.page.locator("#speed-charts [aria-label=dot] :is(path, circle)")
        pairs = marks.evaluate_all(
            "all => all.map(e => [e.tagName, (e.getAttribute('fill') "
            "?? e.closest('g').getAttribute('fill')) === 'var(--card)'])"
        )
        return {(d, hollow) for d, hollow in pairs}

    (simulated,) = shapes()
    choose(report, "llama-tiny, 32 tokens")
    (measured,) = shapes()
    assert measured == ("circle", False)
    assert simulated == ("path", True)


def test_every_chart_has_its_numbers_in_a_table(report: Opened, file: Path) -> None:
    """The table has one row per point; a chart has a name for screen readers."""
    choose(report, "llama-tiny, 16 tokens")
    page = report.page
    match = re.search(r'id="data">(.*?)</script>', file.read_text(encoding="utf-8"))
    assert match is not None
    data = json.loads(match.group(1))["tables"]
    probes = [
        dict(zip(data["probes"]["columns"], row, strict=True)) for row in data["probes"]["rows"]
    ]
    timed = [row for row in probes if row["cell"] == 0 and row["examples_per_second"] is not None]
    page.locator("#speed-points summary").click()
    page.wait_for_selector("#speed-points tbody tr")
    assert page.locator("#speed-points tbody tr").count() == len(timed)
    assert page.locator("#speed-charts [aria-label=dot] circle").count() == len(timed)
    page.locator("#research > summary").click()
    for chart in ("#cost", "#speed-charts", "#memory-charts", "#largest-chart", "#errors-chart"):
        label = page.locator(f"{chart} svg[role=img]").first.get_attribute("aria-label")
        assert label, chart
    page.locator("#all-probes summary").click()
    page.wait_for_selector("#all-probes tbody tr")
    assert "here" in report.texts("#all-probes tbody tr")[0]


def test_outcomes_have_the_words_of_the_text(report: Opened) -> None:
    """The page takes them from its data, and has none of its own."""
    said = report.page.evaluate("all => all.map(outcome => outcomeOf({ outcome }))", [*Outcome])
    assert said == [outcome_text(outcome) for outcome in Outcome]


def test_dollars_and_odds_are_rounded_as_in_the_text(report: Opened) -> None:
    """Half a cent and half a percent, too, which a list price and counted draws often have."""
    usd = [0.0042, 0.895, 1.625, 2.115, 4.335, 12.44458, 99.994, 104.0]
    assert report.page.evaluate("all => all.map(cents)", usd) == [dollars(value) for value in usd]
    chances = [0.005, 0.025, 0.445, 0.455, 0.94]
    texts = report.page.evaluate("all => all.map(odds)", chances)
    assert texts == [odds_text(chance).replace("%", " %") for chance in chances]


def test_a_table_can_be_saved(report: Opened) -> None:
    """The file has all rows in the order shown, its name the run, and its columns ranking.csv's."""
    choose(report, "llama-tiny, 16 tokens")
    with report.page.expect_download() as download:
        report.page.locator("#ranking").get_by_role("button", name="Save as CSV").click()
    assert download.value.suggested_filename == "made-offers-the-cheapest-first-2026-11-21.csv"
    lines = download.value.path().read_text(encoding="utf-8").splitlines()
    rows = [*csv.DictReader(lines)]
    ranking = results(TWO_JOBS + OFFERS).ranking
    assert rows[0].keys() < {*ranking_csv(ranking).splitlines()[0].split(",")}
    first = ("model", "seq_len", "examples", "epochs", "instance", "usd_per_hour", "batch_size")
    assert [rows[0][name] for name in first] == [
        *("llama-tiny", "16", "1000", "3", "desk", "0.02", "40"),
    ]
    assert {(row["elsewhere"], row["provider"] == "own") for row in rows} == {
        ("false", True),
        ("true", False),
    }
    assert len(lines) > 30


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_themes(report: Opened, scheme: str) -> None:
    """Nothing is wider than the screen, and text has enough contrast."""
    page = report.page
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.set_viewport_size({"width": 360, "height": 780})
    expect(page.locator("#cost svg[role=img]")).to_have_attribute(
        "width", re.compile(r"^[23]\d\d$")
    )
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 765
    assert (lightness > 0.5) is (scheme == "light")


def test_profiles_and_curves_are_drawn(browser: BrowserContext, tmp_path: Path) -> None:
    """Bars fill their length, experts have their tokens, and every curve has a line."""
    run = results(ONE_CELL)
    saving = tiny_cell("mixtral-tiny", recipe("full", gradient_checkpointing=True), seq_len=16)
    learned = curves(
        [
            *epochs([(0, 3.0), (90, 0.5)]),
            *epochs([(0, 3.1), (95, 0.4)], DENSE),
            *epochs([(0, 3.0), (50, 0.9)], learning_rate=3e-4),
        ]
    )
    probes = [profiled(1), profiled(8), profiled(8, cell=saving)]
    run = replace(run, profiled=probes, learned=learned)
    opened = Opened(browser, report_page(tmp_path, run))
    for part in ("stages", "layers", "inside"):
        bars = f"#profile-{part} [aria-label=bar] rect"
        widths = opened.page.locator(bars).evaluate_all(
            "all => all.map(e => [e.getAttribute('y'), Number(e.getAttribute('width'))])"
        )
        total = {y: sum(width for at, width in widths if at == y) for y, _ in widths}
        assert len(total) == 3
        assert max(total.values()) == pytest.approx(min(total.values()), abs=15)
    assert opened.page.locator("#loads-charts figure").count() == 3
    lines = opened.page.locator("#loss-chart [aria-label=line] path")
    assert (
        lines.evaluate_all("all => all.map(e => e.getAttribute('d').split('L').length)") == [2] * 3
    )
    assert len(set(opened.texts("#learning-key > span"))) == 3
    opened.page.locator("#learning-numbers summary").click()
    opened.page.wait_for_selector("#learning-numbers tbody tr")
    assert opened.texts("#learning-numbers tbody td:nth-child(5)") == [
        *("0 %", "90 %", "0 %", "95 %", "0 %", "50 %")
    ]
    assert opened.complaints == []
    opened.page.close()


def test_omitted_offers_are_counted(file: Path) -> None:
    """The page has their number and where to find them; a complete table has no such note."""
    offers = "".join(offer(1.0 + n, provider="them", instance=f"big{n}") for n in range(120))
    page = html_report(results(f"{ONE_CELL}catalog:\n  offers:\n{offers}"), MADE)
    (shown, total) = re.findall(r"This page shows (\d+) of (\d+) offers", page)[0]
    match = re.search(r'id="data">(.*?)</script>', page)
    assert match is not None
    assert len(json.loads(match.group(1))["tables"]["offers"]["rows"]) == int(shown)
    assert int(total) >= 120
    assert int(shown) < int(total)
    assert "This page shows" not in file.read_text(encoding="utf-8")


def test_an_injected_script_does_not_run(
    browser: BrowserContext, file: Path, tmp_path: Path
) -> None:
    """The page's policy allows its own scripts by hash, and no request."""
    spoilt = file.read_text(encoding="utf-8").replace(
        "</main>",
        "<script>document.title = 'spoilt'</script><img src='https://example.com/x'></main>",
    )
    path = tmp_path / "spoilt.html"
    path.write_text(spoilt, encoding="utf-8")
    opened = Opened(browser, path)
    assert opened.page.title() != "spoilt"
    assert len([c for c in opened.complaints if "Content Security Policy" in c]) == 2
    opened.page.close()


def test_laws_of_the_page_are_those_of_the_run() -> None:
    """Every law on the page has the held-out error of fits.json."""
    run = results(TWO_JOBS)
    families = fit_observations(run.observed).families
    page = html_report(run, MADE)
    match = re.search(r'id="data">(.*?)</script>', page)
    assert match is not None
    errors = json.loads(match.group(1))["tables"]["errors"]
    assert len(errors["rows"]) == sum(len(family.candidates) for family in families) > 0


def test_each_gpu_has_a_scale_of_its_own_and_a_log_axis_says_so(report: Opened) -> None:
    """The highest value of each GPU is at the top of its panel: a slow one is no flat line."""
    choose(report, "llama-2-7b, 64 tokens")
    figures = report.page.locator("#speed-charts figure").all()
    assert len(figures) == 2
    for figure in figures:
        chart = figure.locator("svg[role=img]").bounding_box()
        drawn = [mark.bounding_box() for mark in figure.locator("[aria-label=area] path").all()]
        assert chart is not None
        assert 15 < min(box["y"] for box in drawn if box is not None) - chart["y"] < 30
        (label,) = figure.locator("[aria-label='x-axis label'] text").all_text_contents()
        assert label == "micro-batch (examples), log scale →"


def test_a_closed_list_of_jobs_tells_recipes_of_one_model_apart() -> None:
    """Each option has the settings that the recipes do not share; one recipe needs none."""
    two = "recipes: [{method: lora, lora_rank: 16}, {method: lora, lora_rank: 8}]"
    text = ONE_CELL.replace("recipes: [{method: full, precision: fp32}]", two)
    assert text != ONE_CELL
    shown = {
        spec: re.findall(r'<option value="[^"]+"[^>]*>([^<]+)<', html_report(results(spec), MADE))
        for spec in (ONE_CELL, text)
    }
    assert shown[ONE_CELL] == ["llama-tiny, 16 tokens"]
    assert shown[text] == ["llama-tiny, 16 tokens · lora-r16", "llama-tiny, 16 tokens · lora-r8"]
