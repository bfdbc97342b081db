"""The paper's tables and figures beside this project's laws, as Markdown."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from fitting.laws.forms import FittedForm
from fitting.laws.model_selection import fit_chosen, throughput_errors
from fitting.paper.published import (
    BLACKMAMBA,
    EQ1_TEXT,
    MATH,
    MIXTRAL,
    OPENORCA_QUERIES,
    OPENORCA_USD,
    TABLE_IV,
    TABLE_IV_QUERIES,
)
from fitting.paper.reproduction import Reproduction, job_usd, projected_max_batch, rmse_eq2
from fitting.paper.simulated_batches import simulated_batches
from fitting.points.step_time_rows import StepTimes
from gpu_catalog.number_text import short
from orchestrator.markdown_table import table

TITLE = "# Understanding the Performance and Estimating the Cost of LLM Fine-Tuning, reproduced"
CLAIMED_RMSE = {"A40": 0.8}  # "less than 0.8" in Fig. 14; Fig. 15 says 0.6
OTHER_RMSE = 0.6
VALUES = ("value", "paper", "ours")
PROJECTED = {80: "27", 100: "28", 120: "35"}

# Label, then names of the paper's figures and of ours, all in percent.
ON_UNSEEN_POINTS = """
one point left out; the law is chosen without it
    | loo_mape_pct.paper | loo_mape_pct.chosen
larger batches, predicted from the smaller half
    | extrapolation_mape_pct.paper | extrapolation_mape_pct.chosen
the same without the H100
    | extrapolation_mape_pct.paper_without_h100 | extrapolation_mape_pct.chosen_without_h100
one data set from the other, Mixtral / BlackMamba (paper: our law by median lengths)
    | dataset_transfer_mape_pct.mixtral.by_median_length
      dataset_transfer_mape_pct.blackmamba.by_median_length
    | dataset_transfer_mape_pct.mixtral dataset_transfer_mape_pct.blackmamba
new GPUs from the A40 alone, mean / worst GPU
    | | gpu_transfer_mape_pct.a40_only_mean gpu_transfer_mape_pct.a40_only_worst
the same if the 80 GB GPUs are PCIe
    | | as_pcie.a40_only_mean as_pcie.a40_only_worst
a GPU from the three others, mean / worst GPU
    | | leave_one_gpu_out_mape_pct.mean leave_one_gpu_out_mape_pct.worst
the same if the 80 GB GPUs are PCIe
    | | as_pcie.leave_one_out_mean as_pcie.leave_one_out_worst
points inside their 90 % interval | | interval_coverage_pct
median half-width of these intervals | | interval_half_width_pct
"""
CONTRADICTIONS = """
examples of sparse Mixtral on MATH, A40 | 3 (Table III) | 4 (Table IV, Fig. 14)
examples of BlackMamba on MATH, A40 | 2, 8 (Table III) | 3, 10 (points of Fig. 14)
Eq. 1, C0 and C1 | 82, 0.95 (text) | 62, 0.89 at 512 tokens (Fig. 13)
Eq. 1 at 80 GB | 27 (Fig. 13)
    | {text_at_80:.1f} with the text's constants, {drawn_at_80:.1f} with the figure's
Eq. 1 at 100 GB | 28 (Fig. 13) | {drawn_at_100:.1f}, which Eq. 1 rounds down to 27
Eq. 1, memory of the model | 23.35 GB: weights alone, on a GPU with its nominal memory
    | {model_gib:.1f} GiB: everything the model holds
Eq. 2 | three coefficients (text)
    | q = C4 + C2 ln(b^(1/(s C3))) was fitted: C2 and C3 are one parameter. C3 was set by hand
      (1.8, 2.5); no data can identify it
Eq. 2, C4 | throughput of one query (text) | true only if s C3 = 1
Fig. 14, RMSE | below 0.8 | {worst_rmse:.2f} at best on {worst}
Fig. 15, data set of the A100 and H100 series | CS (titles of the artifact), GS (caption)
    | MATH, by their largest batch sizes
Fig. 15, dense point of the A100-80GB at batch 3 | a point of its own
    | the value at batch 4, repeated
OpenOrca | more than 2 million queries (text) | 2.9 million, by $3460
80 GB GPUs, PCIe or SXM | not stated | unknown
"""


def as_markdown(reproduction: Reproduction) -> str:
    """Render the whole report."""
    return "\n\n".join(
        [
            TITLE,
            (
                "Published numbers (arXiv 2408.04693 and its artifact, stsxxx/finetune) beside the "
                "results of the paper's own equations and of this project's laws. Nothing was "
                "measured here: every point is the paper's."
            ),
            _on_unseen(reproduction),
            _largest(reproduction),
            _simulated_batches(),
            _projections(),
            _costs(reproduction),
            _series(reproduction),
            _contradictions(reproduction),
        ]
    )


def text_rows(text: str) -> list[list[str]]:
    """Rows of a text: each begins at the margin, with ``|`` between its cells."""
    rows = re.split(r"\n(?=\S)", text.strip())
    return [[" ".join(cell.split()) for cell in row.split("|")] for row in rows]


def _on_unseen(reproduction: Reproduction) -> str:
    figures = reproduction.figures | _figures_as_pcie(reproduction)
    rows = [
        (label, _percent(figures, papers.split()), _percent(figures, ours.split()))
        for label, papers, ours in text_rows(ON_UNSEEN_POINTS)
    ]
    laws = [f"{model}: {_law(reproduction, model)}" for model in (MIXTRAL, BLACKMAMBA)]
    return (
        f"## Error on points outside the fit\n\n{table(VALUES, rows)}\n\n"
        "Mean absolute error of throughput over the 96 points. Each prediction comes from a "
        "law that was fitted without its point. Batches have the padded length that they have "
        "on average. The forms of the laws and their powers of 1.1 and 1.5 were chosen "
        "beforehand on these same points.\n\n"
        "The chosen law is the simplest one whose error is within one standard error of the "
        f"smallest. {'; '.join(laws)}."
    )


def _figures_as_pcie(reproduction: Reproduction) -> dict[str, float]:
    """Errors of the transfer between GPUs, in percent, if the 80 GB GPUs are PCIe."""
    transfer = reproduction.transfer_as_pcie
    figures: dict[str, float] = {}
    for name, by_gpu in (
        ("a40_only", transfer.from_one()),
        ("leave_one_out", transfer.leaving_one_out()),
    ):
        figures[f"as_pcie.{name}_mean"] = float(np.mean(list(by_gpu.values())))
        figures[f"as_pcie.{name}_worst"] = float(max(by_gpu.values()))
    return figures


def _percent(figures: Mapping[str, float], names: Sequence[str]) -> str:
    return (
        f"{' / '.join(f'{short(figures[name])}' for name in names)} %" if names else "not possible"
    )


def _law(reproduction: Reproduction, model: str) -> str:
    fitted = chosen_fit(reproduction, model)
    points = reproduction.throughput.points.rows.where(_rows_of_model(reproduction, model))
    suspects = points.where(fitted.suspects)
    names = ", ".join(
        f"{series.split('/', 1)[1]} s = {sparsity:g} b = {batch:g}"
        for series, sparsity, batch in zip(
            suspects.series, suspects.sparsity, suspects.batch_size, strict=True
        )
    )
    return f"{fitted.form} (suspect points: {names})"


def _rows_of_model(reproduction: Reproduction, model: str) -> np.ndarray:
    return np.flatnonzero(reproduction.throughput.points.model == model)


def chosen_fit(reproduction: Reproduction, model: str) -> FittedForm:
    """Fit of the chosen law to every point of one model."""
    points = reproduction.throughput.points.rows
    fitted = fit_chosen(points.where(_rows_of_model(reproduction, model)))
    assert fitted is not None
    return fitted


def _largest(reproduction: Reproduction) -> str:
    largest = reproduction.largest
    rows = [
        (
            *(row["gpu"], row["dataset"], row["sparsity"]),
            f"{row['figure']}{': ' + row['note'] if row['note'] else ''}",
            *(f"{size:.0f}" for size in sizes),
        )
        for row, *sizes in zip(
            largest.rows, largest.published, largest.eq1, largest.ours, strict=True
        )
    ]
    c0, c1 = largest.eq1_constants
    headers = ("GPU", "data", "s", "from", "published", "Eq. 1", "ours")
    return (
        "## Table III, and every largest batch size of Mixtral\n\n"
        f"{table(headers, rows)}\n\n"
        f"Exact: Eq. 1 {largest.exact(largest.eq1)}, ours {largest.exact(largest.ours)} "
        f"of {len(rows)}. Both are fitted to agree with as many rows as possible. Eq. 1 "
        f"has c0 = {c0:.1f}, c1 = {c1:.2f}, nominal memory, 23.35 GB of weights and median "
        "lengths. Ours uses the memory that CUDA reports, "
        f"{largest.model_gib:.1f} GiB for everything the model holds, and batches of MATH "
        f"that are {largest.ratio:.2f} times as long as those of CS."
    )


def _simulated_batches() -> str:
    """Exact and near sizes under each pair of assumptions, with the sizes themselves."""
    groups = [
        (
            *(batches.model, batches.recipe, batches.survives),
            *(f"{n} of {len(batches.published)}" for n in (batches.exact, batches.within_one)),
            " ".join(map(str, batches.simulated)),
        )
        for batches in simulated_batches()
    ]
    headers = ("model", "recipe", "a batch survives", "exact", "within one", "sizes")
    return (
        "## Largest batches as simulated, without a fitted constant\n\n"
        f"{table(headers, groups)}\n\n"
        "A batch has the length of the longest example that is expected in one batch, in ten "
        "batches, or in 1,000 examples, or of the longest of all. Drawn batches have lengths of "
        "their own: that of the longest of their examples, drawn from the paper's histograms; two "
        "runs of three survive. Sizes are in the order of "
        "`fitting/paper/data/simulated_largest_batches.csv`. No pair of assumptions gives all "
        "sizes of both models. For Mixtral the sizes speak against checkpointing, which the "
        "paper's text states; the best of so many pairs is optimistic."
    )


def _projections() -> str:
    rows = [
        (
            f"{memory} GB",
            published,
            f"{projected_max_batch(memory):.1f}",
            f"{projected_max_batch(memory, EQ1_TEXT):.1f}",
        )
        for memory, published in PROJECTED.items()
    ]
    headers = ("GPU", "published", "Eq. 1 as drawn (62, 0.89)", "Eq. 1 as in the text (82, 0.95)")
    return f"## Fig. 13, largest batch sizes of sparse Mixtral\n\n{table(headers, rows)}"


def _costs(reproduction: Reproduction) -> str:
    fitted = chosen_fit(reproduction, MIXTRAL)
    points = reproduction.throughput.points.rows
    rows: list[tuple[str, str, str]] = []
    for name, (batch, rate, usd_per_hour, published_usd) in TABLE_IV.items():
        gpu = "H100-80GB" if name == "H100" else name
        is_row = (points.series == f"{MIXTRAL}/{gpu}/{MATH}") & (points.batch_size == batch)
        sparse = points.where(np.flatnonzero(is_row & (points.sparsity < 1)))
        our_rate = float((sparse.batch_size / fitted.seconds(sparse))[0])
        papers_usd = reproduction.figures[f"table_iv_usd.{name}"]
        our_usd = job_usd(TABLE_IV_QUERIES, our_rate, usd_per_hour)
        label = f"{name}, batch {batch}"
        rows += [
            (f"{label}: examples/s", f"{rate:.2f}", f"{our_rate:.2f}"),
            (f"{label}: $", f"{published_usd:.1f}", f"{our_usd:.1f}"),
            (f"{label}: $ at the published examples/s", f"{papers_usd:.1f}", ""),
        ]
    openorca = f"OpenOrca on the H100: $ of {OPENORCA_QUERIES:,} examples"
    openorca_usd = reproduction.figures["openorca_usd"]
    rows.append((openorca, f"{OPENORCA_USD:.0f}", f"{openorca_usd:.0f}"))
    title = "## Table IV, sparse Mixtral on MATH, ten epochs"
    return f"{title}\n\n{table(VALUES, rows)}\n\n15,000 examples at CUDO's prices."


def _series(reproduction: Reproduction) -> str:
    throughput = reproduction.throughput
    series = throughput.points.rows.series
    rows = []
    for name in np.unique(series):
        in_series = series == name
        claimed = CLAIMED_RMSE.get(name.split("/")[1], OTHER_RMSE)
        papers, ours = (
            f"{float(throughput_errors(residuals[in_series]).mean()):.1%}"
            for residuals in (throughput.paper, throughput.chosen)
        )
        rmse = f"{_rmse(throughput.points.rows, name):.2f}"
        rows.append((name, int(in_series.sum()), f"< {claimed}", rmse, papers, ours))
    headers = (
        *("series", "points", "RMSE claimed", "RMSE"),
        *("paper's law, point left out", "ours, point left out"),
    )
    return f"## Fig. 14 and 15\n\n{table(headers, rows)}"


def _rmse(points: StepTimes, series: str) -> float:
    return rmse_eq2(points.where(points.series == series))


def _contradictions(reproduction: Reproduction) -> str:
    points = reproduction.throughput.points.rows
    worst = max(np.unique(points.series), key=lambda name: _rmse(points, name))
    text = CONTRADICTIONS.format(
        text_at_80=projected_max_batch(80, EQ1_TEXT),
        drawn_at_80=projected_max_batch(80),
        drawn_at_100=projected_max_batch(100),
        model_gib=reproduction.largest.model_gib,
        worst_rmse=_rmse(points, worst),
        worst=worst,
    )
    rows = table(("subject", "paper", "but"), text_rows(text))
    return f"## Where the paper contradicts itself\n\n{rows}"
