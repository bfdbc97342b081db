"""One short function per command. Results go to stdout, progress and remarks to stderr."""

import argparse

from fitting.clock_calibration import CalibrationError
from fitting.tables.table_error import TableError
from gpu_catalog.catalog import CatalogError, UnknownGpuError
from orchestrator.cli.commands.catalog import catalog_command
from orchestrator.cli.commands.cluster import deploy, join_check, launch_sweep, node_notice
from orchestrator.cli.commands.dataset import dataset_command
from orchestrator.cli.commands.estimate import calibrate_runs, estimate
from orchestrator.cli.commands.fit import export, fit, fit_table, is_of_a_table, reproduce
from orchestrator.cli.commands.gpu_check import gpu_check
from orchestrator.cli.commands.learn import learn_command
from orchestrator.cli.commands.plan import plan_run
from orchestrator.cli.commands.profile import ProfileError, profile
from orchestrator.cli.commands.run import rank_run, report, status
from orchestrator.cli.commands.sweep import sweep
from orchestrator.cli.options.inputs import given_run_path, today
from orchestrator.cli.options.offers import JobError
from orchestrator.clouds.deployment import DeployError
from orchestrator.clouds.join_check import JoinError
from orchestrator.clouds.launch import LaunchError
from orchestrator.datasets.source import DataError
from orchestrator.estimating.question import EstimateError
from orchestrator.ranking.epochs_needed import EpochsError
from orchestrator.ray_backend.cluster import ClusterError
from orchestrator.reporting.paper_report import ReproduceError
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.driver import PlanError
from orchestrator.running.gpu_check import GpuCheckError
from orchestrator.spec.spec_file import SpecError
from orchestrator.storage.run_storage import StoreError
from trials.child_process.learning_child import LearnError
from trials.records.model import UnknownModelError
from trials.simulation.trace_cache import TraceError

KNOWN_ERRORS = (
    CalibrationError,
    CatalogError,
    ClusterError,
    DataError,
    DeployError,
    EpochsError,
    EstimateError,
    GpuCheckError,
    JobError,
    JoinError,
    LaunchError,
    LearnError,
    PlanError,
    ProfileError,
    ReproduceError,
    SpecError,
    StoreError,
    TableError,
    TraceError,
    UnknownGpuError,
    UnknownModelError,
)


def run(options: argparse.Namespace) -> int:
    """Runs the command that was parsed."""
    if options.command == "fit" and is_of_a_table(options):
        return fit_table(options)
    if options.command == "fit":
        return fit(RunFolder.existing(options.run))
    if options.command == "catalog":
        return catalog_command(options, today())
    if options.command == "dataset":
        return dataset_command(options)
    if options.command == "learn":
        return learn_command(options, given_run_path(options.out, "learn"))
    others = {
        "sweep": sweep,
        "estimate": estimate,
        "export": export,
        "calibrate": calibrate_runs,
        "gpu-check": gpu_check,
        "deploy": deploy,
        "join-check": join_check,
        "launch": launch_sweep,
        "node-notice": node_notice,
        "plan": plan_run,
        "profile": profile,
        "rank": rank_run,
        "what-if": rank_run,
        "report": report,
        "status": status,
        "reproduce": reproduce,
    }
    return others[options.command](options)
