"""Commands ``gpu-check`` and ``host-speed``: measure this machine, without Ray."""

import argparse
import json
import os

from gpu_catalog.number_text import short
from orchestrator.cli.options.clock import now
from orchestrator.console import print_result, remark
from orchestrator.planning.plan import make_plan, trial_task
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.reporting.sections.memory_section import limits_section
from orchestrator.reporting.write_reports import write_derived_files
from orchestrator.request import request_of
from orchestrator.run_folder.file_names import PAGE, PLAN
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.running.gpu_check import (
    gpu_check_spec_text,
    gpu_of_this_machine,
    in_order_of_value,
    machine_with,
    time_is_left,
)
from orchestrator.running.progress import Progress
from orchestrator.running.recorder import ObservationRecorder
from orchestrator.spec.spec_file import parse_spec
from orchestrator.storage.run_storage import output_path
from trials.host.host_speed import DispatchedSteps, dispatched_steps
from trials.local_runner import run_trials_here

BUSY = 1.25  # a median step this many times the fastest shows that something else runs


def run(options: argparse.Namespace) -> int:
    """Measure the GPU of this machine, or resume an earlier check."""
    path = output_path(options.out, "gpu-check")
    prices = request_of(PriceOptions, vars(options)).in_use(RunFolder(path).catalog_rows())
    catalog = prices.over(prices.catalog)
    gpu = gpu_of_this_machine(catalog)
    text = gpu_check_spec_text(gpu, catalog)
    spec = parse_spec(text, "gpu-check", base=prices.catalog)
    folder = open_run(path, text, spec, prices.rows)
    machine = machine_with(gpu, len(os.sched_getaffinity(0)))
    with ObservationWriter(folder) as writer:
        observations = folder.observations()
        plan = make_plan(spec, catalog, machine, observations)
        folder.write(PLAN, plan)
        cells = in_order_of_value(spec, plan)
        threads = machine.threads(gpu)
        with Progress(cells, complete=len(plan.complete), earlier=observations) as progress:
            recorder = ObservationRecorder(writer, progress)
            # Made one by one, as trials begin: earlier trials help to search.
            tasks = (
                trial_task(
                    spec, catalog, cell, [*observations, *recorder.observations], threads=threads
                )
                for cell in cells
            )
            run_trials_here(tasks, recorder, time_is_left(options.seconds, recorder.observations))
        plan = make_plan(spec, catalog, machine, folder.observations())
        folder.write(PLAN, plan)
    write_derived_files(folder, spec, catalog, plan, now())
    print_result(limits_section(spec.all_cells(), folder.observations()))
    left = [cell for cell in cells if cell in plan.pending]
    print_result(
        f"\n{len(cells) - len(left)} of {len(cells)} cells done; the report: {folder.path / PAGE}"
    )
    if left:
        remark(f"{len(left)} cells are left: run the same command again to resume")
    return 0


def run_host_speed(options: argparse.Namespace) -> int:
    """Measure the host of this machine."""
    steps = dispatched_steps()
    if options.json:
        record = steps.model_dump() | {"host_speed": steps.host_factor}
        print_result(json.dumps(record, indent=2))
    else:
        print_result(_host_speed_text(steps))
    return 0


def _host_speed_text(steps: DispatchedSteps) -> str:
    fastest, speed = min(steps.seconds), short(steps.host_factor, 2)
    per_operator = short(1e6 * fastest / steps.operators, 2)
    text = (
        f"**Host speed: {speed}.** The fastest of {len(steps.seconds)} steps took "
        f"{short(1e3 * fastest)} ms of the processor, {per_operator} us for "
        f"each of {steps.operators:,} operators; the clock assumes "
        f"{short(1e3 * steps.assumed_seconds)} ms.\n\n"
        f"To estimate steps on this machine: estimate … --host-speed {speed}\n\n"
        "CUDA's launches are not in it, so the interval of a step time stays as it is: one "
        "measured step and 'calibrate' say more."
    )
    if steps.median_factor > BUSY * steps.host_factor:
        text += (
            f"\n\nThe median step took {short(steps.median_factor, 2)} times as long as assumed: "
            "other programs slow this machine. Run it again when it is idle."
        )
    return text
