"""Step times of a family made by the pooled law, and shortcuts to its fit."""

from collections.abc import Iterable

import numpy as np
import pytest

from builders.mixtral_probes import environment
from builders.step_time_equations import step_seconds_smooth
from fitting.families import fit_family as families
from fitting.families.fit_family import MOST_NESTED, fit_each
from fitting.families.records import FamilyFit, FamilyName, GroupLaw
from fitting.laws.fit_result import Parameter
from fitting.laws.forms import Form
from fitting.points.step_time_rows import StepTimes
from trials.records.observation import Basis

NAME = FamilyName(model="mixtral-8x7b", recipe="qlora", basis=Basis.MEASURED, software="soft")
SIZES = (1, 2, 3, 5, 8, 13)
STACK = environment().stack
POWER, EXPONENT = 1.1, 0.7


def points(
    gpus: Iterable[str] = ("a40", "h100"),
    lengths: Iterable[int] = (128, 256),
    sparsities: Iterable[float] = (0.25, 1.0),
    sizes: Iterable[int] = SIZES,
    *,
    noise: float = 0.0,
    seed: int = 0,
) -> StepTimes:
    """Steps by the pooled law: each GPU has a floor and a slope, and all have one exponent."""
    rows = [
        (f"{gpu}@{STACK}", f"{gpu}@{STACK}/seq{length}", size, size * length, s, place)
        for place, gpu in enumerate(gpus)
        for length in lengths
        for s in sparsities
        for size in sizes
    ]
    gpu, series, size, tokens, sparsity, place = (
        np.array(part) for part in zip(*rows, strict=True)
    )
    slope = 0.004 / (1 + place)
    grown = tokens * slope * sparsity**EXPONENT
    floor = step_seconds_smooth(0.0, 1.0, 2.0, 0.0, EXPONENT, POWER) * (1 - 0.3 * place)
    exact = (floor**POWER + grown**POWER) ** (1 / POWER)
    factor = np.random.default_rng(seed).normal(1, noise, len(rows)) if noise else 1.0
    return StepTimes(
        gpu=gpu,
        series=series,
        batch_size=size.astype(float),
        tokens=tokens.astype(float),
        sparsity=sparsity,
        seconds=exact * factor,
    )


def with_seconds(rows: StepTimes, place: int, factor: float) -> StepTimes:
    """Rows with one step time multiplied by a factor."""
    rows.seconds[place] *= factor
    return rows


def fit_family(rows: StepTimes, most_nested: int = MOST_NESTED) -> FamilyFit:
    """Law of one family, with nested cross-validation up to this many points."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "MOST_NESTED", most_nested)
        (fit,) = fit_each([(NAME, rows)])
    return fit


def fitted(rows: StepTimes) -> FamilyFit:
    """Law of the family without nested cross-validation, which takes long."""
    return fit_family(rows, most_nested=0)


def law_of(fit: FamilyFit, name: str) -> GroupLaw:
    """Law of one group."""
    (law,) = (group for group in fit.groups if group.name == name)
    return law


def parameter(group: GroupLaw, name: str) -> Parameter:
    """Parameter of a group by its name."""
    (value,) = (p for p in group.parameters if p.name == name)
    return value


def joined(*parts: StepTimes) -> StepTimes:
    """Rows of several parts."""
    names = ("gpu", "series", "batch_size", "tokens", "sparsity", "seconds")
    return StepTimes(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def take_only(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one form to choose from."""
    candidate_fits = families.candidate_fits
    monkeypatch.setattr(
        families,
        "candidate_fits",
        lambda rows: [c for c in candidate_fits(rows) if c.fitted.form is form],
    )
