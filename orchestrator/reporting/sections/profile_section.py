"""Where the time of steps goes, as rows for tables and bars for charts. Pure.

One group for each model and recipe on a GPU; a bar for each sparsity, length and batch size of it,
as 2408.04693 has them in Fig. 4 (stages), Fig. 5 (layers), Fig. 6 (inside the experts) and Fig. 11
(tokens of each expert).
"""

from collections.abc import Sequence

from orchestrator.markdown_table import table
from orchestrator.reporting.sections.profile_groups import (
    SMALLEST_SHARE,
    Bar,
    BarPart,
    LengthRow,
    Load,
    Overhead,
    ProfileGroup,
    profile_groups,
)
from trials.records.profile import Profiled


def profiles_section(profiled: Sequence[Profiled]) -> str:
    """The section of a report; empty without profiles."""
    parts = [part for group in profile_groups(profiled) for part in group_text(group)]
    if not parts:
        return ""
    says = (
        "Steps under a profiler: none of them enters a law or a price. Stages were timed without "
        "the profiler;\nlayers and kernels are shares of its time, which it lengthens most where "
        "operators are small."
    )
    return "\n\n".join(["## Where the time goes", says, *parts])


def group_text(group: ProfileGroup) -> list[str]:
    """The tables of one group, in Markdown."""
    machine = f" ({group.machine})" if group.machine else ""
    parts = [f"**{group.model}**, {group.recipe}, on {group.gpu}{machine}"]
    if group.stages:
        inside = "the experts" if group.inside_of == "experts" else "the MLPs"
        parts += [
            "Stages of a step:",
            _bars_table(group.stages),
            "Layers, forward and backward (in brackets: of the FLOPs of products and attention):",
            _bars_table(group.layers),
            f"Inside {inside}, forward and backward:",
            _bars_table(group.inside),
        ]
    if group.loads:
        parts += [_load_text(group.loads[0].training_steps), _load_table(group.loads)]
    if group.lengths:
        parts += ["Sensitivity to the length of examples:", _length_table(group.lengths)]
    if group.overheads:
        parts += ["What profiling adds, by the shortest steps:", _overhead_table(group.overheads)]
    if group.failures:
        parts += ["Not profiled:\n\n" + "\n".join(f"- {line}" for line in group.failures)]
    return parts


def _bars_table(bars: Sequence[Bar]) -> str:
    names = [part.name for part in bars[0].parts] if bars else []
    kept = [
        at for at in range(len(names)) if any(bar.parts[at].share >= SMALLEST_SHARE for bar in bars)
    ]
    rate = ("GFLOP/s",) if any(bar.flops for bar in bars) else ()
    rows = [
        (
            bar.label,
            _ms(bar.seconds),
            *(f"{bar.flops / bar.seconds / 1e9:.3g}" for _ in rate),
            *(_share(bar.parts[at]) for at in kept),
        )
        for bar in bars
    ]
    return table(("", "ms", *rate, *(names[at] for at in kept)), rows)


def _share(part: BarPart) -> str:
    flops = f" ({part.flop_share:.0%})" if part.flop_share else ""
    return f"{part.share:.1%}{flops}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _load_text(steps: int) -> str:
    return (
        f"Tokens per example of each expert, mean over the layers, before and after {steps} steps "
        "on random tokens;\nvariance over the experts; busiest: its tokens over an equal share in "
        "its layer:"
    )


def _load_table(loads: Sequence[Load]) -> str:
    rows = []
    for load in loads:
        for when, tokens, variance, busiest in (
            ("before", load.before, load.variance_before, load.imbalance_before),
            ("after", load.after, load.variance_after, load.imbalance_after),
        ):
            each = " ".join(f"{t:.3g}" for t in tokens)
            rows.append((load.label, when, each, f"{variance:.3g}", f"{busiest:.2f}"))
    return table(("", "", "tokens an example of each expert", "variance", "busiest"), rows)


def _length_table(rows: Sequence[LengthRow]) -> str:
    headers = ("", "tokens", "batch", "ms", "examples/s", "tokens/s", "experts or MLPs")
    return table(
        headers,
        [
            (
                row.label,
                row.seq_len,
                row.batch_size,
                _ms(row.step_seconds),
                f"{row.examples_per_second:.3g}",
                f"{row.tokens_per_second:.4g}",
                f"{row.experts_share:.1%}",
            )
            for row in rows
        ],
    )


def _overhead_table(rows: Sequence[Overhead]) -> str:
    headers = ("", "plain step, ms", "profiled step, ms", "longer by", "stages over step")
    return table(
        headers,
        [
            (
                row.label,
                _ms(row.step_seconds),
                _ms(row.profiled_seconds),
                f"{row.overhead:.0%}",
                f"{row.stages_over_step:.1%}",
            )
            for row in rows
        ],
    )
