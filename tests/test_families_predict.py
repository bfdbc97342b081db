"""Predictions of a family's law: values, intervals, extrapolation, and other lengths."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from builders.family_points import (
    STACK,
    fit_family,
    fitted,
    joined,
    points,
    take_only,
)
from builders.mixtral_probes import cell, probe
from hypothesis import given, settings
from hypothesis import strategies as st

from fitting.families.fit_family import fit_families, merged
from fitting.families.predict import StepInputs, length_scale, predict, predictions
from fitting.families.records import FamilyFit
from fitting.laws.forms import Form
from fitting.laws.robust_fit import fit_form

seconds = st.floats(min_value=1e-3, max_value=1e3)


@settings(max_examples=10)
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


def test_record_is_all_that_predictions_need() -> None:
    """After a round trip through JSON the record is equal, finite and predicts the same."""
    for rows in (points(noise=0.02), points(sparsities=(1.0,), noise=0.02), points(sizes=(1, 2))):
        fit = fitted(rows)
        text = fit.model_dump_json()
        back = FamilyFit.model_validate_json(text)
        assert back == fit
        json.loads(text, parse_constant=pytest.fail)
        assert predictions(back, rows) == predictions(fit, rows)


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
