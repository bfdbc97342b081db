"""The section of laws: equation, rivals, parameters, suspects and intervals of a family."""

import numpy as np

from fitting.families.fit_family import fit_each
from fitting.families.records import FamilyFit, FamilyName
from fitting.laws.fit_result import Parameter
from fitting.laws.forms import EQUATIONS, Form
from fitting.points.step_time_rows import StepTimes
from orchestrator.reporting.sections.law_section import (
    LAW_NAMES,
    laws_section,
    parameters_text,
)
from trials.records.observation import Basis

NAME = FamilyName(model="mixtral-8x7b", recipe="qlora", basis=Basis.MEASURED, software="soft")
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16], float)


def family(sizes: np.ndarray = SIZES, *, slow: int | None = None) -> FamilyFit:
    """A GPU at two lengths, alternately 1 % off; one step takes half as long again."""
    rows = [
        (f"a40@s/seq{length}", size, size * length, (1 + 0.004 * size * length) * (1 + off))
        for length in (128, 256)
        for size, off in zip(sizes, np.resize([0.01, -0.01, -0.01, 0.01], len(sizes)), strict=True)
    ]
    series, batch_size, tokens, seconds = (np.array(part) for part in zip(*rows, strict=True))
    if slow is not None:
        seconds[slow] *= 1.5
    times = StepTimes(
        gpu=np.full(len(rows), "a40@s"),
        series=series,
        batch_size=batch_size,
        tokens=tokens,
        sparsity=np.ones(len(rows)),
        seconds=seconds,
    )
    (fit,) = fit_each([(NAME, times)])
    return fit


def test_parameters_are_written_without_exponents() -> None:
    """Whatever their size; one without a unit or an error has none."""
    parameters = [
        Parameter(name="c", value=2.914e-05, standard_error=3.1e-07, unit="s"),
        Parameter(name="d", value=123456.0, standard_error=None, unit="1"),
    ]
    assert parameters_text(parameters) == "c = 0.00002914 ± 0.00000031 s; d = 123,500"


def test_a_law_has_its_equation_and_a_row_for_every_rival() -> None:
    """The best is first; an error that does not apply is empty; laws have names in words."""
    fit = family()
    text = laws_section([fit])
    assert fit.form is not None
    assert f"**{NAME.key}**, 16 points: `{EQUATIONS[fit.form]}` ({LAW_NAMES[fit.form]})" in text
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines()]
    names = [row[0] for row in rows if row and row[0] in LAW_NAMES.values()]
    assert names == [LAW_NAMES[candidate.form] for candidate in fit.candidates]
    assert set(names) == {LAW_NAMES[form] for form in Form}
    (by_series,) = (row for row in rows if row and row[0] == LAW_NAMES[Form.POOLED_BY_SERIES])
    assert by_series[3] == ""
    least = fit.candidates[0]
    assert f"{least.error:.2%} ± {least.standard_error:.2%}" in text
    (group,) = fit.groups
    assert f"t0 = {group.parameters[0].value:.4g} ± " in text
    assert " s/token" in text


def test_intervals_have_a_level_a_width_and_a_coverage() -> None:
    """Widths are relative to the step time."""
    fit = family()
    assert fit.intervals is not None
    assert fit.intervals.coverage is not None
    text = laws_section([fit])
    assert "(90%): ±" in text
    assert f"contain {fit.intervals.coverage:.0%}" in text
    assert "nested" in text


def test_suspects_have_their_basis_and_their_predicted_time() -> None:
    """A simulated step is not called measured; a family without suspects has no list of them."""
    slow = family(slow=5)
    (suspect,) = slow.suspects
    (line,) = (row for row in laws_section([slow]).splitlines() if row.startswith("- a40@s/seq128"))
    assert f"measured {suspect.seconds:.4g} s" in line
    assert f"predicted {suspect.expected_seconds:.4g} s" in line
    assert f"{suspect.spreads:.1f} spreads" in line
    simulated = NAME.model_copy(update={"basis": Basis.SIMULATED})
    text = laws_section([slow.model_copy(update={"name": simulated})])
    assert f"simulated {suspect.seconds:.4g} s" in text
    assert "measured" not in text
    assert "contradict" not in laws_section([family()])


def test_family_without_a_law_has_a_remedy_and_no_table() -> None:
    """In one line."""
    text = laws_section([family(np.array([4.0]))])
    assert "2 points: no law" in text
    assert "at least 3 points" in text
    assert "|" not in text


def test_run_without_families_has_no_section() -> None:
    """Nothing was timed, and nothing is to be timed."""
    assert laws_section([]) == ""
