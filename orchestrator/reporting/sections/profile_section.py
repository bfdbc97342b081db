"""Section of profiles: the time of a step by stage, layer and kernel, and the load of experts.

Each model and recipe on a GPU has a group. Each sparsity, length and batch size in it has a row, as
in arXiv 2408.04693: Fig. 4 (stages), Fig. 5 (layers), Fig. 6 (inside the experts) and Fig. 11
(tokens per expert).
"""

from collections.abc import Sequence

from gpu_catalog.number_text import short
from orchestrator.markdown_table import records_table, table
from orchestrator.reporting.sections.profile_groups import (
    SMALLEST_SHARE,
    Bar,
    BarPart,
    Load,
    ProfileGroup,
    profile_groups,
)
from trials.records.profile import Profiled


def profiles_section(profiled: Sequence[Profiled]) -> str:
    """The section of a report; empty without profiles."""
    parts = [part for group in profile_groups(profiled) for part in group_text(group)]
    if not parts:
        return ""
    introduction = (
        "Profiled steps are not used for laws or prices. Stages were timed without the profiler. "
        "Layers and kernels\nare shares of profiled time; the profiler slows down small operators "
        "most."
    )
    return "\n\n".join(["## Where the time goes", introduction, *parts])


def group_text(group: ProfileGroup) -> list[str]:
    """The tables of one group, in Markdown."""
    machine = f" ({group.machine})" if group.machine else ""
    parts = [f"**{group.model}**, {group.recipe}, on {group.gpu}{machine}"]
    if group.stages:
        inside = "the experts" if group.inside_of == "experts" else "the MLPs"
        parts += [
            "Stages of a step:",
            _bars_table(group.stages),
            "Layers, forward and backward (in brackets: share of the FLOPs):",
            _bars_table(group.layers),
            f"Inside {inside}, forward and backward:",
            _bars_table(group.inside),
        ]
    if group.loads:
        parts += [_load_text(group.loads[0].training_steps), _load_table(group.loads)]
    if group.lengths:
        lengths = records_table(
            {
                "": row.label,
                "tokens": row.seq_len,
                "batch size": row.batch_size,
                "ms": _ms(row.step_seconds),
                "examples/s": short(row.examples_per_second),
                "tokens/s": short(row.tokens_per_second, 4),
                "share of experts or MLPs": f"{row.experts_share:.1%}",
            }
            for row in group.lengths
        )
        parts += ["Effect of the sequence length:", lengths]
    if group.overheads:
        overheads = records_table(
            {
                "": row.label,
                "plain step, ms": _ms(row.step_seconds),
                "profiled step, ms": _ms(row.profiled_seconds),
                "slowdown": f"{row.overhead:.0%}",
                "sum of stages / step": f"{row.stages_over_step:.1%}",
            }
            for row in group.overheads
        )
        parts += ["Overhead of profiling, by the shortest step of each kind:", overheads]
    if group.failures:
        parts += ["Not profiled:\n\n" + "\n".join(f"- {line}" for line in group.failures)]
    return parts


def _bars_table(bars: Sequence[Bar]) -> str:
    names = [part.name for part in bars[0].parts] if bars else []
    shown = [
        i for i in range(len(names)) if any(bar.parts[i].share >= SMALLEST_SHARE for bar in bars)
    ]
    rate = ("GFLOP/s",) if any(bar.flops for bar in bars) else ()
    rows = [
        (
            bar.label,
            _ms(bar.seconds),
            *(short(bar.flops / bar.seconds / 1e9) for _ in rate),
            *(_share(bar.parts[i]) for i in shown),
        )
        for bar in bars
    ]
    return table(("", "ms", *rate, *(names[i] for i in shown)), rows)


def _share(part: BarPart) -> str:
    flops = f" ({part.flop_share:.0%})" if part.flop_share else ""
    return f"{part.share:.1%}{flops}"


def _ms(seconds: float) -> str:
    return short(seconds * 1e3, 4)


def _load_text(steps: int) -> str:
    return (
        f"Tokens per example routed to each expert, averaged over the layers, before and after "
        f"{steps} training steps on random tokens.\nVariance is over the experts. Imbalance is "
        "the busiest expert's tokens over an equal share, averaged over the layers:"
    )


def _load_table(loads: Sequence[Load]) -> str:
    return records_table(
        {
            "": load.label,
            "training": when,
            "tokens per example by expert": " ".join(short(t) for t in tokens),
            "variance": short(variance),
            "imbalance": f"{busiest:.2f}",
        }
        for load in loads
        for when, tokens, variance, busiest in (
            ("before", load.before, load.variance_before, load.imbalance_before),
            ("after", load.after, load.variance_after, load.imbalance_after),
        )
    )
