"""File of calibrated constants, and its description."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from fitting.clock_calibration import LARGEST_HOST_FACTOR, Calibration, CalibrationError
from fitting.link_calibration import FittedLink
from gpu_catalog.links.within_nodes import MeasuredLink, link_speed
from gpu_catalog.number_text import ends, short
from gpu_catalog.user_file import text_of
from orchestrator.markdown_table import table
from trials.simulation.timing_model import EfficiencyConstants


def constants_on(path: Path | None, host_speed: float | None) -> EfficiencyConstants:
    """Constants of ``known_constants`` on a host of a known speed, as ``host-speed`` prints it.

    Raises:
        CalibrationError: as for ``known_constants``, or no host is that slow or that fast.
    """
    constants = known_constants(path)
    if host_speed is None:
        return constants
    if not 1 / LARGEST_HOST_FACTOR <= host_speed <= LARGEST_HOST_FACTOR:
        raise CalibrationError(
            f"--host-speed {host_speed:g}: must be from {1 / LARGEST_HOST_FACTOR:g} to "
            f"{LARGEST_HOST_FACTOR:g}, as 'host-speed' prints it"
        )
    source = f"{constants.source}; host times multiplied by {host_speed:g} (--host-speed)"
    return constants.model_copy(update={"host_factor": host_speed, "source": source})


def known_constants(path: Path | None) -> EfficiencyConstants:
    """Constants of the timing model: the starting values, or those that ``calibrate`` wrote.

    Raises:
        CalibrationError: the file cannot be read, or was not written by ``calibrate``.
    """
    if path is None:
        return EfficiencyConstants()
    text = text_of(path, lambda line: CalibrationError(f"--constants {line}"))
    try:
        return Calibration.model_validate_json(text).constants
    except ValidationError:
        raise CalibrationError(
            f"--constants {path}: not what calibrate writes: run calibrate on a measured run or a "
            "table, as calibrate mine.csv --out constants.json, and give constants.json"
        ) from None


def calibration_text(calibration: Calibration) -> str:
    """Fitted constants and their errors, as Markdown."""
    rows = [
        (
            row.name,
            short(row.start),
            short(row.value) if row.fitted else "unchanged: no step depends on it",
            "" if row.interval is None else ends(row.interval.low, row.interval.high),
        )
        for row in calibration.fitted
    ]
    parts = [
        (
            f"{calibration.points} measured steps of {', '.join(calibration.gpus)}; mean absolute "
            f"error {calibration.mean_error:.1%} in sample."
        ),
        table(("constant", "start", "fitted", "95 % interval"), rows),
    ]
    if calibration.note is not None:
        parts.append(calibration.note)
    if calibration.left_out:
        held_out = [
            (row.gpu, row.points, f"{row.mean_error:.1%}", f"{row.worst_error:.1%}")
            for row in calibration.left_out
        ]
        parts.append("Each GPU predicted by the constants of the others, its host by one step:")
        parts.append(table(("GPU", "steps", "mean error", "worst"), held_out))
    else:
        parts.append("Calibrated on one GPU: the error on another GPU is unknown.")
    return "\n\n".join(parts)


def links_text(links: Sequence[FittedLink]) -> str:
    """Fitted speeds of collectives beside those of the catalog, as Markdown."""
    rows = [
        (
            row.link.name,
            row.link.collective,
            short(row.link.alpha_us),
            _small_text(row.link),
            short(row.link.bus_gb_per_second),
            short(_catalog_gb_per_second(row.link)),
            f"{row.mean_error:.1%}",
            short(row.largest_mib),
        )
        for row in links
    ]
    speeds = ("start us", "first MB at GB/s", "GB/s", "catalog GB/s")
    header = ("GPUs", "collective", *speeds, "mean error", "up to MiB")
    return f"Links, by the collectives that ran before the first steps:\n\n{table(header, rows)}"


def _small_text(link: MeasuredLink) -> str:
    if link.small_mb is None or link.small_gb_per_second is None:
        return ""
    return f"{short(link.small_mb)} at {short(link.small_gb_per_second)}"


def _catalog_gb_per_second(link: MeasuredLink) -> float:
    return link_speed(link.interconnect, link.gpus, link.collective).bytes_per_second / 1e9
