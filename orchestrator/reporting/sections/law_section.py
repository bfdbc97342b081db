"""Section of the step-time laws: the chosen law, its rivals, parameters, suspects and intervals."""

import math
from collections.abc import Sequence

from fitting.families.records import FamilyFit, GroupLaw, LawCandidate, Suspect
from fitting.laws.fit_result import Law, Parameter
from fitting.laws.forms import Form
from gpu_catalog.number_text import short
from orchestrator.markdown_table import records_table, span, table
from trials.records.observation import Basis

LAW_NAMES: dict[Form | Law, str] = {
    Form.POOLED: "pooled by GPU",
    Form.POOLED_BY_SERIES: "pooled by GPU and length",
    Form.AFFINE_TOKENS: "affine in tokens",
    Form.AFFINE_EXAMPLES: "affine in examples",
    Form.SMOOTH_MAXIMUM: "smooth maximum",
    Form.LOGARITHM: "logarithm (paper's Eq. 2)",
    Law.MAX_BATCH_EQ1: "largest batch (paper's Eq. 1)",
    Law.MEMORY_AFFINE: "memory, affine in tokens",
    Law.THROUGHPUT_EQ2: "throughput (paper's Eq. 2)",
}
INTRODUCTION = (
    "A step takes t seconds. It has b examples, N tokens with padding, and sparsity s (active "
    "experts / experts). A series is one GPU at one length. Errors are relative errors of the "
    "throughput on points excluded from the fit: one point at a time (this error selects the law), "
    "the larger batches of each curve, or all points of one length."
)


def laws_section(families: Sequence[FamilyFit]) -> str:
    """The law of each family, with its rivals, values, suspects and intervals."""
    if not families:
        return ""
    parts = [part for family in families for part in _family(family)]
    return "\n\n".join(["## Laws of the step time", INTRODUCTION, *parts])


def parameters_text(parameters: Sequence[Parameter]) -> str:
    """Values with standard errors and units; a dimensionless value has no unit."""
    return "; ".join(
        f"{p.name} = {short(p.value, 4)}"
        + (f" ± {short(p.standard_error, 2)}" if p.standard_error is not None else "")
        + (f" {p.unit}" if p.unit != "1" else "")
        for p in parameters
    )


def _family(family: FamilyFit) -> list[str]:
    visits = "" if family.visits == family.points else f" from {family.visits} visits"
    points = f"{family.points} {'point' if family.points == 1 else 'points'}{visits}"
    if family.form is None:
        return [f"**{family.name.key}**, {points}: no law: {family.why}: {family.remedy}."]
    # The record names the best law by its key, for programs.
    best = family.candidates[0].form
    why = family.why.replace(best, LAW_NAMES[best])
    parts = [
        f"**{family.name.key}**, {points}: `{family.equation}` ({LAW_NAMES[family.form]}), {why}.",
        _candidates_table(family.candidates),
        _parameters_table(family),
    ]
    if family.by_length is not None:
        parts.append(
            f"Examples of other lengths are priced by the law {LAW_NAMES[family.by_length.form]}, "
            f"with an error of {family.by_length.error:.2%} on lengths excluded from its fit."
        )
    if family.suspects:
        parts.append("Points that contradict the law:")
        parts.append("\n".join(_suspect_line(s, family.name.basis) for s in family.suspects))
    return [*parts, _interval_text(family)]


def _candidates_table(candidates: Sequence[LawCandidate]) -> str:
    return records_table(
        {
            "law": LAW_NAMES[law.form],
            "error, one point excluded": f"{law.error:.2%} ± {law.standard_error:.2%}",
            "error, larger batches excluded": _percent(law.growing_error),
            "error, one length excluded": _percent(law.length_error),
            "parameters": law.parameters,
            "condition number": "" if law.condition is None else short(law.condition),
        }
        for law in candidates
    )


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.2%}"


def _parameters_table(family: FamilyFit) -> str:
    rows: list[tuple[object, ...]] = [(g.name, _group_text(g), g.points) for g in family.groups]
    if family.exponent is not None:
        rows.append(("all", parameters_text([family.exponent]), family.points))
    return table(("group", "parameters ± standard error", "points"), rows)


def _group_text(group: GroupLaw) -> str:
    if group.remedy is not None:
        return f"none: {group.remedy}"
    only = "" if group.sparsity in {None, 1} else f"; valid for sparsity {group.sparsity:g} alone"
    held = f"; held at zero: {', '.join(group.held_at_zero)}" if group.held_at_zero else ""
    return f"{parameters_text(group.parameters)}{held}{only}"


def _suspect_line(suspect: Suspect, basis: Basis) -> str:
    return (
        f"- {suspect.series}, sparsity {suspect.sparsity:g}, batch size {suspect.batch_size:g}: "
        f"{basis} {short(suspect.seconds, 4)} s, "
        f"predicted {short(suspect.expected_seconds, 4)} s, {suspect.spreads:.1f} spreads apart"
    )


def _interval_text(family: FamilyFit) -> str:
    """Spread of the residuals, width of the intervals, and their coverage in cross-validation."""
    spread = f"Residual spread {family.spread:.1%}. " if family.spread is not None else ""
    intervals = family.intervals
    if intervals is None:
        return f"{spread}Too few points remain to estimate an interval, so this law is not used."
    widths = span((100 * math.expm1(s.half_width or 0.0) for s in family.series), ".1f")
    text = f"{spread}Prediction intervals ({intervals.level:.0%}): ±{widths}%"
    if intervals.coverage is not None:
        text += f"; in cross-validation they contain {intervals.coverage:.0%} of the points"
    return f"{text} ({intervals.residuals} residuals)."
