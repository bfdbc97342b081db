"""Report and files of ``fit`` on a CSV of observations."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from fitting.families.records import FamilyFit
from fitting.fit import Fits
from fitting.laws.fit_result import Parameter
from fitting.tables.csv_rows import COLUMNS
from fitting.tables.csv_table import CsvTable, read_csv
from fitting.tables.frames import PREDICTED, FrameFits, fit_frame, predict_frame
from fitting.tables.observations_table import read_lengths
from gpu_catalog.number_text import short
from gpu_catalog.safe_text import spreadsheet_cell
from orchestrator.markdown_table import records_table, table
from orchestrator.storage.run_storage import StoreError

MOST_PREDICTIONS = 20  # in the output; all are in the file
MOST_SECTIONS = 12  # families with a section each; more share one table
SYMBOLS = "t: seconds of a step; b: examples in it; N: tokens in it, padded; s: sparsity."
FITS, COEFFICIENTS, PREDICTIONS = "fits.json", "coefficients.csv", "predictions.csv"
SUFFIX = ".fits"


def fit_csv(
    path: Path, questions: Path | None, lengths: Path | None, out: Path | None
) -> tuple[str, tuple[str, ...]]:
    """Fit the laws of a CSV's families, predict its questions, and write both to files.

    Args:
        path: CSV of observations.
        questions: CSV of steps to predict; None for none.
        lengths: CSV of histograms of the lengths of data sets; None for none.
        out: folder to write to; None for ``NAME.fits`` beside the observations.

    Returns:
        The report in Markdown, and remarks on the CSV, one line each.

    Raises:
        TableError: a CSV cannot be read; one line for each mistake of the file.
        StoreError: a file cannot be written.
    """
    lengths_of_data = {} if lengths is None else read_lengths(lengths)
    frame, file = read_csv(path)
    fits = fit_frame(frame, lengths=lengths_of_data, file=file)
    predicted = None
    if questions is not None:
        steps, file = read_csv(questions)
        predicted = predict_frame(fits.families, steps, lengths=lengths_of_data, file=file)
    folder = path.with_name(f"{path.stem}{SUFFIX}") if out is None else out
    _write(folder, fits, predicted)
    parts = [SYMBOLS, *_laws(fits), *_unused_rows(fits)]
    if predicted is not None:
        parts.append(_predictions(predicted))
    files = ", ".join((FITS, COEFFICIENTS, *([] if predicted is None else [PREDICTIONS])))
    parts.append(f"{folder}: {files}")
    return "\n\n".join(parts), fits.observed.remarks


def _write(folder: Path, fits: FrameFits, predicted: pd.DataFrame | None) -> None:
    texts = {
        FITS: Fits(fits=(), families=fits.families).model_dump_json(indent=1) + "\n",
        COEFFICIENTS: fits.coefficients.map(spreadsheet_cell).to_csv(index=False),
    }
    if predicted is not None:
        texts[PREDICTIONS] = predicted.map(spreadsheet_cell).to_csv(index=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error.strerror}") from None


def _laws(fits: FrameFits) -> Iterator[str]:
    """Yield a section for each family, or one table if there are many families."""
    families = fits.families
    if not families:
        yield "No row has the time of a step on one GPU: nothing is fitted."
    elif len(families) > MOST_SECTIONS:
        yield _in_one_table(families)
    else:
        yield from (_family(fit, fits) for fit in families)


def _in_one_table(families: Sequence[FamilyFit]) -> str:
    return records_table(
        {
            "family": fit.name.key,
            "points": fit.points,
            "law": fit.form or f"none: {fit.why}",
            "error": _percent(next((c.error for c in fit.candidates if c.form is fit.form), None)),
            "interval, +-": _percent(None if fit.intervals is None else fit.intervals.half_width),
            "suspects": len(fit.suspects),
        }
        for fit in families
    )


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
        return f"No law was fitted to {fit.points} points: {fit.why}. To get one, {fit.remedy}."
    text = f"{fit.points} points. {fit.equation}: {fit.why}."
    if fit.intervals is not None:
        i = fit.intervals
        text += f" {i.level:.0%} intervals: +-{_percent(i.half_width)}"
        text += "." if i.coverage is None else f", and {_percent(i.coverage)} of the points inside."
    return text


def _candidates(fit: FamilyFit) -> str:
    return records_table(
        {
            "law": f"{c.form}, chosen" if c.form is fit.form else c.form,
            "error, point left out": f"{_percent(c.error)} +- {_percent(c.standard_error)}",
            "larger batches": _percent(c.growing_error),
            "other lengths": _percent(c.length_error),
            "parameters": c.parameters,
        }
        for c in fit.candidates
    )


def _coefficients(fit: FamilyFit) -> str:
    """Table with a row for each group: parameters with standard errors, or what to measure."""
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
    return f"{' and '.join(names)} set to 0: the fit is below 0" if names else ""


def _valued(parameter: Parameter | None) -> str:
    if parameter is None:
        return ""
    error = parameter.standard_error
    return short(parameter.value, 4) + ("" if error is None else f" +- {short(error, 2)}")


def _suspects(suspects: pd.DataFrame) -> str:
    points = records_table(
        {
            "series": row["series"],
            "s": f"{row['sparsity']:g}",
            "batch": f"{row['batch_size']:g}",
            "seconds": short(row["seconds"], 4),
            "expected": short(row["expected_seconds"], 4),
            "spreads off": f"{row['spreads']:.1f}",
            "lines": row["rows"],
        }
        for row in suspects.to_dict("records")
    )
    return f"Suspect points, far from the law:\n\n{points}"


def _unused_rows(fits: FrameFits) -> Iterator[str]:
    unused = fits.observed.left_out
    if unused:
        lines = [f"- {out.rows} {_rows(out.rows)}: {out.reason}" for out in unused]
        yield "\n".join(["Rows that are not used:", "", *lines])


def _predictions(predicted: pd.DataFrame) -> str:
    has_prediction = predicted["predicted_step_seconds"].notna()
    beyond = int(_extrapolated(predicted).sum())
    parts = [f"{int(has_prediction.sum())} of {len(predicted)} steps predicted"]
    if beyond:
        parts.append(f"{beyond} of them extrapolated beyond the observations")
    lines = ["; ".join(parts) + "."]
    notes = predicted.loc[~has_prediction, "note"].value_counts()
    lines += [f"- {count} not predicted: {note}" for note, count in notes.items()]
    if not has_prediction.any():
        return "\n".join(lines)
    more = int(has_prediction.sum()) - MOST_PREDICTIONS
    rest = f"\n\n{more} more are in {PREDICTIONS}." if more > 0 else ""
    return "\n".join(lines) + f"\n\n{_predicted_rows(predicted, has_prediction)}{rest}"


def _predicted_rows(predicted: pd.DataFrame, shown: "pd.Series[bool]") -> str:
    """Table of the first predictions; 90 % intervals in brackets."""
    own = CsvTable(predicted.drop(columns=PREDICTED), COLUMNS)
    named = {name: own.texts(name) for name in ("gpu", "model", "seq_len", "batch_size")}
    places = [place for place, is_shown in enumerate(shown) if is_shown][:MOST_PREDICTIONS]
    return records_table(
        {
            **{name: texts[place] or "" for name, texts in named.items() if any(texts)},
            "s/step": _with_interval(predicted, place, "predicted_step_seconds"),
            "examples/s": _with_interval(predicted, place, "predicted_examples_per_second"),
            "extrapolated": "yes" if _extrapolated(predicted).iloc[place] else "",
        }
        for place in places
    )


def _extrapolated(predicted: pd.DataFrame) -> "pd.Series[bool]":
    return predicted["extrapolated"] == True  # noqa: E712 - absent is neither


def _with_interval(predicted: pd.DataFrame, place: int, name: str) -> str:
    value, low, high = (predicted[f"{name}{end}"].iloc[place] for end in ("", "_low", "_high"))
    return f"{short(value, 4)} ({short(low, 4)} to {short(high, 4)})"


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.1%}"
