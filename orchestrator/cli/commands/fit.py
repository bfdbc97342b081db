"""Commands ``fit``, ``calibrate`` and ``reproduce``."""

import argparse
import json
from pathlib import Path

from orchestrator.console import print_result, remark


def run_fit(options: argparse.Namespace) -> int:
    """Fit a run, or a CSV of observations."""
    if _is_csv(options):
        from orchestrator.reporting.csv_fit_report import fit_csv

        text, remarks = fit_csv(options.run, options.predict, options.lengths, options.out)
        for line in remarks:
            remark(line)
        print_result(text)
        return 0
    from orchestrator.run_folder.parallel_fit import fits_of
    from orchestrator.run_folder.run_folder import RunFolder

    folder = RunFolder.existing(options.run)
    fits = fits_of(folder)
    path = folder.write("fits.json", fits)
    usable = sum(fit.status.is_usable for fit in fits.fits)
    with_law = sum(family.form is not None for family in fits.families)
    print_result(
        f"{path}: {usable} of {len(fits.fits)} fits usable, {with_law} of {len(fits.families)} "
        "families with a law of the step time"
    )
    return 0


def _is_csv(options: argparse.Namespace) -> bool:
    """Whether ``fit`` is given a CSV in place of a run.

    Raises:
        TableError: it is neither, or a run with options of a CSV.
    """
    from fitting.tables.table_error import TableError

    path: Path | str = options.run
    if isinstance(path, Path) and path.suffix.casefold() == ".csv" and not path.is_dir():
        return True
    if isinstance(path, Path) and path.is_file():
        raise TableError(f"{path}: give a run folder, or observations in a file that ends in .csv")
    for name in ("predict", "lengths", "out"):
        if getattr(options, name) is not None:
            raise TableError(f"{path}: --{name} goes with a CSV of observations, not with a run")
    return False


def run_calibrate(options: argparse.Namespace) -> int:
    """Fit the clock's constants to the measured steps of runs, and write them."""
    from fitting.calibration_points import measured_points
    from fitting.clock_calibration import calibrate
    from fitting.link_calibration import fitted_links
    from gpu_catalog.catalog import load_catalog
    from orchestrator.estimating.calibration_file import calibration_text, links_text
    from orchestrator.run_folder.run_folder import RunFolder
    from orchestrator.tables.table_or_run import run_of
    from trials.records.profile import links_of, observations_of
    from trials.simulation.timing_model import EfficiencyConstants
    from trials.simulation.trace_cache import Traces

    out: Path = options.out
    folders = [RunFolder.existing(run_of(path)) for path in options.runs]
    specs = [folder.spec() for folder in folders]
    models = {name: model for spec in specs for name, model in spec.models.items()}
    gpus = {gpu.key: gpu for spec in specs for gpu in spec.merged_catalog().gpus}
    gpus |= {gpu.key: gpu for gpu in load_catalog().gpus}
    logged = [record for folder in folders for record in folder.logged()]
    points, reasons = measured_points(observations_of(logged), models, gpus, Traces(report=remark))
    for reason in reasons:
        remark(reason)
    links = fitted_links(links_of(logged), gpus)
    start = EfficiencyConstants(links=tuple(fitted.link for fitted in links))
    calibration = calibrate(points, start)
    out.write_text(f"{calibration.model_dump_json(indent=2)}\n", encoding="utf-8")
    print_result(calibration_text(calibration))
    if links:
        print_result(f"\n{links_text(links)}")
    print_result(f"\n{out}: give it to estimate and sweep as --constants {out}")
    return 0


def run_reproduce(options: argparse.Namespace) -> int:
    """Recompute the paper's tables and figures, print them and write them."""
    from fitting.paper.reproduction import reproduction
    from orchestrator.reporting.paper_figures import ReproduceError, draw
    from orchestrator.reporting.paper_report import as_markdown

    results = reproduction()
    if options.json:
        print_result(json.dumps({"figures": results.figures}, indent=2))
        return 0
    text = as_markdown(results)
    print_result(text)
    folder: Path = options.out
    try:
        drawings = draw(results, folder)
        (folder / "reproduction.md").write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ReproduceError(f"--out {folder}: cannot be written ({error.strerror})") from None
    remark(f"{folder}: reproduction.md, {', '.join(path.name for path in drawings)}")
    return 0
