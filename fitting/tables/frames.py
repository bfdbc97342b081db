"""Laws fitted to pandas frames, and predictions as frames."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fitting.families.fit_family import fit_each
from fitting.families.predict import predictions
from fitting.families.records import FamilyFit, LawCandidate, Suspect
from fitting.laws.fit_result import Parameter
from fitting.numerics.arrays import IntArray
from fitting.points.batch_lengths import Lengths
from fitting.points.step_time_rows import StepTimes
from fitting.tables.csv_rows import COLUMNS, RowFamily, read_rows
from fitting.tables.csv_table import CsvFile, CsvTable, quoted
from fitting.tables.observations_table import Observed, read_frame
from gpu_catalog.suggestions import did_you_mean

ALL_GROUPS = "all"  # group name of a parameter that all groups of a family share
SEVERAL_GPUS = "several GPUs: laws predict one"
FAMILY = ["family", "model", "recipe", "basis", "software"]
_LAW = ("visits", "points", "form", "equation", "why", "remedy", "spread")
_INTERVALS = ("level", "half_width", "coverage")
OPEN_FIELDS = ("recipe", "basis", "software", "weights")  # fields that a question may leave open
PREDICTED = [
    *("predicted_step_seconds", "predicted_step_seconds_low", "predicted_step_seconds_high"),
    *("predicted_examples_per_second", "predicted_examples_per_second_low"),
    *("predicted_examples_per_second_high", "extrapolated", "level", "form", "note"),
]


@dataclass(frozen=True, slots=True)
class FamilyLaws:
    """Laws of families of step times, as records and as frames.

    Attributes:
        families: law of each family, or the reason why there is none.
    """

    families: tuple[FamilyFit, ...]

    @property
    def laws(self) -> pd.DataFrame:
        """A row per family: form, equation, spread, and interval with its coverage."""
        rows = [
            _columns(fit)
            | {name: getattr(fit, name) for name in _LAW}
            | {name: getattr(fit.intervals, name, None) for name in _INTERVALS}
            for fit in self.families
        ]
        return pd.DataFrame(rows, columns=[*FAMILY, *_LAW, *_INTERVALS])

    @property
    def coefficients(self) -> pd.DataFrame:
        """A row per parameter of each GPU, series or whole family, with its standard error."""
        rows = [row for fit in self.families for row in _coefficients(fit)]
        further = ["form", "group", "points", "parameter", "value", "unit", "standard_error"]
        return pd.DataFrame(rows, columns=[*FAMILY, *further, "remedy"])

    @property
    def candidates(self) -> pd.DataFrame:
        """A row per candidate form, with its errors on held-out points."""
        rows = [
            _columns(fit) | candidate.model_dump() | {"chosen": candidate.form is fit.form}
            for fit in self.families
            for candidate in fit.candidates
        ]
        errors = (name for name in LawCandidate.model_fields if name != "form")
        return pd.DataFrame(rows, columns=[*FAMILY, "form", "chosen", *errors])


@dataclass(frozen=True, slots=True)
class FrameFits(FamilyLaws):
    """Laws fitted to a table.

    Attributes:
        observed: rows that the laws were fitted to, and counts of excluded rows.
    """

    observed: Observed

    @property
    def suspects(self) -> pd.DataFrame:
        """A row per suspect point, with its rows of the table."""
        places = self.observed.by_family()
        rows = [
            _columns(fit)
            | point.model_dump()
            | {"rows": " ".join(self.observed.names_of(point, places[fit.name]))}
            for fit in self.families
            for point in fit.suspects
        ]
        return pd.DataFrame(rows, columns=[*FAMILY, *Suspect.model_fields, "rows"])


def fit_frame(
    frame: pd.DataFrame,
    *,
    lengths: Mapping[str, Lengths] | None = None,
    file: CsvFile | None = None,
) -> FrameFits:
    """Fit the law of every family of a table.

    Args:
        frame: observations, as ``fitting.tables.observations_table.read_frame`` takes them.
        lengths: example lengths by data set, for rows that name a data set instead of a length.
        file: file of the table, for messages.

    Raises:
        TableError: the table cannot be read; a line for each mistake.
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
    file: CsvFile | None = None,
) -> pd.DataFrame:
    """Predict the step time and the throughput of each row.

    A row has the columns of an observation except the throughput. Of recipe, software, basis and
    weights, it needs only those that distinguish the families of its model.

    Args:
        fits: laws, one per family.
        frame: rows to predict.
        lengths: example lengths by data set, for rows that name a data set instead of a length.
        file: file of the frame, for messages.

    Returns:
        The frame with the columns ``PREDICTED`` added. Where no law gives a prediction, seconds and
        rates are nan and ``note`` has the reason.

    Raises:
        TableError: a row cannot be read or matches several families; a line for each mistake.
    """
    table = CsvTable(frame, COLUMNS, file)
    families, rows = read_rows(table, lengths, timed=False)
    answers: list[dict[str, object]] = [{"note": SEVERAL_GPUS} for _ in families]
    places_of: defaultdict[int, list[int]] = defaultdict(list)
    for place, family in enumerate(families):
        if not table.kept[place] or family.model is None:
            continue  # a run on several GPUs, or a blank that read_rows has recorded
        match = _match(table, place, family, fits)
        if isinstance(match, str):
            answers[place] = {"note": match}
        elif match is not None:
            places_of[id(match)].append(place)
    questions = []
    for fit in fits:
        places = np.array(places_of[id(fit)], np.int64)
        if len(places):
            questions.append((fit, places, _with_stacks(table, rows.where(places), places, fit)))
    table.check()
    for fit, places, own in questions:
        for place, answer in zip(places, _answers(fit, own), strict=True):
            answers[place] = answer
    predicted = pd.DataFrame(answers, columns=PREDICTED, index=frame.index)
    return pd.concat([frame.drop(columns=PREDICTED, errors="ignore"), predicted], axis=1)


def _match(
    table: CsvTable, place: int, family: RowFamily, fits: Sequence[FamilyFit]
) -> FamilyFit | str | None:
    """Law of the family of a question, or the reason why there is none.

    None where several laws match: the mistake is then recorded in the table.
    """
    model = family.model or ""
    matches = [fit for fit in fits if fit.name.model == model]
    if not matches:
        near = did_you_mean(model, {fit.name.model for fit in fits})
        return f"nothing was fitted to {quoted(model)}{near}"
    for name in OPEN_FIELDS:
        value = getattr(family, name)
        if value is None:
            continue
        fitted = _values(matches, name)
        if value not in fitted:
            return f"nothing of {model} was fitted with {quoted(value)}, but with {_or(fitted)}"
        matches = [fit for fit in matches if getattr(fit.name, name) == value]
    if len(matches) > 1:
        differing = [
            f"{name} ({_or(values)})"
            for name in OPEN_FIELDS
            if len(values := _values(matches, name)) > 1
        ]
        text = f"{quoted(model)} has {len(matches)} laws: give {', '.join(differing)}"
        table.row_is_wrong("model", place, text)
        return None
    return matches[0]


def _values(fits: Sequence[FamilyFit], name: str) -> list[str]:
    """Sorted values of a field of the families' names."""
    return sorted({str(getattr(fit.name, name)) for fit in fits})


def _or(values: Sequence[str]) -> str:
    return " or ".join(quoted(value) for value in values)


def _with_stacks(table: CsvTable, rows: StepTimes, places: IntArray, fit: FamilyFit) -> StepTimes:
    """Rows of one family; a GPU that was observed with a single stack gets that stack."""
    names = _gpus_of(fit)
    gpus, series = [], []
    for place, gpu, name in zip(places, rows.gpu, rows.series, strict=True):
        observed = names.get(str(gpu), [str(gpu)])
        if len(observed) > 1:
            stacks = _or([own.partition("@")[2] for own in observed])
            table.row_is_wrong("gpu", int(place), f"was observed with stack {stacks}: give one")
        gpus.append(observed[0])
        series.append(observed[0] + str(name).removeprefix(str(gpu)))
    return replace(rows, gpu=np.array(gpus, np.str_), series=np.array(series, np.str_))


def _gpus_of(fit: FamilyFit) -> dict[str, list[str]]:
    """Observed GPUs with their stacks, by the key without the stack."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted({series.name.partition("/")[0] for series in fit.series}):
        names[name.partition("@")[0]].append(name)
    return names


def _answers(fit: FamilyFit, rows: StepTimes) -> Iterator[dict[str, object]]:
    """Columns ``PREDICTED`` of each row."""
    observed = [name for names in _gpus_of(fit).values() for name in names]
    for prediction, gpu, size in zip(
        predictions(fit, rows), rows.gpu, rows.batch_size, strict=True
    ):
        if prediction is None:
            yield {"form": fit.form, "note": _why_nothing(fit, str(gpu), observed)}
            continue
        seconds = (prediction.value, prediction.low, prediction.high)
        rates = (size / t for t in (prediction.value, prediction.high, prediction.low))
        level = None if fit.intervals is None else fit.intervals.level
        values = (*seconds, *rates, prediction.extrapolated, level, fit.form, None)
        yield dict(zip(PREDICTED, values, strict=True))


def _why_nothing(fit: FamilyFit, gpu: str, observed: Sequence[str]) -> str:
    if fit.form is None:
        return f"no law: {fit.why}: {fit.remedy}"
    if fit.intervals is None:
        return "too few points to estimate an interval: measure more"
    if gpu not in observed:
        return f"no observation of {gpu}, but of {', '.join(observed)}"
    return "too few points of this GPU or series, or a sparsity that was not observed"


def _columns(fit: FamilyFit) -> dict[str, object]:
    """Columns ``FAMILY`` of a row."""
    name = fit.name
    values = (name.key, name.model, name.recipe, name.basis.value, name.software)
    return dict(zip(FAMILY, values, strict=True))


def _coefficients(fit: FamilyFit) -> Iterator[dict[str, object]]:
    family = _columns(fit) | {"form": fit.form}
    if fit.exponent is not None:
        yield family | {"group": ALL_GROUPS, "points": fit.points} | _parameter(fit.exponent)
    for law in fit.groups:
        group = {"group": law.name, "points": law.points}
        for parameter in law.parameters:
            yield family | group | _parameter(parameter)
        if not law.parameters:
            yield family | group | {"remedy": law.remedy}


def _parameter(parameter: Parameter) -> dict[str, object]:
    return {"parameter": parameter.name} | parameter.model_dump(exclude={"name"})
