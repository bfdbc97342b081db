"""Count how many configurations in a folder are answered, and why the others are refused.

Run as ``python tests/benchmarks/configurations.py FOLDER``, with a folder in it for each trainer;
``--estimate KEY`` also simulates each on one GPU, for which its model must be a preset, in the
cache or on the hub. ``--page FILE`` writes the counts between the marks of a page.
"""

import argparse
import collections
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_catalog.errors import UserError
from orchestrator.cli.main import main as run_command
from orchestrator.configurations.configuration import ConfigurationError
from orchestrator.configurations.read_file import read_configuration
from orchestrator.markdown_table import table

SUFFIXES = (".yaml", ".yml", ".py")
SEVERAL = "out of scope: several GPUs"
NOT_ONE_GPU = ("several GPUs", "describes machines")
MARKS = ("<!-- counts: begin -->\n", "<!-- counts: end -->\n")
NOT_TEXT = ("images",)
OTHER_TASKS = ("generates", "DiffusionPlugin", "TokenClassification")
NOT_TRAINING = ("and trains nothing", "without it trains nothing")
ALL_FROZEN = ("trains nothing, since",)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of reading one configuration."""

    file: Path
    kind: str
    reasons: tuple[str, ...] = ()


def outcome_of(path: Path) -> Outcome:
    """Read a configuration: answered, answered with assumptions, refused, or a defect."""
    is_several = False
    try:
        configuration = read_configuration(path)
        is_several = "strategy" in configuration.options
        configuration.check()
    except ConfigurationError as error:
        lines = tuple(line.removeprefix(f"{path}: ") for line in str(error).splitlines())
        return Outcome(path, SEVERAL if is_several else _refusal(lines), lines)
    except UserError as error:
        return Outcome(path, "refused", (str(error),))
    except Exception:  # noqa: BLE001 - every defect is to be counted
        return Outcome(path, "traceback", (traceback.format_exc().splitlines()[-1],))
    return Outcome(path, f"{SEVERAL}, and answered" if is_several else "answered")


def _refusal(lines: tuple[str, ...]) -> str:
    text = " ".join(lines)
    for kind, marks in (
        ("out of scope: no training", NOT_TRAINING),
        ("out of scope: the trainer stops, since all is frozen", ALL_FROZEN),
        (SEVERAL, NOT_ONE_GPU),
        ("out of scope: not text", NOT_TEXT),
        ("out of scope: neither SFT nor preference", OTHER_TASKS),
    ):
        if any(mark in text for mark in marks):
            return kind
    return "refused"


def outcomes(folder: Path) -> Iterator[Outcome]:
    """Outcomes of all configurations in a folder."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES:
            yield outcome_of(path)


def counts(results: Iterable[Outcome], folder: Path) -> str:
    """Table of the outcomes of each trainer's files, and of all."""
    by_trainer: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        kind = result.kind.partition(":")[0]
        for name in (result.file.relative_to(folder).parts[0], "all"):
            by_trainer[name][kind] += 1
    rows = []
    for name, kinds in sorted(by_trainer.items(), key=lambda item: (item[0] == "all", item[0])):
        inside = [kinds[kind] for kind in ("answered", "refused", "traceback")]
        share = f"{inside[0] / max(1, sum(inside)):.0%}"
        rows.append((name, kinds.total(), kinds["out of scope"], *inside, share))
    header = ("trainer", "files", "out of scope", "answered", "refused", "failed", "answered")
    return table(header, rows) + "\n"


def write_counts(page: Path, text: str) -> None:
    """Replace the counts of a page."""
    before, _, rest = page.read_text("utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", "utf-8")


def main() -> None:
    """Print the counts and each reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--estimate", metavar="KEY", help="also estimate on this GPU")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the counts to it")
    options = parser.parse_args()
    results = list(outcomes(options.folder))
    write = sys.stdout.write
    kinds = collections.Counter(result.kind for result in results)
    write(table(("outcome", "files"), kinds.most_common()) + "\n\n")
    in_scope = kinds["answered"] + kinds["refused"] + kinds["traceback"]
    write(f"in scope {in_scope}, answered {kinds['answered'] / max(1, in_scope):.1%}\n\n")
    for result in results:
        for reason in result.reasons:
            write(f"{result.kind} | {result.file.relative_to(options.folder)} | {reason}\n")
    if options.page:
        write_counts(options.page, counts(results, options.folder))
    if options.estimate:
        for result in results:
            if result.kind == "answered":
                write(f"\n{result.file.relative_to(options.folder)}\n")
                sys.stdout.flush()
                # Their data files are not here.
                asked = ("--gpu", options.estimate, "--examples", "1000")
                run_command(["estimate", "--config", str(result.file), *asked])


if __name__ == "__main__":
    main()
