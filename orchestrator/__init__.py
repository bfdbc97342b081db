"""Functions that measure, simulate, fit and price fine-tuning on GPUs.

Keyword arguments have the names of the command line's options, with ``_`` for ``-``, and the same
defaults; None stands for the default. The functions print nothing; they log progress.
"""

# First, before a module of the working directory can take another's place.
from orchestrator import module_start  # noqa: F401

# isort: split
import dataclasses
import datetime as dt
import io
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from gpu_catalog.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from orchestrator.estimating.estimate_records import Estimates
    from orchestrator.ranking.ranked_offer import Ranking
    from orchestrator.reporting.notebook import ExampleLengths, FittedLaws, LoadedRun

__all__ = ["UserError", "estimate", "example_lengths", "fit", "load_run", "rank", "sweep"]


def estimate(model: str | PathLike[str], **options: Any) -> "Estimates":
    """Estimate memory, largest batch, time and cost by simulation. It needs no GPU.

    Args:
        model: preset, hub name, or folder or file with a config.json.
        **options: options of ``estimate``: ``gpu``, ``seq_len``, ``batch_size``, ``examples``,
            ``epochs``, ``dataset``, ``method``, ``lora_rank``, ``deadline``, ``budget_usd``,
            ``providers``, ``spot``, ``prices`` and the others of the command. ``seq_len`` may be
            "max", or a list.

    Returns:
        An estimate for each GPU and length, the cheapest first; ``to_frame()`` has a row for each.

    Raises:
        UserError: options, data, model or prices are wrong, or the model cannot be traced.

    Example:
        >>> orchestrator.estimate("llama-3.1-8b", method="lora", seq_len=2048, gpu="A40,L40S")
    """
    from orchestrator.estimating.estimate_job import estimate_job
    from orchestrator.estimating.estimate_request import EstimateRequest
    from orchestrator.request import request_from

    return estimate_job(request_from(EstimateRequest, {"model": model, **options}), _today())


def rank(run: str | PathLike[str], **options: Any) -> "Ranking":
    """Price a job on every offer from the observations of a run. The run is left unchanged.

    Args:
        run: run folder, s3://BUCKET/FOLDER, or a CSV of measurements.
        **options: options of ``rank``: ``examples``, ``epochs``, ``dataset``, ``batch_size``,
            ``deadline``, ``budget_usd``, ``providers``, ``regions``, ``spot``, ``prices`` and the
            others of the command. The defaults are the specification's values.

    Returns:
        The offers, the cheapest first; ``to_frame()`` has a row for each.

    Raises:
        UserError: there is no run, a file cannot be read, or options are wrong.

    Example:
        >>> orchestrator.rank("runs/my", examples=50_000, epochs=3, deadline=24)
    """
    from orchestrator.request import request_from
    from orchestrator.run_folder.rank_run import RankRequest, rank_run
    from orchestrator.tables.table_or_run import run_of

    request = request_from(RankRequest, {"run": run_of(fspath(run)), **options})
    return rank_run(request, _today()).ranking


def fit(
    source: "str | PathLike[str] | pd.DataFrame", *, lengths: str | PathLike[str] | None = None
) -> "FittedLaws":
    """Fit the laws to the observations of a run, a CSV or a frame. Nothing is written.

    Args:
        source: run folder, s3://BUCKET/FOLDER, CSV, or frame with the columns of such a CSV.
        lengths: CSV of example lengths, for rows that name a data set instead of a length.

    Returns:
        The law of each family of step times; ``to_frame()`` has a row for each, and
        ``predict(frame)`` predicts step times.

    Raises:
        UserError: there is no run, or a row cannot be read; a line for each mistake.

    Example:
        >>> orchestrator.fit("mine.csv").predict(pandas.read_csv("steps.csv"))
    """
    from orchestrator.reporting.notebook import fitted_laws

    return fitted_laws(source, lengths)


def example_lengths(
    dataset: str | PathLike[str] | None = None,
    *,
    model: str | None = None,
    **options: Any,
) -> "ExampleLengths":
    """Count the tokens of a data set's examples.

    Args:
        dataset: a file, a folder, a data set of the hub, or the name of one of the paper's.
        model: model whose own tokenizer counts, unless ``tokenizer`` names another.
        **options: options of ``dataset``: ``text_fields``, ``template``, ``chat``, ``tokenizer``,
            ``subset``, ``split``, ``most``, ``cutoff``, ``length_histogram``.

    Returns:
        The lengths; ``to_frame()`` has a row for each number of tokens.

    Raises:
        UserError: options contradict one another, or the data cannot be read.

    Example:
        >>> orchestrator.example_lengths("data.jsonl", model="llama-3.1-8b", text_fields="q,a")
    """
    from orchestrator.reporting.notebook import ExampleLengths
    from orchestrator.request import request_from
    from orchestrator.spec.job_options import JobOptions, data_job

    request = request_from(JobOptions, {"dataset": dataset, **options})
    return ExampleLengths(data_job(request, model))


def load_run(path: str | PathLike[str]) -> "LoadedRun":
    """Load a run as pandas frames, and rank its job at the prices in use. Nothing is written.

    Args:
        path: run folder, or s3://BUCKET/FOLDER.

    Returns:
        The run, with the frames ``observations``, ``steps``, ``ranking``, ``laws``,
        ``coefficients``, ``candidates`` and ``fits``; ``to_frame()`` is the ranking.

    Raises:
        UserError: there is no run, or a file of it cannot be read.

    Example:
        >>> orchestrator.load_run("runs/my").ranking.head()
    """
    from orchestrator.reporting import notebook

    return notebook.load_run(path)


def sweep(spec: str | PathLike[str] | None = None, **options: Any) -> "LoadedRun":
    """Measure the cells of a specification that its run lacks; then fit, rank and report.

    Args:
        spec: YAML file, or name of a shipped sweep; the default sweep if absent.
        **options: options of ``sweep``: ``out``, ``resume``, ``adaptive``, ``budget_usd``,
            ``wait_for_nodes``, ``constants``, ``log_to``, ``providers``, ``regions``, ``spot``,
            ``catalog`` and ``prices``.

    Returns:
        The run, as from ``load_run``.

    Raises:
        UserError: the specification, the folder, the cluster or an option is wrong.

    Example:
        >>> orchestrator.sweep("my.yaml", out="runs/my", budget_usd=20)
    """
    from orchestrator.request import request_from
    from orchestrator.running.sweep import SweepOptions, run_sweep, sweep_request

    request = sweep_request(request_from(SweepOptions, {"spec": spec, **options}), _today())
    silent = dataclasses.replace(request, progress_stream=io.StringIO())
    outcome = run_sweep(silent, dt.datetime.now(dt.UTC))
    return load_run(str(outcome.folder.path))


def _today() -> dt.date:
    return dt.datetime.now(dt.UTC).date()
