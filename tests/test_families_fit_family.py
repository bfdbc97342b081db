"""The law of a family: grouping, choice of a form, suspects and fit failures."""

import math
from dataclasses import replace

import numpy as np
import pytest
from builders.family_points import (
    EXPONENT,
    SIZES,
    STACK,
    fit_family,
    fitted,
    joined,
    law_of,
    parameter,
    points,
    take_only,
    with_seconds,
)
from builders.mixtral_probes import cell, environment, ladder, limit, noisy_ladder, probe
from pydantic import ValidationError

from fitting.families import fit_family as families
from fitting.families.fit_family import fit_families, merged
from fitting.families.predict import StepInputs, predict
from fitting.families.records import FamilyFit
from fitting.laws.forms import EQUATIONS, Form
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation


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


def test_an_outlier_that_bends_a_law_of_few_points_has_the_time_of_the_others() -> None:
    """To first order the time at 6 examples would be 7.7 s, five times that of 18."""
    rows = points(("a40",), (128,), (1.0,), (1, 3, 6, 10, 18))
    seconds = np.array([0.18, 0.285, 0.1685, 1.15, 1.6])
    (suspect,) = fitted(replace(rows, seconds=seconds)).suspects
    assert suspect.batch_size == 6
    assert 0.285 < suspect.expected_seconds < 1.15


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
