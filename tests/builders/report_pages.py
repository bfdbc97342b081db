"""Pages of reports in files, for a browser to open."""

from datetime import UTC, datetime
from pathlib import Path

from orchestrator.reporting.html_report import html_report
from orchestrator.run_folder.run_results import RunResults

MADE = datetime(2026, 11, 21, tzinfo=UTC)


def report_page(folder: Path, run: RunResults) -> Path:
    """Write the report of a run into a folder; the file."""
    path = folder / "report.html"
    path.write_text(html_report(run, MADE), encoding="utf-8")
    return path
