"""The law of a family: grouping, choice of a form, uncertainty, and predictions from its record."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from builders.mixtral_probes import cell, environment, ladder, limit, noisy_ladder, probe
from builders.step_time_equations import step_seconds_smooth
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fitting.families import fit_family as families
from fitting.families.fit_family import MOST_NESTED, fit_each, fit_families, merged
from fitting.families.predict import StepInputs, length_scale, predict, predictions
from fitting.families.records import FamilyFit, FamilyName, GroupLaw
from fitting.laws.fit_result import Parameter
from fitting.laws.forms import EQUATIONS, Form
from fitting.laws.robust_fit import fit_form
from fitting.points.step_time_rows import StepTimes
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation

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


def test_gpus_lengths_sparsities_and_drivers_are_one_family() -> None:
    """Each GPU and driver has a floor and slope of its own, each length a series."""
    driven = environment().model_copy(
        update={"versions": (("driver", "580"), *environment().versions)}
    )
    other = environment(device_name="NVIDIA H100")
    observations = [
        *ladder(cell(2), SIZES, 2.0, 0.5),
        *ladder(cell(8, seq_len=256), SIZES, 2.0, 0.9),
        *ladder(cell(2), SIZES, 2.1, 0.5, at=driven),
        *ladder(cell(2, gpu="h100"), SIZES, 1.0, 0.2, at=other),
    ]
    (family,) = fit_families(observations)
    assert family.name.key.startswith("mixtral-8x7b/qlora-r16")
    assert {series.name for series in family.series} == {
        f"a40@{STACK}/seq128",
        f"a40@{STACK}/seq256",
        f"a40@{driven.stack}/seq128",
        f"h100@{other.stack}/seq128",
    }
    assert (family.visits, family.points) == (24, 24)


def test_software_bases_weights_and_recipes_are_never_mixed() -> None:
    """Each family differs from the first in one respect and has a law of its own."""
    kinds: list[tuple[Cell, dict[str, object]]] = [
        (cell(), {}),
        (cell(), {"at": environment(torch="2.10.0")}),
        (cell(), {"basis": Basis.SIMULATED}),
        (cell(rank=8), {}),
        (cell(None), {}),
        (cell().model_copy(update={"weights": "pretrained"}), {}),
    ]
    observations = [
        o
        for k, (probed_cell, fields) in enumerate(kinds, start=1)
        for o in ladder(probed_cell, SIZES, 1.0, float(k), **fields)
    ]
    fits = fit_families(observations)
    assert len({fit.name.key for fit in fits}) == len(kinds)
    assert [fit.points for fit in fits] == [len(SIZES)] * len(kinds)
    slopes = [fit.groups[0].parameters[1] for fit in fits]
    per_example = sorted(p.value * (128 if p.unit == "s/token" else 1) for p in slopes)
    assert per_example == pytest.approx([1, 2, 3, 4, 5, 6], rel=0.01)


def test_capped_searching_and_untimed_probes_are_no_points() -> None:
    """A capped GPU runs at another GPU's speed, and a search has no usable times."""
    observations = [
        *ladder(cell(), SIZES, 2.0, 0.5),
        *limit(cell(), 20),
        probe(cell(), 7, purpose="ladder"),
    ]
    (family,) = fit_families([*observations, probe(cell(), 9, (1.0,), purpose="search")])
    assert family.points == len(SIZES)
    assert fit_families([o.model_copy(update={"basis": Basis.CAPPED}) for o in observations]) == ()


def test_visits_of_one_batch_size_are_one_point() -> None:
    """The point is their median: a repeat would leak into a held-out prediction."""
    rows = points(("a40",), (128,), (0.25,), (1, 2, 4))
    again = rows.where(np.array([0, 1, 2, 2, 2, 0]))
    again.seconds[:] = [1.0, 2.0, 4.0, 8.0, 5.0, 3.0]
    one = merged(again)
    assert (one.batch_size.tolist(), one.seconds.tolist()) == ([1, 2, 4], [2.0, 2.0, 5.0])
    assert one.tokens.tolist() == [128, 256, 512]
    fit = fit_family(again)
    assert (fit.visits, fit.points) == (6, 3)


def test_pooled_law_is_recovered_within_its_standard_errors() -> None:
    """Floors, slopes and the exponent return from steps with 1 % noise; no form is better."""
    fit = fitted(points(noise=0.01))
    assert (fit.form, fit.equation) == (Form.POOLED, EQUATIONS[Form.POOLED])
    assert [c.error for c in fit.candidates] == sorted(c.error for c in fit.candidates)
    assert {c.form for c in fit.candidates} == set(Form)
    for gpu, floor, slope in (("a40", 2.0, 0.004), ("h100", 1.4, 0.002)):
        law = law_of(fit, f"{gpu}@{STACK}")
        for name, unit, true in (("t0", "s", floor), ("k", "s/token", slope)):
            estimate = parameter(law, name)
            assert estimate.unit == unit
            assert estimate.standard_error is not None
            assert abs(estimate.value - true) < 4 * estimate.standard_error
            assert estimate.standard_error < 0.03 * true
    assert fit.exponent is not None
    assert fit.exponent.standard_error is not None
    assert abs(fit.exponent.value - EXPONENT) < 4 * fit.exponent.standard_error < 0.2
    assert fit.suspects == ()


seconds = st.floats(min_value=1e-3, max_value=1e3)


@settings(max_examples=25, deadline=None)
@given(
    t0=seconds,
    k0=seconds,
    k1=seconds,
    batches=st.sets(st.integers(min_value=1, max_value=512), min_size=3, max_size=6),
)
def test_affine_steps_are_predicted_whatever_their_coefficients(
    t0: float, k0: float, k1: float, batches: set[int]
) -> None:
    """Affine step times are predicted over six orders of magnitude."""
    observations = [
        probe(probed_cell, b, (t0 + b * (k0 + k1 * probed_cell.sparsity),))
        for probed_cell in (cell(2), cell(8))
        for b in batches
    ]
    (fit,) = fit_families(observations)
    for b in batches:
        prediction = predict(fit, StepInputs("a40", STACK, 128, 0.25, b))
        assert prediction is not None
        assert prediction.value == pytest.approx(t0 + b * (k0 + k1 * 0.25), rel=1e-3)
        assert prediction.low <= prediction.value <= prediction.high


def test_the_choice_of_a_form_has_a_reason() -> None:
    """The form has the least error, or is the simplest within one standard error of it."""
    whys = {fitted(points(noise=0.01, seed=seed)).why for seed in range(6)}
    forms = {str(form) for form in Form}
    assert all("least" in why or why.rpartition(", ")[2] in forms for why in whys)
    chosen = fitted(points(noise=0.01))
    least = chosen.candidates[0]
    (taken,) = (c for c in chosen.candidates if c.form is chosen.form)
    assert taken.error <= least.error + least.standard_error


def test_held_out_lengths_and_batches_have_errors_where_a_form_predicts_them() -> None:
    """Forms by GPU have errors of held-out lengths; a single series has neither error."""
    by_form = {c.form: c for c in fitted(points(noise=0.01)).candidates}
    for form in (Form.POOLED, Form.AFFINE_TOKENS):
        length_error = by_form[form].length_error
        assert length_error is not None
        assert length_error < 0.05
    assert by_form[Form.POOLED_BY_SERIES].length_error is None
    assert all(c.growing_error is not None for c in by_form.values())
    growing = by_form[Form.LOGARITHM].growing_error
    assert growing is not None
    assert growing > 0.1
    single = fit_family(points(("a40",), (128,), (1.0,), (1, 2, 4)))
    assert {(c.length_error, c.growing_error) for c in single.candidates} == {(None, None)}


def test_the_law_for_other_lengths_is_a_form_that_predicts_them() -> None:
    """A form by series may fit best where lengths differ, but predicts no other length."""
    rows = points(lengths=(128, 256, 512, 1024), noise=0.001)
    length = rows.tokens / rows.batch_size
    rows.seconds[:] *= np.select([length == 128, length == 512], [1.1, 0.92], 1.0)
    fit = fitted(rows)
    assert fit.form not in {None, Form.POOLED, Form.AFFINE_TOKENS}
    errors = {c.form: c.length_error for c in fit.candidates if c.length_error is not None}
    law = fit.by_length
    assert law is not None
    assert (law.form, law.error) == min(errors.items(), key=lambda item: item[1])
    assert 0.03 < law.error < 0.15
    step = StepInputs("a40", STACK, 1024, 0.25, 8)
    scale = length_scale(fit, step, 700)
    assert scale is not None
    assert (scale.form, scale.error) == (law.form, law.error)
    assert scale.factor == pytest.approx(700 / 1024, rel=0.1)
    again = FamilyFit.model_validate_json(fit.model_dump_json())
    assert length_scale(again, step, 700) == scale
    assert length_scale(fit, replace(step, gpu="a100"), 700) is None
    single = fitted(points(lengths=(128,), noise=0.01))
    assert single.by_length is None
    assert length_scale(single, replace(step, seq_len=128), 64) is None


def test_an_outlier_is_a_suspect_with_its_expected_time() -> None:
    """The suspect has its expected time and its distance in spreads; the law hardly follows it."""
    rows = points(noise=0.01)
    place = 9
    fit = fitted(with_seconds(rows, place, 1.6))
    (suspect,) = fit.suspects
    assert (suspect.series, suspect.sparsity) == (rows.series[place], rows.sparsity[place])
    assert (suspect.batch_size, suspect.seq_len) == (rows.batch_size[place], 128)
    assert suspect.seconds == rows.seconds[place]
    assert suspect.expected_seconds == pytest.approx(rows.seconds[place] / 1.6, rel=0.05)
    assert fit.spread is not None
    apart = math.log(suspect.seconds / suspect.expected_seconds)
    assert suspect.spreads == pytest.approx(apart / fit.spread)
    assert suspect.spreads > 5


@pytest.mark.parametrize("most_nested", [0, 60])
def test_prediction_intervals_have_their_nominal_coverage(most_nested: int) -> None:
    """About 90 % of fresh steps with 3 % noise lie inside; the record names the residuals used."""
    draws = 2 if most_nested else 20
    inside = []
    for seed in range(0, 2 * draws, 2):
        rows, fresh = (points(("a40",), noise=0.03, seed=s) for s in (seed, seed + 1))
        fit = fit_family(rows, most_nested=most_nested)
        assert fit.intervals is not None
        assert fit.intervals.residuals == ("nested" if most_nested else "first order")
        assert fit.intervals.coverage is not None
        assert 0.8 <= fit.intervals.coverage <= 1
        predicted = predictions(fit, fresh)
        inside += [
            t is not None and t.low <= s <= t.high
            for t, s in zip(predicted, fresh.seconds, strict=True)
        ]
    assert 0.8 <= np.mean(inside) <= 0.98


def test_few_points_have_an_interval_without_a_coverage() -> None:
    """Three points give Student's t interval, but no estimate of its coverage."""
    fit = fit_family(points(("a40",), (128,), (1.0,), (1, 4, 16), noise=0.03))
    assert fit.intervals is not None
    assert fit.intervals.coverage is None
    many = fit_family(points(("a40",), (128,), (1.0,), range(1, 17), noise=0.03))
    assert many.intervals is not None
    assert fit.intervals.half_width > many.intervals.half_width


@pytest.mark.parametrize(
    ("seq_len", "sparsity", "batch_size", "extrapolated"),
    [
        (128, 0.25, 4, False),
        (128, 0.25, 13, False),
        (128, 0.25, 14, True),
        (128, 1.0, 4, False),
        (128, 1.0, 5, True),
        (128, 0.5, 4, False),
        (128, 0.5, 5, True),
        (128, 0.125, 2, True),
        (512, 0.25, 2, True),
    ],
)
def test_predictions_outside_the_measured_range_are_extrapolated(
    seq_len: int, sparsity: float, batch_size: int, *, extrapolated: bool
) -> None:
    """Larger batches, sparsities outside the measured ones and other lengths are extrapolated."""
    dense = points(("a40",), (128,), (1.0,), (1, 2, 3, 4))
    fit = fitted(joined(points(("a40",), (128,), (0.25,)), dense))
    prediction = predict(fit, StepInputs("a40", STACK, seq_len, sparsity, batch_size))
    assert prediction is not None
    assert prediction.extrapolated is extrapolated


def joined(*parts: StepTimes) -> StepTimes:
    """Rows of several parts."""
    names = ("gpu", "series", "batch_size", "tokens", "sparsity", "seconds")
    return StepTimes(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def test_a_law_by_gpu_predicts_an_unmeasured_length() -> None:
    """The prediction has the family's interval, as the series has no points."""
    fit = fitted(points(noise=0.01))
    prediction = predict(fit, StepInputs("h100", STACK, 192, 1.0, 4))
    assert prediction is not None
    (expected,) = points(("a40", "h100"), (192,), (1.0,), (4,)).seconds[1:]
    assert prediction.value == pytest.approx(expected, rel=0.02)
    assert fit.intervals is not None
    assert math.log(prediction.high / prediction.value) == pytest.approx(fit.intervals.half_width)


def test_a_law_predicts_nothing_for_unmeasured_gpus_stacks_and_sparsities() -> None:
    """A second sparsity needs an exponent, and one sparsity does not identify it."""
    fit = fitted(points(sparsities=(0.25,), noise=0.01))
    assert predict(fit, StepInputs("a40", STACK, 128, 0.25, 4)) is not None
    assert predict(fit, StepInputs("a40", STACK, 128, 1.0, 4)) is None
    assert predict(fit, StepInputs("a40", "another", 128, 0.25, 4)) is None
    assert predict(fit, StepInputs("a100", STACK, 128, 0.25, 4)) is None
    assert fit.exponent is None
    assert {group.sparsity for group in fit.groups} == {0.25}


def test_a_gpu_with_too_few_points_has_a_remedy_and_no_law() -> None:
    """The other GPUs of the family have a law."""
    few = points(("a100",), (128,), (0.25,), (1, 2))
    fit = fitted(joined(points(noise=0.01), few))
    group = law_of(fit, f"a100@{STACK}")
    assert group.parameters == ()
    assert str(group.remedy).startswith("measure at least 3")
    assert predict(fit, StepInputs("a100", STACK, 128, 0.25, 2)) is None
    assert predict(fit, StepInputs("a40", STACK, 128, 0.25, 2)) is not None


@pytest.mark.parametrize(
    ("observations", "why", "remedy"),
    [
        (limit(cell(), 4), "no ladder probe that fits was timed", "time at least 3 ladder probes"),
        (
            ladder(cell(), (1, 2), 2.0, 0.5),
            "2 points over 2 batch sizes on 1 GPU",
            "measure at least 3 points on one GPU, among them two batch sizes at the same",
        ),
        (
            [*ladder(cell(), (4,), 2.0, 0.5), *ladder(cell(8), (4, 4), 2.0, 0.5)],
            "2 points over 1 batch size on 1 GPU",
            "measure at least 3 points",
        ),
    ],
)
def test_too_few_points_are_refused_with_a_remedy(
    observations: list[Observation], why: str, remedy: str
) -> None:
    """A family without enough points predicts nothing and has a reason and a remedy."""
    (fit,) = fit_families(observations)
    assert (fit.form, fit.groups, fit.candidates, fit.intervals) == (None, (), (), None)
    assert fit.why.startswith(why)
    assert str(fit.remedy).startswith(remedy)
    assert predict(fit, StepInputs("a40", STACK, 128, 0.25, 4)) is None


def test_a_negative_floor_is_held_at_zero_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its standard error is absent."""
    take_only(Form.AFFINE_EXAMPLES, monkeypatch)
    (fit,) = fit_families(ladder(cell(), (2, 3, 5, 8), -0.1, 0.5))
    (group,) = fit.groups
    assert group.held_at_zero == ("t0",)
    floor = parameter(group, "t0")
    assert (floor.value, floor.standard_error) == (0, None)


def test_record_is_all_that_predictions_need() -> None:
    """After a round trip through JSON the record is equal, finite and predicts the same."""
    for rows in (points(noise=0.02), points(sparsities=(1.0,), noise=0.02), points(sizes=(1, 2))):
        fit = fitted(rows)
        text = fit.model_dump_json()
        back = FamilyFit.model_validate_json(text)
        assert back == fit
        json.loads(text, parse_constant=pytest.fail)
        assert predictions(back, rows) == predictions(fit, rows)


def take_only(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one form to choose from."""
    candidate_fits = families.candidate_fits
    monkeypatch.setattr(
        families,
        "candidate_fits",
        lambda rows: [c for c in candidate_fits(rows) if c.fitted.form is form],
    )


@pytest.mark.parametrize("form", list(Form))
def test_every_form_predicts_what_it_fitted(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions from the record equal those of the fitted form."""
    rows = points(noise=0.02)
    take_only(form, monkeypatch)
    fit = fitted(rows)
    assert fit.form == form
    assert "only" in fit.why
    predicted = [t.value for t in predictions(fit, rows) if t is not None]
    expected = fit_form(form, merged(rows))
    assert expected is not None
    assert predicted == pytest.approx(expected.seconds(rows).tolist())


def test_the_order_of_the_log_does_not_matter() -> None:
    """A resumed run appends in another order and must give the same file."""
    observations = noisy_ladder((1, 2, 4, 8))
    assert fit_families(observations) == fit_families(observations[::-1])


def test_smaller_families_are_nested_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget for nested cross-validation is spent on small families."""
    monkeypatch.setattr(families, "MOST_NESTED_OF_RUN", 10)
    observations = [
        o
        for rank, sizes in ((1, SIZES), (2, (1, 2, 4)), (3, (1, 2, 4, 8)))
        for o in ladder(cell(rank=rank), sizes, 2.0, 0.5)
    ]
    residuals = {
        fit.points: fit.intervals.residuals for fit in fit_families(observations) if fit.intervals
    }
    assert residuals == {3: "first order", 4: "nested", 6: "first order"}


def test_a_record_with_a_form_and_a_remedy_is_invalid() -> None:
    """A fit failure cannot be read as a law."""
    fit = fitted(points())
    with pytest.raises(ValidationError, match="a form and its equation, or a remedy"):
        FamilyFit.model_validate(fit.model_dump() | {"remedy": "measure more"})
