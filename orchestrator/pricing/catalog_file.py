"""A user's own GPUs and prices, from a file: YAML or TOML, prices as a CSV too.

Offers may omit fields that have defaults for a machine of the user's own (``_filled``). All
mistakes are reported at once, each with its line.
"""

import csv
import datetime as dt
import io
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, CatalogError
from gpu_catalog.offer import Identity, Offer
from gpu_catalog.safe_text import from_spreadsheet_cell
from gpu_catalog.suggestions import did_you_mean, suggestion_text
from gpu_catalog.user_file import NestingError, check_levels, text_of
from orchestrator.spec.sweep_spec import CatalogRows
from orchestrator.spec.validation_messages import problems_of, shown
from orchestrator.spec.yaml_lines import LocatedYaml, Location, Problem, read_yaml

OWN = "own"  # provider of a machine that the user owns
THIS_MACHINE = "cpu"  # key of the machine that runs a sweep
PRICE = "usd_per_hour"
A_PRICE = re.compile("pri[cs]e|cost|usd", re.IGNORECASE)
CURRENCY = "currency"  # optional column, which must be USD
TOML_HEADER = re.compile(r"\s*\[\[\s*([\w-]+)\s*\]\]")
TOML_KEY = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*=")
TOML_PLACE = re.compile(r"\s*\(at line (\d+), column \d+\)")
NOT_A_PRICE = "usd_per_hour: must be a number"
IN_A_ROW = re.compile(r"^offers\[\d+\](\.|: )")


def stands_in(gpu: str, provider: str) -> bool:
    """Whether an offer only stands in for the machine that runs the sweep."""
    return gpu == THIS_MACHINE and provider != OWN


def read_catalog_file(path: Path, catalog: Catalog) -> CatalogRows:
    """Read the GPUs and offers of a user's file, to be merged over a catalog.

    Raises:
        CatalogError: one line for each mistake: file, line, mistake, remedy.
    """
    located = _located(path)
    if path.suffix.casefold() == ".csv" or not isinstance(located.data, dict | None):
        said = "" if isinstance(located.data, dict | None) else f", not {shown(located.data)}"
        text = f"must be a mapping of keys to values{said}: list gpus, offers or both"
        raise CatalogError(f"{path}:1: {text}; a CSV of prices goes to --prices")
    return _checked(path, located, catalog)


def read_price_file(path: Path, catalog: Catalog) -> tuple[Offer, ...]:
    """Read a user's own offers of GPUs that are in a catalog.

    Raises:
        CatalogError: one line for each mistake: file, line, mistake, remedy.
    """
    if path.suffix.casefold() not in {".yaml", ".yml", ".toml"}:
        return _checked(path, _csv(path), catalog, is_csv=True).offers
    located = _located(path)
    if isinstance(located.data, list):  # a list of offers
        lines = {("offers", *location): line for location, line in located.lines.items()}
        located = LocatedYaml({"offers": located.data}, lines, located.problems)
    return _checked(path, located, catalog).offers


def _located(path: Path) -> LocatedYaml:
    text = text_of(path, CatalogError)
    return _toml(text) if path.suffix.casefold() == ".toml" else read_yaml(text)


def _toml(text: str) -> LocatedYaml:
    """Parse TOML, with the lines of tables and of keys that start a line."""
    try:
        data = tomllib.loads(text)
        check_levels(data)
    except tomllib.TOMLDecodeError as error:
        place = TOML_PLACE.search(str(error))
        wrong = int(place.group(1)) if place else text.count("\n") + 1
        said = TOML_PLACE.sub("", str(error))
        return LocatedYaml(None, {}, (Problem(wrong, f"not TOML: {said[0].lower()}{said[1:]}"),))
    except (NestingError, RecursionError):
        return LocatedYaml(None, {}, (Problem(1, str(NestingError())),))
    lines: dict[Location, int] = {}
    counts: dict[str, int] = {}
    here: Location = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := TOML_HEADER.match(line):
            name = header.group(1)
            counts[name] = counts.get(name, -1) + 1
            here = (name, counts[name])
            lines[here] = number
        elif key := TOML_KEY.match(line):
            lines.setdefault((*here, key.group(1)), number)
    return LocatedYaml(data, lines, ())


def _csv(path: Path) -> LocatedYaml:
    """Parse the rows of a CSV as offers; an empty field is absent."""
    text = text_of(path, CatalogError)
    head = text.partition("\n")[0]
    delimiter = next((sign for sign in ",;\t" if sign in head), ",")
    table = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    rows: list[dict[str, str]] = []
    lines: dict[Location, int] = {}
    problems: list[Problem] = []
    try:
        columns = [name.strip() for name in next(table, [])]
        problems += _wrong_columns(columns)
        for row in table:
            if not any(field.strip() for field in row):
                continue
            lines["offers", len(rows)] = table.line_num
            if len(row) != len(columns):
                counts = f"has {len(row)} fields, where the head has {len(columns)}"
                problems.append(Problem(table.line_num, f"{counts}: quote those with commas"))
            named = zip(columns, (field.strip() for field in row), strict=False)
            # A snapshot quotes what a spreadsheet would compute.
            rows.append({name: from_spreadsheet_cell(value) for name, value in named if value})
    except csv.Error as error:
        problems.append(Problem(table.line_num, f"is not CSV ({error}): repair the line"))
    if not rows and not problems:
        problems.append(Problem(1, "has no rows below a head: the first line names the columns"))
    return LocatedYaml({"offers": rows}, lines, tuple(problems))


def _wrong_columns(columns: list[str]) -> Iterator[Problem]:
    columns_of_offer = [*Offer.model_fields, CURRENCY]
    for name in columns:
        if name not in columns_of_offer:
            # "price" is spelled more like "provider" than like the column that is meant.
            is_price = PRICE not in columns and A_PRICE.search(name)
            near = suggestion_text([PRICE]) if is_price else did_you_mean(name, columns_of_offer)
            near = near or f"; known: {', '.join(columns_of_offer)}"
            yield Problem(1, f"unknown column {name!r}{near}")
    for name in ("gpu", PRICE):
        if name not in columns:
            yield Problem(1, f"no column {name}: add it")


def _checked(
    path: Path, located: LocatedYaml, catalog: Catalog, *, is_csv: bool = False
) -> CatalogRows:
    problems = list(located.problems)
    rows = CatalogRows()
    data = located.data
    if data is None and not problems:
        problems.append(Problem(1, "is empty: list gpus, offers or both"))
    # A mistake in the head would be repeated for every row.
    if data is not None and not problems:
        problems += _currencies(located)
        filled = _filled(data, path)
        try:
            rows = CatalogRows.model_validate(filled)
        except ValidationError as error:
            completed = LocatedYaml(filled, located.lines, ())
            problems += [
                _in_words(problem) for problem in problems_of(error, completed, CatalogRows)
            ]
        problems += [
            *_gpus_there_already(located, catalog, rows),
            *_unknown_gpus(located, catalog),
            *_repeated(located, rows),
        ]
    if problems:
        ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
        raise CatalogError(
            "\n".join(
                f"{path}:{p.line}: {IN_A_ROW.sub('', p.text) if is_csv else p.text}"
                for p in ordered
            )
        )
    return rows


def _filled(data: Any, path: Path) -> Any:
    """Fill in the defaults of offers: provider, region, instance, date and source."""
    offers = data.get("offers") if isinstance(data, dict) else None
    if not isinstance(offers, list):
        return data
    written = dt.datetime.fromtimestamp(path.stat().st_mtime, tz=dt.UTC).date()
    given = {"provider": OWN, "region": OWN, "recorded": written, "source": path.name}
    filled = [
        given | {"instance": offer.get("gpu", OWN)} | offer if isinstance(offer, dict) else offer
        for offer in offers
    ]
    for _, offer in _rows({"offers": filled}, "offers"):
        offer.pop(CURRENCY, None)
    return data | {"offers": filled}


def _in_words(problem: Problem) -> Problem:
    if NOT_A_PRICE in problem.text:
        return Problem(problem.line, f"{problem.text}: US dollars, as in 1.25")
    return problem


def _rows(data: Any, table: str) -> Iterator[tuple[Location, dict[str, Any]]]:
    rows = data.get(table) if isinstance(data, dict) else None
    for index, row in enumerate(rows if isinstance(rows, list) else ()):
        if isinstance(row, dict):
            yield (table, index), row


def _currencies(located: LocatedYaml) -> Iterator[Problem]:
    for place, offer in _rows(located.data, "offers"):
        currency = offer.get(CURRENCY, "USD")
        if str(currency).upper() != "USD":
            text = f"{_dotted(place)}{CURRENCY}: must be USD, not {shown(currency)}"
            yield Problem(located.line((*place, CURRENCY)), f"{text}: convert the price")


def _gpus_there_already(
    located: LocatedYaml, catalog: Catalog, rows: CatalogRows
) -> Iterator[Problem]:
    try:
        catalog.merged(rows.gpus)
    except CatalogError as error:
        for text in str(error).splitlines():
            index = next((i for i, g in enumerate(rows.gpus) if repr(g.key) in text), 0)
            yield Problem(located.line(("gpus", index, "key")), f"gpus[{index}]: {text}")


def _unknown_gpus(located: LocatedYaml, catalog: Catalog) -> Iterator[Problem]:
    keys = [row.get("key") for _, row in _rows(located.data, "gpus")]
    own = (key for key in keys if isinstance(key, str))
    there = dict.fromkeys([*(gpu.key for gpu in catalog.gpus), *own])
    for place, offer in _rows(located.data, "offers"):
        key = offer.get("gpu")
        if isinstance(key, str) and key not in there:
            near = did_you_mean(key, there)
            text = f"unknown GPU {key!r}{near} ('finetune-cost catalog gpus' lists all)"
            yield Problem(located.line((*place, "gpu")), f"{_dotted(place)}gpu: {text}")


def _repeated(located: LocatedYaml, rows: CatalogRows) -> Iterator[Problem]:
    first: dict[Identity, int] = {}
    for index, offer in enumerate(rows.offers):
        line = located.line(("offers", index))
        if offer.identity in first:
            text = f"the same offer as in line {first[offer.identity]}"
            yield Problem(line, f"offers[{index}]: {text}: keep one, or name another instance")
        first.setdefault(offer.identity, line)


def _dotted(place: Location) -> str:
    return f"offers[{place[1]}]."
