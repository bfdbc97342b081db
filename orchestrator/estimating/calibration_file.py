"""Calibrated constants as a file, and in words."""

from pathlib import Path

from pydantic import ValidationError

from fitting.clock_calibration import Calibration, CalibrationError
from orchestrator.markdown_table import table
from trials.simulation.timing_model import EfficiencyConstants


def known_constants(path: Path | None) -> EfficiencyConstants:
    """The clock's constants: the starting points, or those that ``calibrate`` wrote.

    Raises:
        CalibrationError: the file cannot be read, or is none of these.
    """
    if path is None:
        return EfficiencyConstants()
    try:
        text = path.read_text(encoding="utf-8")
        return Calibration.model_validate_json(text).constants
    except OSError as error:
        raise CalibrationError(f"--constants {path}: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError):
        raise CalibrationError(
            f"--constants {path}: not what calibrate writes: run calibrate on measured runs"
        ) from None


def calibration_text(calibration: Calibration) -> str:
    """What came out, and how far it can be trusted."""
    rows = [
        (
            each.name,
            f"{each.start:.3g}",
            f"{each.value:.3g}" if each.fitted else "as it was: no step depends on it",
            "" if each.interval is None else f"{each.interval.low:.3g} to {each.interval.high:.3g}",
        )
        for each in calibration.fitted
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
        left = [
            (each.gpu, each.points, f"{each.mean_error:.1%}", f"{each.worst_error:.1%}")
            for each in calibration.left_out
        ]
        parts.append("Each GPU by the constants of the others, its host by one step:")
        parts.append(table(("GPU", "steps", "mean error", "worst"), left))
    else:
        parts.append("One GPU: nothing tells how far this serves another.")
    return "\n\n".join(parts)
