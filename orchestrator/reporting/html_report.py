"""A run as one self-contained HTML file, which works by mail, offline and in print. Pure.

Observable Plot on D3 draws the charts in the browser. Both are embedded: half a megabyte, where
Plotly takes almost five. Its charts are SVG, so they print sharp, follow the theme and the width of
the page, and carry names for screen readers. It needs no ``eval``, so the page's content security
policy allows its own scripts by their hashes and nothing else.
"""

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from fitting.numerics.value_of_information import INDIFFERENCE
from gpu_catalog.number_text import short
from orchestrator.ranking.ranking import TIED
from orchestrator.reporting.comparison import (
    ANOTHER_HOUR,
    SPEEDS,
    Comparison,
    changes_table,
    comparison_markdown,
)
from orchestrator.reporting.markdown_report import (
    detail_sections,
    headline,
    notes_text,
    report_title,
    shown_text,
    winners_tables,
)
from orchestrator.reporting.notes.certainty_notes import certainty_notes
from orchestrator.reporting.notes.excluded_cells import keys_by_reason
from orchestrator.reporting.notes.ranking_notes import ranking_notes
from orchestrator.reporting.page.law_tables import (
    errors_table,
    largest_table,
    memory_table,
    speed_table,
)
from orchestrator.reporting.page.run_tables import (
    PageJob,
    PageTable,
    cells_table,
    offers_table,
    page_jobs,
    probes_table,
    short_recipes,
    spending_table,
)
from orchestrator.reporting.page.study_tables import (
    learning_table,
    loads_table,
    prices_table,
    profiles_table,
)
from orchestrator.reporting.sections.memory_section import outcome_text
from orchestrator.run_folder.run_results import RunResults
from trials.records.observation import Basis, Outcome

LIBRARIES = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
# Sections that only a researcher reads.
RESEARCH = ("Largest batch that fits", "Laws of the step time", "Fits", "Stacks")
# Rules of the Markdown that reports use: no links, no images, no HTML.
RULES = ("table", "list", "emphasis", "heading", "backticks")


def html_report(results: RunResults, made: datetime, *, image: str | None = None) -> str:
    """Render the page of a run, with some cells of a large one.

    Args:
        results: results of the run.
        made: when.
        image: file name of the picture that sites show beside a link to the page.
    """
    results = results.shown
    jobs = page_jobs(results)
    tables = {
        "cells": cells_table(results, jobs),
        "offers": offers_table(results, jobs),
        "probes": probes_table(results),
        "speeds": speed_table(results),
        "memory": memory_table(results),
        "largest": largest_table(results),
        "errors": errors_table(results),
        "spending": spending_table(results),
        "profiles": profiles_table(results),
        "loads": loads_table(results),
        "learning": learning_table(results),
        "prices": prices_table(results),
    }
    ranking, spent, heading = results.ranking, results.meter.usd, report_title(results)
    chosen = max(range(len(jobs)), key=lambda position: jobs[position].gpus)
    shown = set(results.cells)
    winners = [row for row in ranking.offers if row.rank == 1 and row.cell in shown]
    bases = {basis.value: count for basis, count in sorted(results.whole.bases.items())}
    parted = [section.partition("\n") for section in detail_sections(results)]
    sections = [(title.removeprefix("## "), body) for title, _, body in parted]
    return page(
        "report.html",
        ("charts.js", "studies.js", "offers.js", "report.js"),
        {"name": results.spec.name, "examples": ranking.workload.examples},
        tables,
        made,
        title=f"{heading}: which GPU to rent",
        heading=heading,
        results=results,
        bases=bases,
        jobs=jobs,
        job_groups=_groups(jobs),
        chosen=chosen,
        summary=inline(next(iter(jobs[chosen].sentences), "")).striptags(),
        image=image,
        headline=headline(ranking, of_report=True),
        notes=notes_text(results.notes),
        remarks=ranking_notes(winners, ranking).splitlines() if winners else [],
        cheapest=winners_tables(winners),
        spent=short(spent) if spent else None,
        has_profiles=bool(tables["profiles"].rows),
        has_learned=bool(tables["learning"].rows),
        has_prices=bool(tables["prices"].rows),
        measured=bool(results.whole.bases.keys() - {Basis.SIMULATED}),
        observations=results.whole.bases.total(),
        cells=results.whole.cells,
        shown=shown_text(results, "This page"),
        left_out=keys_by_reason(ranking),
        sure=list(certainty_notes(results)),
        details=[section for section in sections if section[0] not in RESEARCH],
        research=[section for section in sections if section[0] in RESEARCH],
    )


def html_comparison(comparison: Comparison, made: datetime) -> str:
    """Render the page of a comparison of two runs."""
    before, after = comparison.names
    sections = comparison_markdown(comparison).split("\n\n## ")[1:]
    headed = (section.partition("\n") for section in sections)
    return page(
        "comparison.html",
        ("charts.js", "comparison.js"),
        {"name": f"{before} and {after}"},
        {"cells": PageTable((), []), "changes": changes_table(comparison)},
        made,
        title=f"{before} and {after}",
        before=before,
        after=after,
        summary=f"Examples per second, offers and largest batches of {before} and {after}",
        image=None,
        another_hour=ANOTHER_HOUR,
        # The page shows throughput in a chart with a table of its own.
        parts=[(heading, body) for heading, _, body in headed if heading != SPEEDS],
    )


def page(
    template: str,
    scripts: Sequence[str],
    facts: Mapping[str, object],
    tables: Mapping[str, PageTable],
    made: datetime,
    **values: object,
) -> str:
    """Render a page with its style, scripts and tables embedded.

    Args:
        template: file name of the Jinja template.
        scripts: file names of the page's scripts, run in this order after the libraries and
            ``elements.js``.
        facts: data that tables are saved with: the name of the run, and its examples if any.
        tables: data of the charts and tables, by name.
        made: when.
        values: variables of the template; text is escaped.
    """
    sources = [_file(name) for name in (*LIBRARIES, "elements.js", *scripts)]
    data = {
        **facts,
        "made": f"{made:%Y-%m-%d}",
        "tables": {name: table.as_json() for name, table in tables.items()},
        "tied": TIED,
        "indifference": INDIFFERENCE,
        "outcomes": {outcome.value: outcome_text(outcome) for outcome in Outcome},
    }
    return (
        _templates()
        .get_template(template)
        .render(
            **values,
            made=f"{made:%Y-%m-%d %H:%M} UTC",
            policy=_policy(sources),
            style=Markup(_file("page.css")),  # noqa: S704 - our own file
            scripts=[Markup(source) for source in sources],  # noqa: S704 - as above
            data=_safe_json(data),
        )
    )


@cache  # compiling a template takes longer than filling it
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("orchestrator.reporting.page", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"markdown": markdown, "inline": inline}
    return environment


def _policy(scripts: Sequence[str]) -> str:
    """Content security policy that allows these scripts by their hashes, and no requests."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _safe_json(data: Any) -> Markup:
    """JSON for a script element, escaped because the element ends at the first ``</script``."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # noqa: S704 - see above


@cache
def _file(name: str) -> str:
    return files("orchestrator.reporting.page").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _writer() -> MarkdownIt:
    writer = MarkdownIt("zero", {"html": False}).enable(list(RULES))
    # A keyboard must reach what scrolls.
    writer.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>')
    writer.add_render_rule("table_close", lambda *_: "</table></div>")
    return writer


def markdown(text: str) -> Markup:
    """Markdown of a report as HTML; everything but tables, lists and emphasis stays text."""
    return Markup(_writer().render(text))  # noqa: S704 - the renderer escapes text


def inline(text: str) -> Markup:
    """One line of Markdown as HTML without a paragraph."""
    return Markup(_writer().renderInline(text))  # noqa: S704 - as above


def _groups(jobs: Sequence[PageJob]) -> list[dict[str, object]]:
    """Positions, keys and names of jobs, grouped by model and recipe.

    A closed list shows no group: names of a model with several recipes have the short one.
    """
    recipes: defaultdict[str, set[str]] = defaultdict(set)
    for job in jobs:
        recipes[job.cell.model].add(job.cell.recipe.key)
    names = {model: short_recipes(keys) for model, keys in recipes.items()}

    def name(position: int) -> str:
        return f"{jobs[position].cell.model}, {jobs[position].recipe}"

    def option(position: int) -> tuple[int, str, str]:
        job, of_model = jobs[position], names[jobs[position].cell.model]
        recipe = [of_model[job.cell.recipe.key]] if len(of_model) > 1 else []
        return position, job.key, " · ".join([job.title, *recipe])

    return [
        {"name": key, "jobs": [option(position) for position in positions]}
        for key, positions in groupby(range(len(jobs)), key=name)
    ]
