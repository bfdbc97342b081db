"""Forecast of a running training, as a callback of transformers' ``Trainer``."""

from orchestrator.callback.fine_tune_forecast import FineTuneForecast

__all__ = ["FineTuneForecast"]
