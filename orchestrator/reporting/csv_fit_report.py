"""``fit`` on a CSV of anybody's observations: what is printed, and the files beside it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from fitting.families.records import FamilyFit
from fitting.fit import Fits
from fitting.laws.fit_result import Parameter
from fitting.tables.csv_table import read_sheet
from fitting.tables.frames import FrameFits, fit_frame, predict_frame
from fitting.tables.observations_table import read_lengths
from orchestrator.markdown_table import table
from orchestrator.storage.run_storage import StoreError

MOST_TOLD = 12  # families told one by one; more are told in one table
SYMBOLS = "t: seconds of a step; b: examples in it; N: tokens in it, padded; s: sparsity."
FITS, COEFFICIENTS, PREDICTIONS = "fits.json", "coefficients.csv", "predictions.csv"
SUFFIX = ".fits"


def fit_csv(
    path: Path, asked: Path | None, lengths: Path | None, out: Path | None
) -> tuple[str, tuple[str, ...]]:
    """Fits the laws of a CSV's families, answers questions, and writes both.

    Args:
        path: the observations.
        asked: a CSV of questions; absent for none.
        lengths: a CSV of how long the examples of data sets are.
        out: the folder to write to; ``NAME.fits`` beside the observations unless told.

    Returns:
        What to print, and what else the reader must know, a line each.

    Raises:
        TableError: a CSV cannot be read; all mistakes of each, a line for each.
        StoreError: a file cannot be written.
    """
    known = {} if lengths is None else read_lengths(lengths)
    frame, file = read_sheet(path)
    fits = fit_frame(frame, lengths=known, file=file)
    predicted = None
    if asked is not None:
        questions, file = read_sheet(asked)
        predicted = predict_frame(fits.families, questions, lengths=known, file=file)
    folder = path.with_name(f"{path.stem}{SUFFIX}") if out is None else out
    _write(folder, fits, predicted)
    parts = [SYMBOLS, *_laws(fits), *_left_out(fits)]
    if predicted is not None:
        parts.append(_predictions(predicted))
    files = ", ".join((FITS, COEFFICIENTS, *([] if predicted is None else [PREDICTIONS])))
    parts.append(f"{folder}: {files}")
    return "\n\n".join(parts), fits.observed.remarks


def _write(folder: Path, fits: FrameFits, predicted: pd.DataFrame | None) -> None:
    texts = {
        FITS: Fits(fits=(), families=fits.families).model_dump_json(indent=1) + "\n",
        COEFFICIENTS: fits.coefficients.to_csv(index=False),
    }
    if predicted is not None:
        texts[PREDICTIONS] = predicted.to_csv(index=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error.strerror}") from None


def _laws(fits: FrameFits) -> Iterator[str]:
    """A part for each family, or one for all where they are many."""
    families = fits.families
    if not families:
        yield "No row tells how long a step takes on one GPU: nothing is fitted."
    elif len(families) > MOST_TOLD:
        yield _in_one_table(families)
    else:
        yield from (_family(fit, fits) for fit in families)


def _in_one_table(families: Sequence[FamilyFit]) -> str:
    rows = [
        (
            fit.name.key,
            fit.points,
            fit.form or f"none: {fit.why}",
            _percent(_chosen_error(fit)),
            "" if fit.intervals is None else _percent(fit.intervals.half_width),
            len(fit.suspects),
        )
        for fit in families
    ]
    return table(("family", "points", "law", "error", "interval, +-", "suspects"), rows)


def _chosen_error(fit: FamilyFit) -> float | None:
    return next((c.error for c in fit.candidates if c.form is fit.form), None)


def _family(fit: FamilyFit, fits: FrameFits) -> str:
    parts = [f"## {fit.name.key}", _summary(fit)]
    if fit.form is not None:
        parts += [_candidates(fit), _coefficients(fit)]
    suspects = fits.suspects
    suspects = suspects[suspects["family"] == fit.name.key]
    if len(suspects):
        parts.append(_suspects(suspects))
    return "\n\n".join(parts)


def _summary(fit: FamilyFit) -> str:
    if fit.form is None:
        return f"No law of {fit.points} points: {fit.why}: {fit.remedy}."
    text = f"{fit.points} points. {fit.equation}: {fit.why}."
    if fit.intervals is not None:
        i = fit.intervals
        text += f" {i.level:.0%} intervals: +-{_percent(i.half_width)}"
        text += "." if i.coverage is None else f", and {_percent(i.coverage)} of the points inside."
    return text


def _candidates(fit: FamilyFit) -> str:
    rows = [
        (
            f"{c.form}, chosen" if c.form is fit.form else c.form,
            f"{_percent(c.error)} +- {_percent(c.standard_error)}",
            _percent(c.growing_error),
            _percent(c.length_error),
            c.parameters,
        )
        for c in fit.candidates
    ]
    headers = ("law", "error, point left out", "larger batches", "other lengths", "parameters")
    return table(headers, rows)


def _coefficients(fit: FamilyFit) -> str:
    """A row for each group: its parameters with their standard errors, or what to measure."""
    columns = dict.fromkeys((p.name, p.unit) for law in fit.groups for p in law.parameters)
    rows = [
        (
            law.name,
            law.points,
            *(_valued({(p.name, p.unit): p for p in law.parameters}.get(c)) for c in columns),
            law.remedy or _held(law.held_at_zero),
        )
        for law in fit.groups
    ]
    headers = ["group", "points", *(f"{name}, {unit}" for name, unit in columns), "note"]
    if not any(note for *_, note in rows):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    text = table(headers, rows)
    return text if fit.exponent is None else f"{text}\n\ng = {_valued(fit.exponent)}"


def _held(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} would be below 0" if names else ""


def _valued(parameter: Parameter | None) -> str:
    if parameter is None:
        return ""
    error = parameter.standard_error
    return f"{parameter.value:.4g}" + ("" if error is None else f" +- {error:.2g}")


def _suspects(suspects: pd.DataFrame) -> str:
    rows = [
        (
            *(row["series"], f"{row['sparsity']:g}", f"{row['batch_size']:g}"),
            *(f"{row['seconds']:.4g}", f"{row['expected_seconds']:.4g}"),
            *(f"{row['spreads']:.1f}", row["rows"]),
        )
        for row in suspects.to_dict("records")
    ]
    headers = ("series", "s", "batch", "seconds", "expected", "spreads apart", "lines")
    return f"Points that the law does not believe:\n\n{table(headers, rows)}"


def _left_out(fits: FrameFits) -> Iterator[str]:
    left = fits.observed.left_out
    if left:
        lines = [f"- {out.rows} {_rows(out.rows)}: {out.reason}" for out in left]
        yield "\n".join(["Left out:", "", *lines])


def _predictions(predicted: pd.DataFrame) -> str:
    told = predicted["predicted_step_seconds"].notna()
    beyond = int((predicted["extrapolated"] == True).sum())  # noqa: E712 - absent is neither
    parts = [f"{int(told.sum())} of {len(predicted)} questions answered"]
    if beyond:
        parts.append(f"{beyond} of them beyond what was observed (extrapolated)")
    lines = ["; ".join(parts) + "."]
    notes = predicted.loc[~told, "note"].value_counts()
    lines += [f"- {count} not: {note}" for note, count in notes.items()]
    return "\n".join(lines)


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.1%}"
