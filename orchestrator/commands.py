"""One short function per command. Results go to stdout, progress and remarks to stderr."""

import argparse
import contextlib
import json
from pathlib import Path

from fitting.calibrate import CalibrationError, calibrate, measured_points
from fitting.paper import reproduction
from fitting.table_error import TableError
from gpu_catalog.catalog import CatalogError, UnknownGpuError, load_catalog
from orchestrator.calibration import calibration_text, known_constants
from orchestrator.catalog_commands import catalog_command, in_use_text
from orchestrator.cluster import ClusterError
from orchestrator.command_tools import asked_prices, given_run_path, spec_text, today
from orchestrator.dataset_command import dataset_command
from orchestrator.deploy import DeployError, deployment, write_file
from orchestrator.deploy_options import asked_deployment
from orchestrator.driver import PlanError
from orchestrator.estimate import estimates
from orchestrator.estimate_options import asked_gpus, asked_question
from orchestrator.estimate_question import EstimateError, possible_gpus
from orchestrator.estimate_tables import as_json, as_table, explanation
from orchestrator.examples import DataError
from orchestrator.gpu_check import GpuCheckError
from orchestrator.job_options import JobError
from orchestrator.join_check import JoinError, node_resources
from orchestrator.launch import LaunchError, files_left_behind, launch
from orchestrator.learn import learn_command
from orchestrator.learned_epochs import EpochsError
from orchestrator.node_notice import wait_for_notice
from orchestrator.output import remark, say
from orchestrator.place import StoreError, run_path
from orchestrator.profile_command import ProfileError, profile_command
from orchestrator.reproduce import ReproduceError, as_markdown, draw
from orchestrator.run_commands import fit, rank_run, report, status
from orchestrator.spec_file import SpecError, parse_spec, read_spec_text
from orchestrator.store import RunFolder
from orchestrator.sweep_commands import gpu_check, plan_run, sweep
from trials.learn_child import LearnError
from trials.models.model import UnknownModelError
from trials.simulation.clock import Constants
from trials.simulation.traces import TraceError, Traces

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
    if options.command == "fit" and _is_of_a_table(options):
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


def deploy(options: argparse.Namespace) -> int:
    """Writes the file of a cluster for a specification, and tells the bill."""
    prices, asked = asked_prices(options), asked_deployment(options)
    text, _ = spec_text(options.spec)
    spec = parse_spec(text, str(options.spec), base=prices.catalog)
    catalog = prices.over(spec.merged_catalog())
    made = deployment(asked, spec, text, str(options.spec), catalog)
    out: Path | None = options.out
    if out is None:
        say(made.text.rstrip("\n"))
    else:
        write_file(out, made.text)
    for line in (*made.left_out, *made.bill):
        remark(line)
    remark(made.dollars.replace("SPEC", str(options.spec)))
    remark(in_use_text(prices, catalog, today()))
    return 0


def join_check(options: argparse.Namespace) -> int:
    """Prints the resources of this machine's node, if it is what its key says."""
    prices = asked_prices(options)
    keys = [key.strip() for key in options.keys.split(",") if key.strip()]
    say(node_resources(keys, prices.catalog))
    return 0


def launch_sweep(options: argparse.Namespace) -> int:
    """Sweeps on a cluster that is there for that alone."""
    words = ["sweep", options.spec.name, *options.more]
    swept = options.parser.parse_args(words)  # ends here where the sweep would on the cluster
    text, folder = read_spec_text(options.spec), options.spec.absolute().parent
    files = [("catalog", swept.catalog), *(("prices", name) for name in swept.prices or ())]
    mistakes = ["--dry-run: starts no cluster: take 'sweep --dry-run'"] if swept.dry_run else []
    mistakes += files_left_behind([*files, ("constants", swept.constants)], folder)
    if mistakes:
        raise LaunchError("\n".join(mistakes))
    with contextlib.chdir(folder):  # as the job will be in its copy
        prices = asked_prices(swept)
        known_constants(swept.constants)
        spec = parse_spec(text, str(options.spec), base=prices.catalog)
        prices.over(spec.merged_catalog())
    out = swept.out or f"runs/{spec.name}"
    run_path(out)
    return launch(options.cluster, options.spec, words, out)


def node_notice(options: argparse.Namespace) -> int:
    """Has Ray drain this machine's node when its cloud gives notice."""
    wait_for_notice(options.provider, options.metadata, options.node_id)
    return 0


def estimate(options: argparse.Namespace) -> int:
    """Simulates a job on GPUs of the catalog."""
    prices = asked_prices(options)
    catalog = prices.over(prices.catalog)
    question = asked_question(options, catalog, today())
    asked = asked_gpus(options, catalog)
    gpus, reasons = possible_gpus(question, asked)
    for reason in reasons:
        remark(reason)
    if not gpus:
        if options.json and len(asked) > 1:
            say("[]")
        return 1
    constants = known_constants(options.constants)
    found = estimates(question, gpus, catalog, constants, Traces(ahead=options.ahead, tell=remark))
    if options.json:
        say(as_json(found, one=len(asked) == 1, explain=options.explain))
        return 0
    remark(in_use_text(prices, catalog, today()))
    say(as_table(found, question))
    if options.explain:
        for each in found:
            say(f"\n{explanation(each)}")
    return 0


def calibrate_runs(options: argparse.Namespace) -> int:
    """Fits the clock's constants to what runs have measured."""
    catalog = load_catalog()
    out: Path = options.out
    folders = [RunFolder.existing(run) for run in options.runs]
    specs = [folder.spec() for folder in folders]
    models = {name: model for spec in specs for name, model in spec.models.items()}
    gpus = {gpu.key: gpu for spec in specs for gpu in spec.merged_catalog().gpus}
    gpus |= {gpu.key: gpu for gpu in catalog.gpus}
    seen = [o for folder in folders for o in folder.observations()]
    points, reasons = measured_points(seen, models, gpus, Traces(tell=remark))
    for reason in reasons:
        remark(reason)
    calibration = calibrate(points, Constants())
    out.write_text(f"{calibration.model_dump_json(indent=2)}\n", encoding="utf-8")
    say(calibration_text(calibration))
    say(f"\n{out}: give it to estimate and sweep as --constants {out}")
    return 0


def profile(options: argparse.Namespace) -> int:
    """Says where the time of a cell's steps goes."""
    return profile_command(options, asked_prices(options).catalog)


def reproduce(options: argparse.Namespace) -> int:
    """Works out the paper's tables and figures anew."""
    told = reproduction()
    if options.json:
        say(json.dumps({"figures": told.figures}, indent=2))
        return 0
    text = as_markdown(told)
    say(text)
    folder: Path = options.out
    try:
        drawn = draw(told, folder)
        (folder / "reproduction.md").write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ReproduceError(f"--out {folder}: cannot be written ({error.strerror})") from None
    remark(f"{folder}: reproduction.md, {', '.join(path.name for path in drawn)}")
    return 0


def fit_table(options: argparse.Namespace) -> int:
    """Fits the laws to anybody's observations, in a CSV."""
    from orchestrator.table_fit import fit_csv  # noqa: PLC0415 - pandas, for tables only

    text, remarks = fit_csv(options.run, options.predict, options.lengths, options.out)
    for line in remarks:
        remark(line)
    say(text)
    return 0


def export(options: argparse.Namespace) -> int:
    """Writes a run's observations in the columns of another project."""
    from orchestrator.table_export import export_ado  # noqa: PLC0415 - pandas, for tables only

    say(export_ado(RunFolder.existing(options.run), options.out))
    return 0


def _is_of_a_table(options: argparse.Namespace) -> bool:
    """Whether ``fit`` is given a CSV, and not a run.

    Raises:
        TableError: it is neither, or a run with options of a CSV.
    """
    path: Path | str = options.run
    if isinstance(path, Path) and path.suffix.casefold() == ".csv" and not path.is_dir():
        return True
    if isinstance(path, Path) and path.is_file():
        raise TableError(f"{path}: give a run folder, or observations in a file that ends in .csv")
    for name in ("predict", "lengths", "out"):
        if getattr(options, name) is not None:
            raise TableError(f"{path}: --{name} goes with a CSV of observations, not with a run")
    return False
