"""Write the page on the runs that torchtitan published, beside what the simulation says of them.

    .venv/bin/python tests/benchmarks/torchtitan_page.py

It reads torchtitan/published.csv and torchtitan/predicted.csv, which ``torchtitan_runs.py`` writes,
and puts their tables between the marks of docs/reference/torchtitan.md.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from orchestrator.markdown_table import table

FOLDER = Path(__file__).parent / "torchtitan"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "torchtitan.md"
BEGIN, END = "<!-- rows: begin -->\n", "<!-- rows: end -->\n"
AT = "https://github.com/pytorch/torchtitan/blob/"
NEWEST = "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/benchmarks/"
MOVED = "820504e20d1149fbf0b98c567af24c4b0433b22d/benchmarks/"
SOURCES = {
    "h100": (
        "H100, December 2024",
        f"{MOVED}llama3_h100_202412_torchtitan.md",
    ),
    "async-tp": (
        "Asynchronous tensor parallelism, June 2025",
        f"{MOVED}asyncTP_llama3_h100_2025-06_torchtitan.md",
    ),
    "h200": (
        "H200, June 2025, by Trainy",
        f"{NEWEST}llama3-8b_h200_202506_trainy-whitefiber.md",
    ),
    "a100": (
        "64 A100, April 2024",
        "1ea476e9f24be439eda358aa864f45c1c37a8a88/docs/performance.md",
    ),
    "a100-oom": (
        "64 A100, out of memory, April 2024",
        "395a526276eed4000c038a37d9b4859d0813af7c/docs/performance.md",
    ),
    "h100-405b": (
        "128 H100, August 2024",
        "3faaa1a0dee68ce028400e3dafd1735d152cb4f8/docs/performance.md",
    ),
    "mxfp8": (
        "MXFP8, December 2025",
        "b3da1a2d84436016be650c3271d1a5f6380090a5/docs/mxfp8.md",
    ),
}
HEADERS = (
    "model",
    "GPUs",
    "layout",
    "batch x tokens",
    "checkpointed",
    "tokens/s a GPU",
    "simulated, or why not",
    "GiB",
    "simulated GiB",
)
Row = dict[str, str]


def rows_of(name: str) -> list[Row]:
    """Rows of a CSV file of the folder."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def sections() -> Iterator[str]:
    """A heading, the source and a table for each source."""
    predicted = {row["run"]: row for row in rows_of("predicted.csv")}
    published = rows_of("published.csv")
    for key, (title, path) in SOURCES.items():
        lines = [
            _cells(row, predicted.get(row["run"])) for row in published if row["source"] == key
        ]
        yield f"## {title}\n\n[{path.partition('/')[2]}]({AT}{path})\n\n{table(HEADERS, lines)}\n"


def _cells(row: Row, predicted: Row | None) -> tuple[str, ...]:
    tokens, gib = _number(row["tokens_per_second"]), row["gib"]
    described = (
        row["model"],
        row["gpus"],
        row["layout"],
        f"{row['batch']} x {_number(row['seq_len'])}",
        row["checkpointing"],
    )
    if predicted is None:
        return (*described, tokens, row["not_simulated"], gib, "")
    speeds = [predicted["tokens_per_second"], predicted["tokens_per_second_at_1600"]]
    said = [_with_error(speed, row["tokens_per_second"]) for speed in speeds if speed and tokens]
    return (*described, tokens, "; ".join(said), gib, _with_error(predicted["reserved_gib"], gib))


def _number(text: str) -> str:
    """A number with commas; as printed where it has decimals."""
    return text if not text.isdecimal() else f"{int(text):,}"


def _with_error(predicted: str, published: str) -> str:
    try:
        error = float(predicted) / float(published) - 1
    except ValueError:
        return _number(predicted)
    return f"{_number(predicted)} ({error:+.1%})"


def page() -> str:
    """The page with its tables as they are to be."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(sections()) + END + after


def main() -> None:
    """Write the tables."""
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
