"""Commands ``estimate`` and ``calibrate``."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from orchestrator.cli.options.clock import today
from orchestrator.cli.options.groups import (
    CONSTRAINTS,
    MODEL,
    PRICES,
    add_dataset,
    add_examples,
    add_overheads,
    add_recipe,
)
from orchestrator.cli.options.table import add_table
from orchestrator.cli.options.value_types import above_zero, batch_size, positive, run_folder
from orchestrator.console import print_result, remark

GPUS = f"""
--model MODEL            {MODEL}
--gpu GPU                keys of 'catalog gpus', separated by commas (default: all)
--memory-gib MEMORY_GIB  usable memory of a GPU that is not in the catalog
"""
STEP = """
--active-experts ACTIVE_EXPERTS
                         experts per token (default: the model's own)
--seq-len SEQ_LEN        tokens per example (default: the longest of --dataset)
--batch-size N|max|fastest
                         examples per step, the largest batch that fits, or the fastest of the
                         powers of two and the largest (default: max; fastest for padded examples of
                         a data set)
"""
RESULTS = f"""
--routing-draws ROUTING_DRAWS
                         number of random expert routings for the spread of the peak memory
--expandable-segments    simulate PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
--explain                print what fills the memory and takes the time
--constants FILE         constants that 'calibrate' wrote
--json                   print all results as JSON
{PRICES}{CONSTRAINTS}
"""
CALIBRATE = """
runs RUN...              run folders with measured steps
--out OUT                file to write (default: constants.json)
"""


def add_options(commands: Any) -> None:
    """Add the commands."""
    estimate = commands.add_parser(
        "estimate",
        run=run_estimate,
        help="simulate memory, largest batch, time and cost on GPUs that you do not have",
        description="Simulate fine-tuning on GPUs of the catalog by tracing the training code. "
        "Nothing is measured.",
    )
    add_table(estimate, GPUS, required=["--model"], memory_gib=above_zero)
    add_recipe(estimate, method="lora", precision="bf16")
    add_table(estimate, STEP, active_experts=positive, seq_len=positive, batch_size=batch_size)
    add_examples(estimate, "number of training examples (default: those of --dataset, or 15000)")
    add_table(estimate, "--epochs EPOCHS  number of epochs (default: 10)", epochs=positive)
    add_dataset(estimate)
    add_table(estimate, RESULTS, routing_draws=positive)
    add_overheads(estimate)
    estimate.set_defaults(gpu="all")
    calibrate = commands.add_parser(
        "calibrate",
        run=run_calibrate,
        help="fit the constants of the simulated GPU to measured steps",
        description="Fit the constants of the simulated GPU to the measured steps of runs on "
        "NVIDIA GPUs. One measured step is enough for the speed of a machine's host.",
    )
    add_table(calibrate, CALIBRATE, runs=run_folder, out=Path)
    calibrate.set_defaults(out=Path("constants.json"))


def run_estimate(options: argparse.Namespace) -> int:
    """Print the estimates; the exit code is 1 when no GPU can be estimated."""
    with contextlib.ExitStack() as stack:
        ahead = None
        if options.is_alone and options.seq_len is not None:
            # The child imports torch while this process imports the rest.
            from trials.simulation.tracing_child import started_ahead

            ahead = stack.enter_context(started_ahead(options.model, options.seq_len))
        from orchestrator.estimating.estimate_request import EstimateRequest, estimate_job
        from orchestrator.reporting.estimate_tables import as_json, as_table, explanation
        from orchestrator.request import request_of

        estimates = estimate_job(request_of(EstimateRequest, vars(options)), today(), ahead)
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
    return 0 if rows else 1


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
