"""What a report says of the laws of the step time: the one chosen, its rivals, what to distrust."""

import math
from collections.abc import Sequence

from fitting.families.records import FamilyFit, GroupLaw, LawCandidate, Suspect
from fitting.laws.fit_result import Parameter
from orchestrator.markdown_table import table

SYMBOLS = (
    "A step takes t seconds, for b examples or N padded tokens, at sparsity s. Errors are those of "
    "the throughput at points that a law has not seen: each left out alone, by which the law is "
    "chosen, the larger batches of each curve, a length."
)


def laws_section(families: Sequence[FamilyFit]) -> str:
    """The law of each family, with its rivals, values, suspects and intervals."""
    if not families:
        return ""
    parts = [part for family in families for part in _family(family)]
    return "\n\n".join(["## Laws of the step time", SYMBOLS, *parts])


def parameters_text(parameters: Sequence[Parameter]) -> str:
    """Values with their standard errors and units; a unit of 1 is none."""
    return "; ".join(
        f"{p.name} = {p.value:.4g}"
        + (f" ± {p.standard_error:.2g}" if p.standard_error is not None else "")
        + (f" {p.unit}" if p.unit != "1" else "")
        for p in parameters
    )


def _family(family: FamilyFit) -> list[str]:
    visits = "" if family.visits == family.points else f" of {family.visits} visits"
    counted = f"{family.points} {'point' if family.points == 1 else 'points'}{visits}"
    if family.form is None:
        return [f"**{family.name.key}**, {counted}: no law: {family.why}: {family.remedy}."]
    parts = [
        f"**{family.name.key}**, {counted}: `{family.equation}` ({family.form}), {family.why}.",
        _rivals(family.candidates),
        _values(family),
    ]
    if family.by_length is not None:
        parts.append(
            f"Examples of other lengths are priced by {family.by_length.form}: off by "
            f"{family.by_length.error:.2%} at lengths that it had not seen."
        )
    if family.suspects:
        parts.append("Points that the law does not believe:")
        parts.append("\n".join(_suspect(each) for each in family.suspects))
    return [*parts, _sureness(family)]


def _rivals(candidates: Sequence[LawCandidate]) -> str:
    headers = (
        "law",
        "a point left out",
        "larger batches",
        "a length left out",
        "parameters",
        "condition",
    )
    rows = [
        (
            each.form,
            f"{each.error:.2%} ± {each.standard_error:.2%}",
            _percent(each.growing_error),
            _percent(each.length_error),
            each.parameters,
            "" if each.condition is None else f"{each.condition:.3g}",
        )
        for each in candidates
    ]
    return table(headers, rows)


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.2%}"


def _values(family: FamilyFit) -> str:
    rows: list[tuple[object, ...]] = [(g.name, _of_group(g), g.points) for g in family.groups]
    if family.exponent is not None:
        rows.append(("all of them", parameters_text([family.exponent]), family.points))
    return table(("of", "parameters ± standard error", "points"), rows)


def _of_group(group: GroupLaw) -> str:
    if group.remedy is not None:
        return f"none: {group.remedy}"
    only = "" if group.sparsity is None or group.sparsity == 1 else f"; s = {group.sparsity:g} only"
    held = f"; held at zero: {', '.join(group.held_at_zero)}" if group.held_at_zero else ""
    return f"{parameters_text(group.parameters)}{held}{only}"


def _suspect(suspect: Suspect) -> str:
    return (
        f"- {suspect.series}, s = {suspect.sparsity:g}, b = {suspect.batch_size:g}: "
        f"{suspect.seconds:.4g} s, where the law has {suspect.expected_seconds:.4g} s: "
        f"{suspect.spreads:.1f} times the spread"
    )


def _sureness(family: FamilyFit) -> str:
    """The spread, and the intervals with how often they hold."""
    spread = f"Spread {family.spread:.1%}." if family.spread is not None else ""
    intervals = family.intervals
    if intervals is None:
        return f"{spread} Nothing is left to tell how sure it is: it predicts nothing."
    widths = sorted(math.expm1(each.half_width or 0.0) for each in family.series)
    span = f"±{widths[0]:.1%}"
    if f"{widths[-1]:.1%}" != f"{widths[0]:.1%}":
        span += f" to ±{widths[-1]:.1%} by series"
    held = (
        ""
        if intervals.coverage is None
        else f"; made without a point, they hold it in {intervals.coverage:.0%} of cases"
    )
    return f"{spread} Intervals at {intervals.level:.0%}: {span}{held} ({intervals.residuals})."
