"""Commands ``export`` and ``mcp``: files and answers for other programs."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_catalog.errors import UserError
from orchestrator.console import print_file, print_result, remark

if TYPE_CHECKING:
    from orchestrator.exporting.task_file import Target
    from orchestrator.exporting.training import TrainingJob


LEFT_OUT = 3
"""Cheaper offers that a task file cannot name, of which a line is printed each."""


def run_export(options: argparse.Namespace) -> int:
    """Write a run's choice as a task file, or its observations in another project's columns."""
    from orchestrator.exporting.training import ExportError
    from orchestrator.run_folder.run_folder import RunFolder

    if (options.to is None) == (options.format is None):
        raise ExportError("export: give --to or --format, one of them")
    for name in ("model", "cell", "config", "providers", "regions", "spot"):
        if getattr(options, name) is not None and options.to is None:
            raise ExportError(f"--{name} goes with --to")
    folder = RunFolder.existing(options.run)
    if options.format is not None:
        from orchestrator.reporting.ado_export import export_ado

        print_result(export_ado(folder, options.out))
        return 0
    from orchestrator.exporting.chosen_offers import best_ranked, ranked_training
    from orchestrator.exporting.task_file import OWN_TARGETS
    from orchestrator.pricing.catalog_file import OWN
    from orchestrator.pricing.offer_options import RentalOptions
    from orchestrator.request import request_of

    ranking = folder.ranking()
    if ranking is None:
        raise ExportError(f"{folder.path}: it has no ranking: run rank {folder.path}")
    prefers_own = options.to in OWN_TARGETS
    among = request_of(RentalOptions, vars(options)).filter_among(ranking.offers)
    training = ranked_training(
        ranking,
        folder.spec(),
        options.model,
        options.cell,
        among=among,
        prefers_own=prefers_own,
    )
    best = best_ranked(ranking, options.model, options.cell, among=among)
    if (training.placements[0].provider == OWN) is not (best.provider == OWN):
        remark(
            f"{options.to} takes an offer of your own first: --providers chooses others"
            if prefers_own
            else f"{options.to} rents: your own {best.cell.gpu}, which ranks higher, is left out"
        )
    if options.config is not None:
        training = configured(training, options.config, training.seq_len)
    print_file(export(training, options.to, options.out))
    return 0


def configured(training: "TrainingJob", path: Path, seq_len: int | None) -> "TrainingJob":
    """A training by the user's configuration; by TRL's command where that is a Python file.

    Args:
        training: the training.
        path: the configuration.
        seq_len: tokens that rows are limited to; None for those that the file states.

    Raises:
        UserError: the configuration cannot be read, or is of another training; a line for each
            reason.
    """
    from orchestrator.configurations.read_file import read_configuration
    from orchestrator.exporting.patched_configuration import patched

    configuration = read_configuration(path)
    configuration.check()
    if path.suffix == ".py":
        remark(f"The file has TRL's command of this recipe, because {path} is not YAML")
        if training.model.name != configuration.model:
            return training  # the command line names another one
        named = {"weights": configuration.model_name}  # a preset has those of its base model
        return dataclasses.replace(training, model=training.model.model_copy(update=named))
    own = patched(configuration, training, seq_len or configuration.tokens)
    return dataclasses.replace(training, configuration=own)


def check_export(options: argparse.Namespace) -> None:
    """Check that a file of ``--export`` has a format.

    Raises:
        ExportError: ``--export`` or ``--to`` is missing.
    """
    from orchestrator.exporting.training import ExportError

    if (options.export is None) != (options.to is None):
        raise ExportError("--export FILE and --to FORMAT go together: give both")
    if options.export is not None and options.image_tokens is not None:
        raise ExportError("--export: a training with images is not exported: leave it out")


def export(training: "TrainingJob", target: "Target", path: Path | None) -> str:
    """Write the task file of a training; return its offers and the command that starts it.

    Args:
        training: the training.
        target: format of the file.
        path: file to write; None for one named after the format.

    Raises:
        ExportError: the training or the file cannot be written.
    """
    from orchestrator.exporting.task_file import (
        DEFAULT_FILES,
        is_rented_elsewhere,
        task_file,
        write_task,
    )

    file = task_file(training, target)
    if is_rented_elsewhere(file.placements[0], target):
        remark(f"{target} rents nothing: the price is that of a rented offer")
    path = path or Path(DEFAULT_FILES[target])
    for line in file.left_out[:LEFT_OUT]:
        remark(line)
    if len(file.left_out) > LEFT_OUT:
        remark(f"{target} cannot use {len(file.left_out) - LEFT_OUT} further cheaper offers")
    text = write_task(file, path)
    if training.configuration is None:
        return text
    diff = training.configuration.diff
    return f"{text}\n{diff or f'{training.configuration.name} is in it as it is'}"


def run_mcp(options: argparse.Namespace) -> int:
    """Serve until the client closes stdin.

    Raises:
        UserError: the package mcp is not installed.
    """
    del options
    try:
        from orchestrator.serving.mcp_server import server_of
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise UserError("mcp: needs the package mcp: pip install 'finetune-cost[mcp]'") from None
    server_of(Path.cwd()).run()
    return 0
