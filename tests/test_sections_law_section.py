"""What a report says of a family's law: its equation, rivals, values, suspects and intervals."""

import numpy as np

from fitting.families.fit_family import fit_each
from fitting.families.records import FamilyFit, FamilyName
from fitting.laws.forms import EQUATIONS, Form
from fitting.points.step_time_rows import StepTimes
from orchestrator.reporting.sections.law_section import laws_section
from trials.records.observation import Basis

NAME = FamilyName(model="mixtral-8x7b", recipe="qlora", basis=Basis.MEASURED, software="soft")
SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16], float)


def family(sizes: np.ndarray = SIZES, *, slow: int | None = None) -> FamilyFit:
    """A GPU at two lengths, 1 % off by turns; one step half as long again."""
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


def test_law_is_told_with_its_equation_and_every_rival() -> None:
    """A row each, the best first; what does not apply is left empty."""
    fit = family()
    text = laws_section([fit])
    assert fit.form is not None
    assert f"**{NAME.key}**, 16 points: `{EQUATIONS[fit.form]}` ({fit.form}), {fit.why}." in text
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines()]
    forms = [row[0] for row in rows if row and row[0] in list(Form)]
    assert forms == [candidate.form for candidate in fit.candidates]
    assert set(forms) == set(Form)
    (by_series,) = (row for row in rows if row and row[0] == Form.POOLED_BY_SERIES)
    assert by_series[3] == ""
    least = fit.candidates[0]
    assert f"{least.error:.2%} ± {least.standard_error:.2%}" in text
    (group,) = fit.groups
    assert f"t0 = {group.parameters[0].value:.4g} ± " in text
    assert " s/token" in text


def test_intervals_and_coverage_are_told() -> None:
    """As a part of the step time, with what they rest on."""
    fit = family()
    assert fit.intervals is not None
    assert fit.intervals.coverage is not None
    text = laws_section([fit])
    assert "Intervals at 90%: ±" in text
    assert f"they hold it in {fit.intervals.coverage:.0%} of cases (nested)." in text


def test_suspects_are_told_by_name() -> None:
    """With what was measured, and what the law has."""
    slow = family(slow=5)
    (suspect,) = slow.suspects
    assert (
        f"- a40@s/seq128, s = 1, b = 8: {suspect.seconds:.4g} s, where the law has "
        f"{suspect.expected_seconds:.4g} s: {suspect.spreads:.1f} times the spread"
    ) in laws_section([slow])
    assert "does not believe" not in laws_section([family()])


def test_family_without_a_law_has_a_remedy_and_no_table() -> None:
    """In one line."""
    text = laws_section([family(np.array([4.0]))])
    assert "2 points: no law: 2 points over 1 batch size on 1 GPU: too few" in text
    assert "measure at least 3 points on one GPU" in text
    assert "|" not in text


def test_run_without_families_has_no_section() -> None:
    """Nothing was timed, and nothing is to be timed."""
    assert laws_section([]) == ""
