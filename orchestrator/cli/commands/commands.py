"""One short function per command. Results go to stdout, progress and remarks to stderr."""

import argparse

from orchestrator.cli.commands.catalog import catalog_command
from orchestrator.cli.commands.cluster import deploy, join_check, launch_sweep, node_notice
from orchestrator.cli.commands.dataset import dataset_command
from orchestrator.cli.commands.estimate import calibrate_runs, estimate
from orchestrator.cli.commands.fit import export, fit, fit_table, is_of_a_table, reproduce
from orchestrator.cli.commands.gpu_check import gpu_check
from orchestrator.cli.commands.learn import learn_command
from orchestrator.cli.commands.plan import plan_run
from orchestrator.cli.commands.profile import profile
from orchestrator.cli.commands.run import rank_run, report, status
from orchestrator.cli.commands.sweep import sweep
from orchestrator.cli.options.inputs import given_run_path, today
from orchestrator.run_folder.run_folder import RunFolder


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
