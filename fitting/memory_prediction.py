"""Predictions of the largest batch and of peak memory by the fitted memory law."""

import numpy as np

from fitting.laws.equations import max_batch_affine
from fitting.laws.fit_result import Fit, Law, Prediction
from fitting.numerics.arrays import FloatArray
from fitting.numerics.intervals import LEVEL
from fitting.numerics.least_squares import t_quantile

ROUNDING = 1e-9  # rounding error of a whole number of examples


def predict_largest_batch(fit: Fit, usable_gib: float, seq_len: int) -> Prediction:
    """Predict the largest batch by MEMORY_AFFINE, rounded down, with a 90 % interval.

    Low and high are what fits in ``usable -+ q * sqrt(x^T C x + (s * usable)**2)``, with x the
    terms of the law there, C the covariance, s the residual standard deviation relative to the peak
    and q the 95 % quantile of Student's t.

    Args:
        fit: fit of MEMORY_AFFINE.
        usable_gib: memory that tensors may take, in 2**30 bytes: without the allocator's overhead
            and without the memory that other processes hold.
        seq_len: padded tokens per example.

    Raises:
        ValueError: the fit failed, is of another law, or has no growth with the tokens.
    """
    model_gib, per_token = _memory_law(fit)
    if per_token == 0:
        raise ValueError(f"{fit.key} predicts no batch: its peaks do not grow with the tokens")
    half = _half_peak(fit, max(usable_gib - model_gib, 0.0) / per_token, usable_gib)
    low, value, high = (
        float(largest(usable, seq_len, model_gib, per_token))
        for usable in (usable_gib - half, usable_gib, usable_gib + half)
    )
    inputs = {"seq_len": float(seq_len), "tokens": value * seq_len}
    return Prediction(
        value=value,
        low=low,
        high=high,
        extrapolated=any(not r.low <= inputs[r.name] <= r.high for r in fit.input_range),
    )


def predict_peak(fit: Fit, tokens: float) -> Prediction:
    """Predict peak memory by MEMORY_AFFINE, in 2**30 bytes, with a 90 % interval.

    ``M0 + m * tokens -+ q * sqrt(x^T C x + (s * peak)**2)``, as in ``predict_largest_batch``.

    Args:
        fit: fit of MEMORY_AFFINE.
        tokens: padded tokens of a step.

    Raises:
        ValueError: the fit failed or is of another law.
    """
    model_gib, per_token = _memory_law(fit)
    peak = model_gib + per_token * tokens
    half = _half_peak(fit, tokens, peak)
    fitted = next(r for r in fit.input_range if r.name == "tokens")
    return Prediction(
        value=peak,
        low=max(peak - half, 0.0),
        high=peak + half,
        extrapolated=not fitted.low <= tokens <= fitted.high,
    )


def _memory_law(fit: Fit) -> tuple[float, float]:
    """Memory of the model and of a token, in 2**30 bytes."""
    if fit.law is not Law.MEMORY_AFFINE:
        raise ValueError(f"{fit.key} predicts no memory: give a {Law.MEMORY_AFFINE}")
    if fit.rmse is None:
        raise ValueError(f"{fit.key} predicts nothing ({fit.status}: {fit.note}): {fit.remedy}")
    model_gib, per_token = (p.value for p in fit.parameters)
    return model_gib, per_token


def _half_peak(fit: Fit, tokens: float, peak_gib: float) -> float:
    """Half-width of the 90 % interval of a peak."""
    assert fit.rmse is not None
    terms = np.array([1.0, tokens])
    residual_variance = fit.rmse**2 * fit.points / fit.degrees_of_freedom
    variance = float(terms @ np.array(fit.covariance) @ terms) + residual_variance * peak_gib**2
    return t_quantile((1 + LEVEL) / 2, fit.degrees_of_freedom) * float(np.sqrt(variance))


def largest(
    usable_gib: FloatArray | float,
    seq_len: FloatArray | float,
    model_gib: float,
    per_token: float,
) -> FloatArray:
    """Number of examples that fit, rounded down, not below zero."""
    unrounded = max_batch_affine(usable_gib, model_gib, seq_len, 1.0, per_token, 0.0)
    return np.asarray(np.maximum(np.floor(unrounded + ROUNDING), 0.0))
