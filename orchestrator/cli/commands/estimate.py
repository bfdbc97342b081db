"""Commands ``estimate`` and ``calibrate``."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.commands.export import check_export, export
from orchestrator.cli.options.clock import today
from orchestrator.console import print_result, remark

if TYPE_CHECKING:
    from orchestrator.estimating.estimate_records import Estimates


def run_estimate(options: argparse.Namespace) -> int:
    """Print the estimates; the exit code is 1 when no GPU can be estimated."""
    given = vars(options) if options.config is None else _with_config(options)
    if given is None:
        return 0
    with contextlib.ExitStack() as stack:
        ahead = None
        if options.is_alone and isinstance(given["seq_len"], int):
            # The child imports torch while this process imports the rest.
            from trials.simulation.tracing_child import started_ahead

            ahead = stack.enter_context(started_ahead(given["model"], given["seq_len"]))
        from orchestrator.estimating.estimate_request import (
            EstimateRequest,
            checks_of,
            estimate_job,
        )
        from orchestrator.model_names import shape_text
        from orchestrator.request import request_of

        request = request_of(EstimateRequest, given)
        check_export(options)
        if options.refuse is not None:
            options.refuse(checks_of(request).lines)
        if text := shape_text(request.model):
            remark(text)
        estimates = estimate_job(request, today(), ahead)
    _print_estimates(options, estimates)
    if options.export is not None:
        from orchestrator.exporting.chosen_offers import estimated_training

        text = export(estimated_training(estimates, request), options.to, options.export)
        (remark if options.json else print_result)(text)
    return 0 if estimates.estimated else 1


def _print_estimates(options: argparse.Namespace, estimates: "Estimates") -> None:
    from orchestrator.reporting.estimate_tables import as_json, as_table, explanation

    for reason in estimates.skipped:
        remark(reason)
    rows, is_one = estimates.estimated, len(estimates) + len(estimates.skipped) == 1
    if options.json:
        if rows or not is_one:
            print_result(as_json(rows, one=is_one, explain=options.explain))
    elif rows:
        remark(f"In use: {estimates.prices}")
        print_result(as_table(rows, estimates.question))
        if options.explain:
            for row in rows:
                print_result(f"\n{explanation(row)}")


def _with_config(options: argparse.Namespace) -> dict[str, Any] | None:
    """Options with those of the trainer's configuration; None if only its keys are explained."""
    from orchestrator.configurations.estimate_options import with_configuration
    from orchestrator.configurations.read_file import read_configuration

    configuration = read_configuration(options.config)
    if options.explain_config:
        print_result(configuration.explanation())
        return None
    configuration.check()
    given, remarks = with_configuration(configuration, vars(options))
    if options.export is not None:
        remarks.append(f"--export writes TRL's command of this recipe, not {options.config}")
    for text in remarks:
        remark(text)
    return given


def run_calibrate(options: argparse.Namespace) -> int:
    """Fit the clock's constants to the measured steps of runs, and write them."""
    from fitting.calibration_points import measured_points
    from fitting.clock_calibration import calibrate
    from gpu_catalog.catalog import load_catalog
    from orchestrator.estimating.calibration_file import calibration_text
    from orchestrator.run_folder.run_folder import RunFolder
    from trials.simulation.timing_model import EfficiencyConstants
    from trials.simulation.trace_cache import Traces

    out: Path = options.out
    folders = [RunFolder.existing(path) for path in options.runs]
    specs = [folder.spec() for folder in folders]
    models = {name: model for spec in specs for name, model in spec.models.items()}
    gpus = {gpu.key: gpu for spec in specs for gpu in spec.merged_catalog().gpus}
    gpus |= {gpu.key: gpu for gpu in load_catalog().gpus}
    observations = [o for folder in folders for o in folder.observations()]
    points, reasons = measured_points(observations, models, gpus, Traces(report=remark))
    for reason in reasons:
        remark(reason)
    calibration = calibrate(points, EfficiencyConstants())
    out.write_text(f"{calibration.model_dump_json(indent=2)}\n", encoding="utf-8")
    print_result(calibration_text(calibration))
    print_result(f"\n{out}: give it to estimate and sweep as --constants {out}")
    return 0
