"""Laws of anybody's observations: pandas in, pandas out.

fits = fit_frame(pd.read_csv("mine.csv"))
fits.coefficients, fits.candidates, fits.suspects, fits.laws
predict_frame(fits.families, pd.DataFrame({"gpu": ["A40"], "model": ["mixtral-8x7b"], …}))
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fitting.families.fit_family import fit_each
from fitting.families.predict import predictions
from fitting.families.records import FamilyFit, FamilyName
from fitting.laws.fit_result import Parameter
from fitting.numerics.arrays import IntArray
from fitting.points.batch_lengths import Lengths
from fitting.points.step_time_rows import StepTimes
from fitting.tables.csv_rows import COLUMNS, RowFamily, read_rows
from fitting.tables.csv_table import CsvTable, SheetFile, quoted
from fitting.tables.observations_table import Observed, read_frame
from gpu_catalog.suggestions import did_you_mean

ALL_GROUPS = "all"  # the group of what a family's groups share
SEVERAL_GPUS = "several GPUs: laws are of one"
FAMILY = ["family", "model", "recipe", "basis", "software"]
PREDICTED = [
    *("predicted_step_seconds", "predicted_step_seconds_low", "predicted_step_seconds_high"),
    *("predicted_queries_per_second", "predicted_queries_per_second_low"),
    *("predicted_queries_per_second_high", "extrapolated", "level", "form", "note"),
]


@dataclass(frozen=True, slots=True)
class FrameFits:
    """What came of a table.

    Attributes:
        families: a law, or the reason that there is none, for each family.
        observed: the rows it was fitted to, and what was left out.
    """

    families: tuple[FamilyFit, ...]
    observed: Observed

    @property
    def laws(self) -> pd.DataFrame:
        """As ``laws_frame`` has them."""
        return laws_frame(self.families)

    @property
    def coefficients(self) -> pd.DataFrame:
        """As ``coefficients_frame`` has them."""
        return coefficients_frame(self.families)

    @property
    def candidates(self) -> pd.DataFrame:
        """As ``candidates_frame`` has them."""
        return candidates_frame(self.families)

    @property
    def suspects(self) -> pd.DataFrame:
        """A row for each point that the law does not believe, with its rows of the table."""
        labels = self._labels()
        rows = [
            _of(fit)
            | suspect.model_dump()
            | {
                "rows": " ".join(
                    labels[fit.name, suspect.series, suspect.sparsity, suspect.batch_size]
                )
            }
            for fit in self.families
            for suspect in fit.suspects
        ]
        further = ["gpu", "series", "seq_len", "sparsity", "batch_size", "seconds"]
        return _frame(rows, [*FAMILY, *further, "expected_seconds", "spreads", "rows"])

    def _labels(self) -> dict[tuple[FamilyName, str, float, float], list[str]]:
        """What the table calls the rows of each point."""
        found: defaultdict[tuple[FamilyName, str, float, float], list[str]] = defaultdict(list)
        rows, labels = self.observed.rows, [str(label) for label in self.observed.index]
        for family, places in self.observed.by_family().items():
            for place in places:
                point = (rows.series[place], rows.sparsity[place], rows.batch_size[place])
                found[family, str(point[0]), float(point[1]), float(point[2])].append(labels[place])
        return found


def laws_frame(families: Sequence[FamilyFit]) -> pd.DataFrame:
    """A row for each family: form, equation, why, what to measure, how sure."""
    rows = [
        _of(fit)
        | {
            "visits": fit.visits,
            "points": fit.points,
            "form": fit.form,
            "equation": fit.equation,
            "why": fit.why,
            "remedy": fit.remedy,
            "spread": fit.spread,
            "level": None if fit.intervals is None else fit.intervals.level,
            "half_width": None if fit.intervals is None else fit.intervals.half_width,
            "coverage": None if fit.intervals is None else fit.intervals.coverage,
        }
        for fit in families
    ]
    further = ["visits", "points", "form", "equation", "why", "remedy", "spread", "level"]
    return _frame(rows, [*FAMILY, *further, "half_width", "coverage"])


def coefficients_frame(families: Sequence[FamilyFit]) -> pd.DataFrame:
    """A row for each parameter of each group: a GPU, a series, or what all of them share."""
    rows = [row for fit in families for row in _coefficients(fit)]
    further = ["form", "group", "points", "parameter", "value", "unit", "standard_error"]
    return _frame(rows, [*FAMILY, *further, "remedy"])


def candidates_frame(families: Sequence[FamilyFit]) -> pd.DataFrame:
    """A row for each form that was tried: its errors on what it had not seen."""
    rows = [
        _of(fit)
        | {"form": candidate.form, "chosen": candidate.form is fit.form}
        | {name: getattr(candidate, name) for name in _ERRORS}
        for fit in families
        for candidate in fit.candidates
    ]
    return _frame(rows, [*FAMILY, "form", "chosen", *_ERRORS])


_ERRORS = ("error", "standard_error", "growing_error", "length_error", "parameters", "condition")


def fit_frame(
    frame: pd.DataFrame,
    *,
    lengths: Mapping[str, Lengths] | None = None,
    file: SheetFile | None = None,
) -> FrameFits:
    """Fits the law of every family of a table.

    Args:
        frame: observations, as ``fitting.tables.observations_table.read_frame`` takes them.
        lengths: of data sets' examples, by name.
        file: that it is from, for messages.

    Raises:
        TableError: it cannot be read; a line for each mistake.
    """
    observed = read_frame(frame, lengths=lengths, file=file)
    families = observed.by_family().items()
    return FrameFits(
        families=fit_each([(name, observed.rows.where(rows)) for name, rows in families]),
        observed=observed,
    )


def predict_frame(
    fits: Sequence[FamilyFit],
    frame: pd.DataFrame,
    *,
    lengths: Mapping[str, Lengths] | None = None,
    file: SheetFile | None = None,
) -> pd.DataFrame:
    """Asks the laws: the frame with columns ``PREDICTED`` beside its own.

    A row names what it asks of as observations do, but for the throughput. Of recipe, software and
    basis it need say no more than tells one family of its model from the others. Intervals are
    those of ``fitting.families``; where the law gives no prediction, seconds and rates are nan and
    ``note`` says why.

    Args:
        fits: of families.
        frame: the questions.
        lengths: of data sets' examples, by name.
        file: that they are from, for messages.

    Raises:
        TableError: a question cannot be read, or is of several families; a line for each mistake.
    """
    sheet = CsvTable(frame, COLUMNS, file)
    told, rows = read_rows(sheet, lengths, timed=False)
    of_model: defaultdict[str, list[FamilyFit]] = defaultdict(list)
    for fit in fits:
        of_model[fit.name.model].append(fit)
    answers: list[dict[str, object]] = [{"note": SEVERAL_GPUS} for _ in told]
    asked: defaultdict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(told):
        if not sheet.kept[place] or one.model is None:
            continue  # several GPUs, or told by itself
        found = _family_of(sheet, place, one, one.model, of_model)
        if isinstance(found, str):
            answers[place] = {"note": found}
        elif found is not None:
            asked[id(found)].append(place)
    questions = []
    for fit in fits:
        places = np.array(asked[id(fit)], np.int64)
        if len(places):
            own = _with_stacks(sheet, rows.where(places), places, fit)
            questions.append((fit, places, own))
    sheet.check()
    for fit, places, own in questions:
        for place, answer in zip(places, _answers(fit, own), strict=True):
            answers[place] = answer
    predicted = pd.DataFrame(answers, columns=PREDICTED, index=frame.index)
    return pd.concat([frame.drop(columns=PREDICTED, errors="ignore"), predicted], axis=1)


def _family_of(
    sheet: CsvTable,
    place: int,
    told: RowFamily,
    model: str,
    of_model: Mapping[str, Sequence[FamilyFit]],
) -> FamilyFit | str | None:
    """The one family a question is of, or why it is of none.

    Where it may be of several it is None, and the sheet is told.
    """
    if model not in of_model:
        return f"nothing was fitted to {quoted(model)}{did_you_mean(model, of_model)}"
    left = of_model[model]
    for name in ("recipe", "basis", "software", "weights"):
        said = getattr(told, name)
        known = sorted({str(getattr(fit.name, name)) for fit in left})
        if said is not None and said not in known:
            return f"nothing of {model} was fitted with {quoted(said)}, but with {_or(known)}"
        if said is not None:
            left = [fit for fit in left if getattr(fit.name, name) == said]
    if len(left) > 1:
        differing = [
            f"{name} ({_or(sorted({str(getattr(fit.name, name)) for fit in left}))})"
            for name in ("recipe", "basis", "software", "weights")
            if len({getattr(fit.name, name) for fit in left}) > 1
        ]
        text = f"{len(left)} laws are of {quoted(model)}: say also {', '.join(differing)}"
        sheet.row_is_wrong("model", place, text)
        return None
    return left[0]


def _or(values: Sequence[str]) -> str:
    return " or ".join(quoted(value) for value in values)


def _with_stacks(sheet: CsvTable, rows: StepTimes, places: IntArray, fit: FamilyFit) -> StepTimes:
    """The rows of one family: a GPU that was seen under one stack alone has that stack."""
    names = _gpus_of(fit)
    gpus, series = [], []
    for place, gpu, one in zip(places, rows.gpu, rows.series, strict=True):
        known = names.get(str(gpu), [str(gpu)])
        if len(known) > 1:
            stacks = _or([name.partition("@")[2] for name in known])
            sheet.row_is_wrong("gpu", int(place), f"was seen with stack {stacks}: say which")
        gpus.append(known[0])
        series.append(known[0] + str(one).removeprefix(str(gpu)))
    return replace(rows, gpu=np.array(gpus, np.str_), series=np.array(series, np.str_))


def _gpus_of(fit: FamilyFit) -> dict[str, list[str]]:
    """GPUs with their stacks, by the key that they have without."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted({series.name.partition("/")[0] for series in fit.series}):
        found[name.partition("@")[0]].append(name)
    return found


def _answers(fit: FamilyFit, rows: StepTimes) -> Iterator[dict[str, object]]:
    """Columns ``PREDICTED`` of each row."""
    known = [name for names in _gpus_of(fit).values() for name in names]
    for prediction, gpu, size in zip(
        predictions(fit, rows), rows.gpu, rows.batch_size, strict=True
    ):
        if prediction is None:
            yield {"form": fit.form, "note": _why_nothing(fit, str(gpu), known)}
            continue
        seconds = (prediction.value, prediction.low, prediction.high)
        rates = (size / t for t in (prediction.value, prediction.high, prediction.low))
        level = None if fit.intervals is None else fit.intervals.level
        values = (*seconds, *rates, prediction.extrapolated, level, fit.form, None)
        yield dict(zip(PREDICTED, values, strict=True))


def _why_nothing(fit: FamilyFit, gpu: str, known: Sequence[str]) -> str:
    if fit.form is None:
        return f"no law: {fit.why}: {fit.remedy}"
    if fit.intervals is None:
        return "no point is left to tell how sure the law is: measure more"
    if gpu not in known:
        return f"no observation of {gpu}, but of {', '.join(known)}"
    return "too few points of this GPU or series, or another sparsity than the one seen"


def _of(fit: FamilyFit) -> dict[str, object]:
    """The columns that say which family a row is of."""
    name = fit.name
    values = (name.key, name.model, name.recipe, name.basis.value, name.software)
    return dict(zip(FAMILY, values, strict=True))


def _coefficients(fit: FamilyFit) -> Iterator[dict[str, object]]:
    family = _of(fit) | {"form": fit.form}
    if fit.exponent is not None:
        yield family | {"group": ALL_GROUPS, "points": fit.points} | _parameter(fit.exponent)
    for law in fit.groups:
        group = {"group": law.name, "points": law.points}
        for parameter in law.parameters:
            yield family | group | _parameter(parameter)
        if not law.parameters:
            yield family | group | {"remedy": law.remedy}


def _parameter(parameter: Parameter) -> dict[str, object]:
    told = parameter.model_dump()
    return {"parameter": told.pop("name")} | told


def _frame(rows: list[dict[str, object]], columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns)
